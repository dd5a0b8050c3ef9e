"""How long a scheduling step takes: match, update, reorder, speculate (RAGCache, table 4: under a millisecond).

    python -m benchmarks.scheduling [--nodes 1000,10000,100000] [--queued 1000] [--steps 3000] [--policies PGDSF,LRU]

The tree is filled by serving skewed top-2 requests until it has the given number of nodes; then the GPU tier holds a
tenth of their tokens, the host half, the rest is free, so every step evicts from both tiers. One step is all that is
decided for one request, with ``--queued`` requests waiting:

    speculate   four search stages with changing documents, and the final ones: generations queued and taken back
    reorder     the next request is taken from the queue
    match       its documents are matched, locked, promoted to GPU
    insert      what was missing is inserted; GPU and host evict
    update      frequencies, costs and priorities; the locks are released

All numbers but the first column are CPU time of the thread, which other programs on a busy machine do not change.
Garbage collection stays on: what it takes is in the slowest steps.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

import kvreuse as kr
from kvreuse.ragcache.scheduler import ReorderQueue
from kvreuse.ragcache.speculative import Decision, Generation, Speculator

POLICIES: dict[str, kr.Policy] = {
    "PGDSF": kr.PGDSF(),
    "PGDSF, sliding window": kr.PGDSF(window=kr.SlidingWindow(10_000)),
    "PGDSF, halving window": kr.PGDSF(window=kr.HalvingWindow(10_000)),
    "GDSF": kr.GDSF(),
    "LRU": kr.LRU(),
    "LFU": kr.LFU(),
    "LFU, not persistent": kr.LFU(persistent=False),
}
PARTS = ("speculate", "reorder", "match", "insert", "update")
QUESTION_TOKENS = 32
SYSTEM_TOKENS = 64
MEAN_TOKENS = 300  # of a document


def cost(alpha: int, beta: int) -> float:
    """Seconds of a prefill on some GPU: linear in the new tokens, with an attention term."""
    return 2e-3 + 5e-5 * beta + 1e-9 * beta * (alpha + beta / 2)


def requests(num_documents: int, seed: int) -> Iterator[tuple[kr.Document, ...]]:
    """Endless top-2 requests; the rank-r document is retrieved in proportion to 1 / r^0.8."""
    rng = np.random.default_rng(seed)
    sizes = np.random.default_rng(0).integers(100, 2 * MEAN_TOKENS - 100, num_documents)
    weights = 1 / np.arange(1, num_documents + 1) ** 0.8
    cumulative = np.cumsum(weights / weights.sum())
    while True:
        drawn = np.searchsorted(cumulative, rng.random((4096, 2)))
        for pair in np.minimum(drawn, num_documents - 1).tolist():
            yield tuple(kr.Document(number, int(sizes[number])) for number in pair)


def filled_tree(policy: kr.Policy, num_nodes: int, traffic: Iterator[tuple[kr.Document, ...]]) -> kr.KnowledgeTree:
    """A tree of ``num_nodes`` nodes, both tiers full."""
    tokens = num_nodes * MEAN_TOKENS
    tree = kr.KnowledgeTree(
        SYSTEM_TOKENS + tokens // 10,
        tokens // 2,
        policy=policy,
        cost=cost,
        system_tokens=SYSTEM_TOKENS,
        max_nodes=num_nodes,
    )
    with tqdm(total=num_nodes, desc=f"filling {num_nodes:,} nodes", leave=False) as bar:
        while tree.num_nodes < num_nodes or tree.host.evictions == 0:
            tree.serve(next(traffic), QUESTION_TOKENS)
            if tree.now % 1000 == 0:
                bar.update(tree.num_nodes - bar.n)
    return tree


class Steps:
    """Takes scheduling steps and times their parts in CPU time; ``wall``: what each step took by the clock. Seconds."""

    def __init__(self, tree: kr.KnowledgeTree, num_queued: int, traffic: Iterator[tuple[kr.Document, ...]]) -> None:
        self.tree, self.traffic = tree, traffic
        self.queue: ReorderQueue[Generation] = ReorderQueue(tree)
        self.speculator = Speculator(max_prefill_batch=2 * num_queued + 2)  # never refuses: the most work there is
        self.ids = itertools.count()
        self.wall: list[float] = []
        while len(self.queue) < num_queued:
            self._carry_out(self.speculator.final(next(self.ids), next(traffic)))

    def _carry_out(self, decision: Decision) -> None:
        if decision.cancel is not None:
            self.queue.remove(decision.cancel)
        if decision.start is not None:
            self.queue.push(decision.start, decision.start.documents, QUESTION_TOKENS)

    def step(self) -> list[float]:
        """Seconds of each of `PARTS`."""
        tree, number = self.tree, next(self.ids)
        candidates = [next(self.traffic) for _ in range(4)]
        candidates[3] = candidates[2]  # the last stage brings nothing new, as the final list
        started, times = time.perf_counter(), [time.thread_time()]
        for documents in candidates:
            self._carry_out(self.speculator.stage(number, documents, len(self.queue)))
        self._carry_out(self.speculator.final(number, candidates[3]))
        times.append(time.thread_time())
        served = self.queue.pop()
        times.append(time.thread_time())
        match = tree.acquire(served.documents)
        tree.promote(match)
        times.append(time.thread_time())
        match = tree.insert(match)
        times.append(time.thread_time())
        tree.update(match, QUESTION_TOKENS)
        tree.release(match)
        times.append(time.thread_time())
        self.wall.append(time.perf_counter() - started)
        return [after - before for before, after in itertools.pairwise(times)]


@dataclass(frozen=True)
class Row:
    """What one tree's steps took, in microseconds."""

    policy: str
    num_nodes: int
    wall: float
    total: list[float]
    parts: list[float]
    evictions: tuple[float, float]

    def cells(self) -> list[str]:
        """For the table."""
        total = sorted(self.total)
        above = sum(t >= 1000 for t in total)
        numbers = [self.wall, statistics.median(total), total[int(0.99 * len(total))], total[-1], *self.parts]
        evictions = "/".join(f"{e:.1f}" for e in self.evictions)
        return [self.policy, f"{self.num_nodes:,}", *(f"{n:.0f}" for n in numbers), evictions, f"{above}/{len(total)}"]


