"""How TTFT grows with the prompt's length and with the recompute ratio, beside what has to be computed.

    python -m benchmarks.growth [--chunks 1,2,4,8,14] [--ratios 0.05,0.15,0.3,0.5,1] [--threads N] [--plot-only]

Prompts of 512-token chunks, encoded alone so that none is exact; K/V in memory. Every length is measured in interleaved
rounds until its seconds are spent, at least once; lengths that are in the file already, of the same machine and
settings, are not measured again. The picture has the medians as points, and as lines the floors: FLOP counted from the
rows that ran, at the rates measured in the same rounds (`benchmarks.floor`).
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from tqdm import tqdm

import kvreuse as kr
from benchmarks.arguments import load, parser_of
from benchmarks.flops import Costs
from benchmarks.growth_plot import draw, ratio_of
from benchmarks.measured import Measured, measure
from benchmarks.rates import Meter, clock_of
from experiments.environment import origin
from experiments.results import same_run
from experiments.timed import equal_chunks


def methods(ratios: list[float]) -> list[kr.ReuseMethod]:
    """What is timed; the first is the reference."""
    return [
        kr.FullRecompute(),
        kr.PrefixCaching(insert=False),
        kr.FullReuse(context="bare"),
        *(kr.CacheBlend(ratio=ratio, context="bare") for ratio in ratios),
    ]


def numbers(text: str) -> list[float]:
    """Comma-separated numbers."""
    return [float(part) for part in text.split(",")]


def main() -> None:
    """Measure what is missing, save, print the table, draw."""
    parser = parser_of(__doc__, "growth")
    parser.add_argument("--chunks", type=numbers, default=[1, 2, 4, 8, 14], help="numbers of chunks")
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--ratios", type=numbers, default=[0.05, 0.15, 0.3, 0.5, 1.0])
    parser.add_argument("--repeats", type=int, default=5, help="most rounds per length")
    parser.add_argument("--seconds", type=float, default=30.0, help="per length; one round is always made")
    parser.add_argument("--plot-only", action="store_true")
    parser.add_argument("--force", action="store_true", help="measure lengths again that are in the file")
    args = parser.parse_args()
    if not args.plot_only:
        run(args)
    data = json.loads(args.out.read_text())
    picture = args.out.with_suffix(".png")
    draw(data).savefig(picture, dpi=200)
    print(json.dumps(data["header"]))
    print(table(data))
    print(f"rounds saved to {args.out}, picture to {picture}")


def run(args: argparse.Namespace) -> None:
    """Measure the lengths that are not in the file; the file is written behind every length."""
    model = load(args)
    timed, counts = methods(args.ratios), sorted(int(count) for count in args.chunks)
    longest, source = equal_chunks(model, counts[-1], args.chunk_tokens, data_dir=args.data_dir)
    settings = {"chunk_tokens": args.chunk_tokens, "methods": [repr(m) for m in timed], "source": source}
    settings["clock"] = clock_of(model).__name__
    header = {**settings, **origin(args.model, model)}
    points = [] if args.force else _known(args.out, header)
    store = kr.KVStore("16GiB")
    costs, warm = Costs.of(model), False
    for count in tqdm(counts, desc="lengths"):
        if any(point["chunks"] == count for point in points):
            continue
        prompt = kr.RagPrompt(longest.prefix, longest.chunks[:count], longest.question)  # shares its chunks' K/V
        for method in timed:
            method.encode(model, prompt, store)
        if not warm:
            for method in timed:
                method.prefill(model, prompt, store)
            warm = True
        meter = Meter(model, prompt.num_tokens)
        measured = measure(
            timed,
            lambda method, prompt=prompt: method.prefill(model, prompt, store),
            costs,
            meter,
            args.repeats,
            args.seconds,
        )
        points.append({"chunks": count, "tokens": prompt.num_tokens, **measured.as_json()})
        points.sort(key=lambda point: point["tokens"])
        _write(args.out, {"header": header, "points": points})


def _known(path: Path, header: dict[str, Any]) -> list[dict[str, Any]]:
    """Points of an earlier run with the same header, apart from when and how it was called."""
    if not path.is_file():
        return []
    data = json.loads(path.read_text())
    return list(data["points"]) if same_run(data["header"], header) else []


def _write(path: Path, data: dict[str, Any]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".partial")
    beside.write_text(json.dumps(data, indent=1))
    os.replace(beside, path)


def table(data: dict[str, Any]) -> str:
    """A row per length: seconds of a prefill by the meter's clock, in brackets the fraction of the floor reached."""
    names = data["header"]["methods"]
    lines = [
        "| tokens | rounds | " + " | ".join(label(name) for name in names) + " |",
        "|---|---|" + "---|" * len(names),
    ]
    for point in data["points"]:
        measured = Measured.from_json(point)
        cells = [f"{measured.taken_s(n):.3g} ({measured.reached(n):.0%})" for n in names]
        lines.append(f"| {point['tokens']} | {len(measured.rounds)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def label(name: str) -> str:
    """A method's name in tables and legends."""
    kind, ratio = name.split("(", 1)[0], ratio_of(name)
    return kind if ratio is None else f"{kind} {ratio:.0%}"


if __name__ == "__main__":
    main()
