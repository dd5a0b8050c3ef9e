"""How close every method comes to its own floor: what it has to compute at the rates this machine reaches.

    python -m benchmarks.floor [--ratio 0.15] [--chunks 6] [--chunk-tokens 512] [--repeats 5] [--threads N]

The prompt and the methods are those of `benchmarks.ttft`. FLOP are counted from the rows that ran
(`benchmarks.flops`), rates are measured in every round, at the model's own shapes (`benchmarks.rates`):

    floor = max(linear FLOP / GEMM rate, weight bytes / copy rate)
            + attention FLOP / rate of causal attention + bytes of stored K/V, read and written / copy rate

Norms, activations, rotations, selection and Python are in the TTFT and not in the floor. The GEMM floor is all FLOP at
the GEMM rate. Medians over rounds; ratios are taken within a round. Rates and prefills are taken by one clock: the
process's CPU time where one thread computes on the CPU, so that a busy machine matters little, else time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from tqdm import tqdm

import kvreuse as kr
from benchmarks.arguments import add_prompt, load, parser_of, save
from benchmarks.flops import Costs
from benchmarks.measured import Measured, measure
from benchmarks.rates import Meter
from benchmarks.tables import stage_table
from benchmarks.ttft import methods, short_name
from experiments.environment import origin
from experiments.timed import equal_chunks

NOTES = (
    "taken = by the clock that the rates are measured by; reached = floor / taken, of the same round; own = that "
    "relative to full recompute's; in brackets bootstrap intervals of the medians; load + rotate = their share of "
    "the TTFT."
)


def main() -> None:
    """Measure, print the tables, save the rounds as JSON."""
    parser = parser_of(__doc__, "floor")
    add_prompt(parser)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    model = load(args)
    prompt, source = equal_chunks(model, args.chunks, args.chunk_tokens, data_dir=args.data_dir)
    store, timed = kr.KVStore("8GiB"), methods(args.ratio)
    for method in tqdm(timed, desc="encoding and warm-up", leave=False):
        method.encode(model, prompt, store)
        method.prefill(model, prompt, store)
    costs, meter = Costs.of(model), Meter(model, prompt.num_tokens)
    with tqdm(total=args.repeats, desc="rounds") as bar:
        measured = measure(
            timed,
            lambda method: method.prefill(model, prompt, store),
            costs,
            meter,
            args.repeats,
            note=lambda number: bool(bar.update()),
        )
    header = {"prompt": repr(prompt), "source": source, **origin(args.model, model)}
    save(args.out, {"header": header, **measured.as_json()})
    print(json.dumps(header))
    print(stage_table({repr(m): short_name(repr(m)) for m in timed}, [r.seconds for r in measured.rounds]))
    print()
    print(floor_table([repr(method) for method in timed], measured))
    print(f"\n{rates_line(measured)}\n{NOTES}\nrounds saved to {args.out}")


def floor_table(names: Sequence[str], measured: Measured) -> str:
    """TTFT beside the floor; the first is the reference."""
    heads = [
        *("method", "TTFT ms", "taken ms", "linear GFLOP", "attention GFLOP", "K/V MB", "floor ms", "reached", "own"),
        *("GEMM floor ms", "speed-up", "floor's speed-up", "load + rotate"),
    ]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    reference = names[0]
    for name in names:
        work = measured.work[name]
        gain = measured.floor_s(reference) / measured.floor_s(name)
        cells = [
            short_name(name),
            f"{measured.ttft_s(name) * 1e3:.0f}",
            f"{measured.taken_s(name) * 1e3:.0f}",
            f"{work.linear / 1e9:.1f}",
            f"{work.attention / 1e9:.1f}",
            f"{work.kv_bytes / 1e6:.0f}",
            f"{measured.floor_s(name) * 1e3:.0f}",
            f"{measured.reached(name):.0%}",
            f"{measured.relative(name, reference):.2f}",
            f"{measured.gemm_floor_s(name) * 1e3:.0f}",
            f"{measured.speed_up(name, reference):.2f}",
            f"{gain:.2f}",
            f"{measured.stage_share(name, ('load_s', 'rotate_s')):.1%}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def rates_line(measured: Measured) -> str:
    """The machine's rates, medians over the rounds."""
    gemm, attention, copy = (measured.rate(name) / 1e9 for name in ("gemm", "attention", "copy"))
    return f"rates: GEMM {gemm:.0f} GFLOP/s, causal attention {attention:.0f} GFLOP/s, copy {copy:.1f} GB/s"


if __name__ == "__main__":
    main()
