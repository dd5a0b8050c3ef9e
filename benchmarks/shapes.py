"""What the number of chunks and the size of a batch do to TTFT, beside what has to be computed.

    python -m benchmarks.shapes [--context 1536] [--chunks 2,4,8,16] [--batches 1,2,4,8] [--repeats 3] [--threads N]

Chunks: one context, cut into ever more pieces; K/V in memory. Batches: the prompts of `benchmarks.batches`, of which a
batch is prefilled in one pass; TTFT, FLOP and floor are per request. Interleaved rounds, medians.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from tqdm import tqdm

import kvreuse as kr
from benchmarks.arguments import load, parser_of, save
from benchmarks.batches import METHODS, prompts
from benchmarks.flops import Costs
from benchmarks.measured import Measured, measure
from benchmarks.rates import Meter
from experiments.environment import origin
from experiments.timed import equal_chunks


def whole_numbers(text: str) -> list[int]:
    """Comma-separated whole numbers."""
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Measure both, print a table each, save the rounds as JSON."""
    parser = parser_of(__doc__, "shapes")
    parser.add_argument("--context", type=int, default=1536, help="tokens of all chunks together")
    parser.add_argument("--chunks", type=whole_numbers, default=[2, 4, 8, 16])
    parser.add_argument("--batches", type=whole_numbers, default=[1, 2, 4, 8])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    model = load(args)
    costs = Costs.of(model)
    by_chunks, by_batch = _by_chunks(args, model, costs), _by_batch(args, model, costs)
    header = {"context": args.context, "methods": [repr(m) for m in METHODS], **origin(args.model, model)}
    saved = {"header": header}
    for name, found in (("chunks", by_chunks), ("batch", by_batch)):
        saved[name] = {str(size): m.as_json() for size, m in found.items()}
    save(args.out, saved)
    print(json.dumps(header))
    print(table("chunks", by_chunks), end="\n\n")
    print(table("batch", by_batch, per_request=True))
    print(f"rounds saved to {args.out}")


def _by_chunks(args: argparse.Namespace, model: kr.ReuseModel, costs: Costs) -> dict[int, Measured]:
    found = {}
    for count in tqdm(args.chunks, desc="chunks"):
        prompt, _ = equal_chunks(model, count, args.context // count, data_dir=args.data_dir)
        found[count] = _measure(args, model, costs, prompt, prompt.num_tokens)
    return found


def _by_batch(args: argparse.Namespace, model: kr.ReuseModel, costs: Costs) -> dict[int, Measured]:
    found = {}
    for size in tqdm(args.batches, desc="batches"):
        batch = prompts(size)
        found[size] = _measure(args, model, costs, batch, batch[0].num_tokens)
    return found


def _measure(args: argparse.Namespace, model: kr.ReuseModel, costs: Costs, what: Any, num_tokens: int) -> Measured:
    """A prompt or a batch, warmed up."""
    store = kr.KVStore("8GiB")

    def run(method: kr.ReuseMethod) -> kr.Prefill | kr.BatchPrefill:
        return method.prefill(model, what, store)

    for method in METHODS:
        method.encode(model, what, store)
        run(method)
    return measure(METHODS, run, costs, Meter(model, num_tokens), args.repeats)


def table(name: str, found: dict[int, Measured], per_request: bool = False) -> str:
    """A row per size: per method seconds by the meter's clock, FLOP, and the fraction of the floor reached."""
    each = ", per request" if per_request else ""
    heads = [f"{m.label} s{each} (GFLOP; of floor)" for m in METHODS]
    lines = [f"| {name} | " + " | ".join(heads) + " | CacheBlend's speed-up |", "|---|" + "---|" * (len(heads) + 1)]
    for size, m in found.items():
        share = size if per_request else 1
        cells = []
        for method in map(repr, METHODS):
            flops = m.work[method].flops / share / 1e9
            cells.append(f"{m.taken_s(method) / share:.3g} ({flops:.0f}; {m.reached(method):.0%})")
        gain = m.speed_up(repr(METHODS[-1]), repr(METHODS[0]))
        lines.append(f"| {size} | " + " | ".join([*cells, f"{gain.mean:.2f}"]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
