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

All numbers but the first column are CPU time of the thread, which other programs on a busy machine change little.
Python's garbage collector runs in the middle of whatever makes one object too many: ``max`` and ``over 1 ms`` are
with its pauses, ``without pauses`` is the same steps less them. ``between steps``: as many steps again, with the
collector run between them (`ServerOptions.collect_between`); its pauses are then nobody's step.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

import kvreuse as kr
from benchmarks.arguments import save
from kvreuse.ragcache.collector import Collector
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


class Pauses:
    """Adds up the collector's CPU time, seconds, while it is entered."""

    def __init__(self) -> None:
        self.seconds = self.longest = self._started = 0.0

    def __enter__(self) -> Pauses:
        gc.callbacks.append(self._on_collection)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._started = time.thread_time()
            return
        pause = time.thread_time() - self._started
        self.seconds, self.longest = self.seconds + pause, max(self.longest, pause)


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
class Times:
    """What some steps took, seconds: by part, in all, and the collector's share of that; its longest pause."""

    parts: list[list[float]]
    pauses: list[float]
    longest_pause: float

    @property
    def total(self) -> list[float]:
        """Of every step, pauses included."""
        return [sum(row) for row in self.parts]

    @property
    def without(self) -> list[float]:
        """Of every step, pauses not included."""
        return [total - pause for total, pause in zip(self.total, self.pauses, strict=True)]


def take(steps: Steps, count: int, between: Callable[[], None] | None = None) -> Times:
    """Take ``count`` steps; ``between`` is called behind each."""
    parts, shares = [], []
    with Pauses() as pauses:
        for _ in range(count):
            before = pauses.seconds
            parts.append(steps.step())
            shares.append(pauses.seconds - before)
            if between is not None:
                between()
    return Times(parts, shares, pauses.longest)


def over(seconds: list[float]) -> str:
    """How many are over 1 ms, and the largest in ms."""
    return f"{sum(t >= 1e-3 for t in seconds)} ({1e3 * max(seconds):.2f})"


def measure(name: str, num_nodes: int, num_queued: int, num_steps: int) -> list[str]:
    """Fill a tree, warm up for a tenth of the steps, and time the rest; the table's cells."""
    traffic = requests(max(50, num_nodes // 3), seed=1)
    tree = filled_tree(POLICIES[name], num_nodes, traffic)
    steps = Steps(tree, num_queued, traffic)
    for _ in range(num_steps // 10):
        steps.step()
    steps.wall.clear()
    evicted = [tier.evictions for tier in tree.tiers]
    automatic = take(steps, num_steps)
    wall = statistics.median(steps.wall)
    evictions = "/".join(f"{(t.evictions - e) / num_steps:.1f}" for t, e in zip(tree.tiers, evicted, strict=True))
    collector = Collector()
    collector.start()
    between = take(steps, num_steps, collector.between)
    collector.stop()
    if num_nodes <= 10_000:
        tree.check_integrity()
    total = sorted(automatic.total)
    parts = [statistics.median(column) for column in zip(*automatic.parts, strict=True)]
    times = [wall, statistics.median(total), total[int(0.99 * len(total))], *parts]
    pauses = [f"{1e3 * t.longest_pause:.1f}" for t in (automatic, between)]
    counts = [over(total), over(automatic.without), pauses[0], over(between.total), pauses[1]]
    return [name, f"{tree.num_nodes:,}", *(f"{1e6 * t:.0f}" for t in times), *counts, evictions]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="1000,10000,100000", help="tree sizes; 1000000 takes minutes to fill")
    parser.add_argument("--queued", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--policies", default=";".join(POLICIES), help=f"separated by ';': {'; '.join(POLICIES)}")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/scheduling.json"))
    args = parser.parse_args()
    names = [name.strip() for name in args.policies.split(";")]
    unknown = [name for name in names if name not in POLICIES]
    if unknown:
        sys.exit(f"--policies: {unknown[0]!r} is not one of {'; '.join(POLICIES)}")
    print(f"CPU time of {args.steps:,} scheduling steps, microseconds; {args.queued:,} requests queued\n")
    heads = ["policy", "nodes", "median by the clock", "median", "p99", *PARTS, "over 1 ms (max, ms)"]
    heads += ["without pauses", "longest pause, ms", "between steps: over 1 ms (max, ms)", "longest pause, ms"]
    heads += ["evictions per step, GPU/host"]
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    rows = []
    for num_nodes in [int(n) for n in args.nodes.split(",")]:
        for name in names:
            rows.append(measure(name, num_nodes, args.queued, args.steps))
            print("| " + " | ".join(rows[-1]) + " |", flush=True)
    save(args.out, {"steps": args.steps, "queued": args.queued, "heads": heads, "rows": rows})


if __name__ == "__main__":
    main()
