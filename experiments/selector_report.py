"""Tables of `experiments.selectors`: every rule at its budget, and beside HKVD at the same budget, case by case."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from experiments.tables import NOTHING, Table, aligned_lines
from kvreuse.metrics import bootstrap_interval, gap_recovered_interval, paired_interval

if TYPE_CHECKING:
    import pandas as pd

BASE_RULE = "HKVD K+V, gradual"
_EXPLANATION = (
    "Mean [95% bootstrap interval over cases]; times: medians. Share: of the KL of full reuse with the same encoder "
    "that the rule removes (1 is full recompute). Budget: K/V recomputed over K/V reused, mean over layers, full "
    "layers counted, as measured. KL over full recompute's own greedy answer, nats per token; NLL of the gold answer, "
    "nats per token. CPU: processor time of the same prefill, which other jobs on the machine disturb less than the "
    "TTFT."
)


def split_label(label: str) -> tuple[str, float | None]:
    """The rule and the budget in a label such as ``Funnel @ 15% (prefix)``; without a budget the method's name."""
    name = re.sub(r" \((bare|bos|prefix)\)$", "", label)
    rule, at, budget = name.rpartition(" @ ")
    return (rule, float(budget.rstrip("%")) / 100) if at else (name, None)


def summary(table: Table) -> pd.DataFrame:
    """One row per method: rule, encoder context, nominal and measured budget, and an interval of each measure."""
    import pandas as pd

    return pd.DataFrame([_row(table, method) for method in table.header["methods"]])


def by_case(table: Table, method: str) -> pd.DataFrame:
    """A method's cases in the order that all methods share."""
    return table.cases[table.cases["method"] == method].sort_values("case_id")


def time_column(table: Table) -> str:
    """Which time compares methods: the processor time of one thread on a CPU, else the TTFT."""
    one_thread = table.header["device"] == "cpu" and table.header["threads"] == 1
    return "cpu_s" if one_thread and "cpu_s" in table.cases and not table.cases["cpu_s"].isna().any() else "ttft_s"


def _row(table: Table, method: dict[str, Any]) -> dict[str, Any]:
    part, context = by_case(table, method["method"]), method["context"]
    rule, budget = split_label(method["label"])
    reuse = _find(table, "FullReuse", context, None)
    base = _find(table, BASE_RULE, context, budget) if budget is not None else None
    row: dict[str, Any] = {"method": method["method"], "rule": rule, "context": context, "nominal": budget}
    time = time_column(table)
    row |= {"ttft_s": _median(part["ttft_s"]), "time_s": _median(part[time]), "cases": len(part)}
    row |= {"budget": float(part["budget"].astype(float).mean())}
    found = {name: bootstrap_interval(_column(part, name)) for name in ("kl", "nll", "score")}
    found["share"] = NOTHING if reuse is None else gap_recovered_interval(_column(part, "kl"), _column(reuse, "kl"))
    found["kl_to_base"] = found["time_to_base"] = NOTHING
    if base is not None:
        found["kl_to_base"] = paired_interval(_column(part, "kl"), _column(base, "kl"))
        ratios = [a / b for a, b in zip(_column(part, time), _column(base, time), strict=True)]
        found["time_to_base"] = bootstrap_interval(ratios, statistic=lambda x: float(torch.quantile(x, 0.5)))
    for name, interval in found.items():
        row |= {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}
    return row


def _find(table: Table, rule: str, context: str | None, budget: float | None) -> pd.DataFrame | None:
    """The cases of a rule at a budget with an encoder context, or None."""
    for method in table.header["methods"]:
        if method["context"] == context and split_label(method["label"]) == (rule, budget):
            return by_case(table, method["method"])
    return None


