"""HybridReuse against both parents on shuffled-document requests: time to first token and divergence.

    OMP_NUM_THREADS=1 python -m benchmarks.hybrid [--cases 30] [--history 30] [--documents 6] [--ratio 0.15]

Each case of 2WikiMultihopQA: its documents were requested ``--history`` times before, in random orders, and the tree
kept the first ``--depth`` of each (exact; the paper keeps top-3 prefixes too); the chunk store has every document. Then
comes the same question with one more random order. The tree alone, CacheBlend alone and both together serve it from the
same K/V, all in memory, in rotating order; medians over ``--repeats`` rounds; the tree learns nothing from what is
timed. Beside the TTFT stands the processor time of the whole call, which other programs on the machine disturb less.
KL is against full recompute, over its greedy answer. Means over cases with 95% bootstrap intervals; differences are
paired. One thread.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

import kvreuse as kr
from experiments.datasets import load_dataset, paragraph_chunks
from kvreuse.intervals import bootstrap_interval, paired_interval
from kvreuse.metrics import kl_divergence

Record = dict[str, float]


def measure(
    model: kr.ReuseModel, prompt: kr.RagPrompt, tree: kr.TreeCache, chunks: kr.KVStore, args: argparse.Namespace
) -> tuple[dict[str, Record], int]:
    """TTFT (median of repeats) and KL of the three methods; how many documents the tree had."""
    both = kr.HybridStore(tree, chunks)
    methods: list[tuple[str, kr.ReuseMethod, object]] = [
        ("tree", kr.RagCache(insert=False), tree),
        ("CacheBlend", kr.CacheBlend(ratio=args.ratio), chunks),
        ("both", kr.HybridReuse(ratio=args.ratio, grow=0), both),
    ]
    full = kr.FullRecompute().prefill(model, prompt, kr.KVStore())
    tokens = model.generate(full, args.score_tokens).token_ids or [full.first_token]
    reference = model.score(full, tokens)
    wall_s, cpu_s = ({name: [] for name, _, _ in methods} for _ in range(2))  # type: dict[str, list[float]]
    records: dict[str, Record] = {}
    for number in range(args.repeats + 1):
        shift = number % len(methods)
        for name, method, store in methods[shift:] + methods[:shift]:
            started = time.process_time()
            result = method.prefill(model, prompt, store)  # type: ignore[arg-type]
            used_s = time.process_time() - started
            if number == 0:  # warm-up: the answer is scored, the time is not taken
                records[name] = {"kl": kl_divergence(reference, model.score(result, tokens))}
            else:
                wall_s[name].append(result.ttft_s)
                cpu_s[name].append(used_s)
    for name in wall_s:
        records[name] |= {"ttft_s": statistics.median(wall_s[name]), "cpu_s": statistics.median(cpu_s[name])}
    return records, tree.tree.match(tree.documents(prompt)).cached_documents


def table(records: Sequence[tuple[dict[str, Record], int]]) -> str:
    """Means with intervals, over all cases and by the depth of the tree's match."""
    lines = [
        "| documents the tree had | cases | method | TTFT ms | processor ms | KL, nats |",
        "|---|---|---|---|---|---|",
    ]
    depths = sorted({depth for _, depth in records})
    for title, part in [("any", records)] + [(str(d), [r for r in records if r[1] == d]) for d in depths]:
        for name in part[0][0]:
            cells = []
            for key, scale, digits in (("ttft_s", 1e3, 0), ("cpu_s", 1e3, 0), ("kl", 1.0, 4)):
                cells.append(f"{bootstrap_interval([r[name][key] * scale for r, _ in part]):.{digits}f}")
            lines.append("| " + " | ".join([title, str(len(part)), name, *cells]) + " |")
    lines.append("")
    for parent in ("tree", "CacheBlend"):
        for key, scale, unit in (("ttft_s", 1e3, "ms"), ("cpu_s", 1e3, "ms"), ("kl", 1.0, "nats")):
            both, other = ([r[name][key] * scale for r, _ in records] for name in ("both", parent))
            gap = paired_interval(both, other)
            lines.append(f"both - {parent}, {key}: {gap:.4g} {unit}")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=30)
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--history", type=int, default=30, help="earlier requests for the same documents")
    parser.add_argument("--depth", type=int, default=3, help="documents of a request that the tree keeps")
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--score-tokens", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/hybrid.json"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = kr.load_model("demo")
    dataset = load_dataset("2wikimqa", limit=args.cases)
    print(f"{len(dataset.cases)} cases of {dataset.source}; {model.name}, {args.threads} thread(s)")
    records: list[tuple[dict[str, Record], int]] = []
    for number, case in enumerate(tqdm(dataset.cases)):
        rng = random.Random(number)
        texts = paragraph_chunks(case, args.documents)
        question = f"Question: {case.question}\nAnswer:"

        def request(order: Sequence[str], question: str = question) -> kr.RagPrompt:
            system = dataset.task.system
            return kr.RagPrompt.from_texts(model, system=system, chunks=order, question=question)

        first = request(texts)
        tree = kr.TreeCache(model, first.prefix, "4GiB", 0, max_depth=args.depth)
        chunks = kr.KVStore("2GiB")
        for _ in range(args.history):
            tree.prefill(request(rng.sample(texts, len(texts))[: args.depth]))
        kr.CacheBlend().encode(model, first, chunks)
        records.append(measure(model, request(rng.sample(texts, len(texts))), tree, chunks, args))
        args.out.parent.mkdir(parents=True, exist_ok=True)
        options = {k: str(v) for k, v in vars(args).items()}
        args.out.write_text(json.dumps({"options": options, "source": dataset.source, "records": records}))
    print(table(records))


if __name__ == "__main__":
    main()
