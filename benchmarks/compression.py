"""What compressing stored K/V saves and costs: bytes per token, and how far the answer moves.

    python -m benchmarks.compression [--model demo] [--dataset musique] [--cases 8] [--threads N]

Per layout and method: bytes per stored token; KL divergence (nats per token) to full recompute over its own greedy
answer, and to the same method over plain K/V; load + rotate time from memory. Means over cases with 95% bootstrap
intervals, times are medians.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
from tqdm import tqdm

import kvreuse as kr
from benchmarks.arguments import save
from experiments.datasets import load_dataset, paragraph_chunks
from kvreuse.metrics import bootstrap_interval, kl_divergence
from kvreuse.store.codec import KVDtype

METHODS: tuple[kr.ReuseMethod, ...] = (kr.FullReuse(), kr.CacheBlend())
LAYOUTS: tuple[KVDtype | None, ...] = (None, "bf16", "int8", "int4")


def main() -> None:
    """Measure, print the table, save the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device")
    parser.add_argument("--dataset", default="musique")
    parser.add_argument("--data-dir")
    parser.add_argument("--cases", type=int, default=8)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/compression.json"))
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    model = kr.load_model(args.model, device=args.device)
    dataset = load_dataset(args.dataset, data_dir=args.data_dir, limit=args.cases)
    rows = []
    for case in tqdm(dataset.cases, desc="cases"):
        question = dataset.task.question_template.format(question=case.question)
        chunks = paragraph_chunks(case)
        prompt = kr.RagPrompt.from_texts(model, system=dataset.task.system, chunks=chunks, question=question)
        rows += _case(model, prompt)
    save(args.out, {"model": model.name, "source": dataset.source, "rows": rows})
    print(f"{model.name}, {dataset.source}, {len(dataset.cases)} cases")
    print(table(rows))


def _case(model: kr.ReuseModel, prompt: kr.RagPrompt) -> list[dict[str, object]]:
    full = kr.FullRecompute().prefill(model, prompt)
    answer = model.generate(full, max_new_tokens=16).token_ids or [full.first_token]
    truth = model.score(full, answer)
    plain: dict[kr.ReuseMethod, torch.Tensor] = {}
    rows: list[dict[str, object]] = []
    for layout in LAYOUTS:
        store = kr.KVStore("8GiB", kv_dtype=layout)
        for method in METHODS:
            method.encode(model, prompt, store)
            method.prefill(model, prompt, store)  # warm-up
            result = method.prefill(model, prompt, store)
            logprobs = model.score(result, answer)
            plain.setdefault(method, logprobs)
            rows.append(
                {
                    "layout": layout or "plain",
                    "method": type(method).__name__,
                    "bytes_per_token": store.stats().num_bytes / prompt.num_context,
                    "kl": kl_divergence(truth, logprobs),
                    "kl_to_plain": kl_divergence(plain[method], logprobs),
                    "load_s": result.trace.stages["load_s"] + result.trace.stages["rotate_s"],
                }
            )
    return rows


def table(rows: list[dict[str, object]]) -> str:
    """Means with intervals."""
    lines = ["| layout | method | bytes per token | KL to full recompute | KL to plain K/V | load + rotate, ms |"]
    lines.append("|" + "---|" * 6)
    for layout in (layout or "plain" for layout in LAYOUTS):
        for method in (type(m).__name__ for m in METHODS):
            own = [r for r in rows if (r["layout"], r["method"]) == (layout, method)]

            def values(what: str, own: list[dict[str, object]] = own) -> list[float]:
                return [float(str(r[what])) for r in own]

            kl = bootstrap_interval(values("kl"))
            lines.append(
                f"| {layout} | {method} | {statistics.mean(values('bytes_per_token')):,.0f} "
                f"| {kl:.4f} | {statistics.mean(values('kl_to_plain')):.1e} "
                f"| {statistics.median(values('load_s')) * 1e3:.0f} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
