"""Tables of timed rounds: medians, quartiles, the split by stage."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import kvreuse as kr
from kvreuse.results import TTFT_STAGES

Round = Mapping[str, Mapping[str, float]]  # what was timed -> ttft_s and stages, seconds


def timed_stages(result: kr.Prefill) -> dict[str, float]:
    """TTFT and the stages that make it up, seconds."""
    return {"ttft_s": result.ttft_s, **{k: v for k, v in result.trace.stages.items() if k in TTFT_STAGES}}


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def stage_table(
    labels: Mapping[str, str], rounds: Sequence[Round], more: Mapping[str, Mapping[str, str]] | None = None
) -> str:
    """Medians over rounds, milliseconds; the speed-up over the first line is paired within rounds.

    Args:
        labels: what stands for each name that was timed; all are in every round.
        more: further columns, by heading and name.
    """
    more = more or {}
    first = next(iter(labels))
    stages = [name for name in TTFT_STAGES if any(name in r[timed] for r in rounds for timed in labels)]
    rows = []
    for name, label in labels.items():
        total = [r[name]["ttft_s"] for r in rounds]
        low, _, high = statistics.quantiles(total, n=4) if len(total) > 1 else (total[0],) * 3
        speedup = statistics.median(r[first]["ttft_s"] / r[name]["ttft_s"] for r in rounds)
        cells = [label, milliseconds(statistics.median(total)), f"{milliseconds(low)}-{milliseconds(high)}"]
        split = [milliseconds(statistics.median(r[name].get(s, 0.0) for r in rounds)) for s in stages]
        rows.append([*cells, f"{speedup:.2f}", *split, *(column.get(name, "") for column in more.values())])
    heads = ["method", "TTFT ms", "quartiles", "speed-up", *(s.removesuffix("_s") for s in stages), *more]
    return markdown(heads, rows)


def milliseconds(seconds: float) -> str:
    """To the millisecond; below 100 of them to a tenth."""
    return f"{seconds * 1e3:.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.1f}"