def markdown(table: Table) -> str:
    """Both tables of one dataset."""
    frame = summary(table)
    rows = [["rule", "encoder", "budget", "KL", "share", "NLL", table.metric, "TTFT, s", "CPU, s"]]
    for _, row in frame.iterrows():
        context = row["context"] if isinstance(row["context"], str) else "-"
        values = [_interval(row, name) for name in ("kl", "share", "nll", "score")]
        times = [f"{row[name]:.2f}" for name in ("ttft_s", "time_s")]
        rows.append([_name(row), context, _percent(row["budget"]), *values, *times])
    beside = [["rule", "encoder", "budget", f"KL - {BASE_RULE}'s", "share of its KL removed", "time / its time"]]
    order = frame.dropna(subset=["kl_to_base"]).sort_values(["context", "nominal", "kl"], ascending=[False, True, True])
    for _, row in order.iterrows():
        if row["rule"] == BASE_RULE:
            continue
        removed = -row["kl_to_base"] / (row["kl"] - row["kl_to_base"])
        values = [_interval(row, "kl_to_base", sign=True), f"{removed:.0%}", _interval(row, "time_to_base", digits=2)]
        beside.append([_name(row), row["context"], _percent(row["budget"]), *values])
    h = table.header
    caption = (
        f"{table.num_cases} cases from {h['source']}; {table.frame['prompt_tokens'].iloc[0]:.0f} tokens in "
        f"{table.frame['num_chunks'].iloc[0]:.1f} chunks on average; answers of at most {h['max_new_tokens']} tokens. "
        f"{h['device']}, {h['dtype']}, threads: {h['threads']}, {h['date'][:10]}, commit {str(h['commit'])[:9]}."
    )
    parts = [f"### {h['figure']}: {h['dataset']}, {h['model']}", caption, _EXPLANATION, "\n".join(aligned_lines(rows))]
    if len(beside) > 1:
        parts += [
            f"Beside {BASE_RULE} at the same budget and encoder, paired by case:",
            "\n".join(aligned_lines(beside)),
        ]
    lines = _equal_time(table, frame)
    if len(lines) > 1:
        parts += [
            "At equal time (prefix-encoded chunks): a rule's KL between its two nearest budgets, by linear "
            "interpolation in time, beside HKVD's where that was measured; paired by case.",
            "\n".join(aligned_lines(lines)),
        ]
    return "\n\n".join(parts)


def _equal_time(table: Table, frame: pd.DataFrame) -> list[list[str]]:
    """Rules of several budgets at the times of HKVD's points. KL is convex in time: interpolation overstates it."""
    same = frame[frame["context"] == "prefix"]
    points = same[same["rule"].isin([BASE_RULE, "CacheBlend"])].sort_values("time_s")
    lines = [
        ["rule", *(f"at {row['time_s']:.2f} s: {_name(row)} (KL {row['kl']:.3f})" for _, row in points.iterrows())]
    ]
    families = [rule for rule, part in same.groupby("rule", sort=False) if len(part) > 1 and rule != BASE_RULE]
    for rule in families:
        part = same[same["rule"] == rule].sort_values("time_s")
        cells = [_beside(table, part, point) for _, point in points.iterrows()]
        lines.append([str(rule), *cells])
    return lines if families else []


def _beside(table: Table, part: pd.DataFrame, point: pd.Series) -> str:
    """KL difference at the point's time, "-" outside the times of ``part``."""
    for (_, low), (_, high) in pairwise(part.iterrows()):
        if low["time_s"] <= point["time_s"] <= high["time_s"]:
            weight = (point["time_s"] - low["time_s"]) / (high["time_s"] - low["time_s"])
            first, second, base = (_column(by_case(table, row["method"]), "kl") for row in (low, high, point))
            between = [(1 - weight) * a + weight * b for a, b in zip(first, second, strict=True)]
            return f"{paired_interval(between, base):+.3f}"
    return "-"


def _name(row: pd.Series) -> str:
    nominal = row["nominal"]
    return str(row["rule"]) + ("" if nominal is None or nominal != nominal else f" @ {nominal:.0%}")


def _interval(row: pd.Series, name: str, digits: int = 3, sign: bool = False) -> str:
    values = [float(row[n]) for n in (name, f"{name}_low", f"{name}_high")]
    if math.isnan(values[0]):
        return "-"
    first, low, high = (f"{v:{'+' if sign else ''}.{digits}f}" for v in values)
    return f"{first} [{low}, {high}]"


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1%}"


def _median(values: pd.Series) -> float:
    return float(values.astype(float).median())


def _column(part: pd.DataFrame, name: str) -> list[float]:
    return [float(value) for value in part[name]]
