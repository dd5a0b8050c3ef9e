"""What a batch saves: TTFT per request of prompts one by one against the same prompts in one pass, interleaved.

python -m benchmarks.batches --threads 1
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch

import kvreuse as kr
from benchmarks.arguments import save
from experiments.environment import origin

METHODS: tuple[kr.FullRecompute | kr.ChunkReuse, ...] = (kr.FullRecompute(), kr.FullReuse(), kr.CacheBlend())


def prompts(count: int) -> list[kr.RagPrompt]:
    """Random ids: a prefix of 20 tokens, four chunks of 85 to 100, a question of 25."""
    g = torch.Generator().manual_seed(0)

    def ids(n: int) -> torch.Tensor:
        return torch.randint(100, 40000, (n,), generator=g)

    return [kr.RagPrompt(ids(20), [ids(85 + 5 * j) for j in range(4)], ids(25)) for _ in range(count)]


def main() -> None:
    """Print a row per method: seconds per request, and the median of the ratios of single to batched."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/batches.json"))
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model, batch, store = kr.load_model(options.model), prompts(options.batch_size), kr.KVStore("16GiB")
    kr.CacheBlend().encode(model, batch, store)
    timed: dict[str, list[tuple[float, float]]] = {m.label: [] for m in METHODS}
    for round_ in range(options.repeats + 1):  # the first warms up
        for method in METHODS:
            single = statistics.fmean(method.prefill(model, prompt, store).ttft_s for prompt in batch)
            together = method.prefill(model, batch, store).ttft_s / len(batch)
            if round_:
                timed[method.label].append((single, together))
    save(options.out, {"batch_size": len(batch), **origin(options.model, model), "alone, together": timed})
    print(f"| method | alone, s | in a batch of {len(batch)}, s | ratio |\n|---|---|---|---|")
    for label, runs in timed.items():
        alone, together = (statistics.median(column) for column in zip(*runs, strict=True))
        print(f"| {label} | {alone:.3f} | {together:.3f} | {statistics.median(a / b for a, b in runs):.2f} |")


if __name__ == "__main__":
    main()