def measure(name: str, num_nodes: int, num_queued: int, num_steps: int) -> Row:
    """Fill a tree, warm up for a tenth of the steps, and time the rest."""
    traffic = requests(max(50, num_nodes // 3), seed=1)
    tree = filled_tree(POLICIES[name], num_nodes, traffic)
    steps = Steps(tree, num_queued, traffic)
    for _ in range(num_steps // 10):
        steps.step()
    steps.wall.clear()
    evicted = [tier.evictions for tier in tree.tiers]
    times = [steps.step() for _ in range(num_steps)]
    rate = tuple((tier.evictions - e) / num_steps for tier, e in zip(tree.tiers, evicted, strict=True))
    if num_nodes <= 10_000:
        tree.check_integrity()
    parts = [1e6 * statistics.median(column) for column in zip(*times, strict=True)]
    wall = 1e6 * statistics.median(steps.wall)
    return Row(name, tree.num_nodes, wall, [1e6 * sum(row) for row in times], parts, (rate[0], rate[1]))


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="1000,10000,100000", help="tree sizes; 1000000 takes minutes to fill")
    parser.add_argument("--queued", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--policies", default=";".join(POLICIES), help=f"separated by ';': {'; '.join(POLICIES)}")
    args = parser.parse_args()
    names = [name.strip() for name in args.policies.split(";")]
    unknown = [name for name in names if name not in POLICIES]
    if unknown:
        sys.exit(f"--policies: {unknown[0]!r} is not one of {'; '.join(POLICIES)}")
    print(f"microseconds per scheduling step, {args.queued:,} requests queued, {args.steps:,} steps\n")
    heads = [
        "policy",
        "nodes",
        "median by the clock",
        "median",
        "p99",
        "max",
        *PARTS,
        "evictions per step, GPU/host",
        "steps over 1 ms",
    ]
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    for num_nodes in [int(n) for n in args.nodes.split(",")]:
        for name in names:
            print("| " + " | ".join(measure(name, num_nodes, args.queued, args.steps).cells()) + " |", flush=True)


if __name__ == "__main__":
    main()
