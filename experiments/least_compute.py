"""Figures 15a to c: the least compute that keeps the quality within a stated loss, over one swept setting."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

import kvreuse as kr
from experiments.experiment import Experiment
from experiments.fig02 import by_dataset
from experiments.plotting import dataset_title, legend_below, new_figure, style_of, tidy
from experiments.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RATIOS = (0.05, 0.1, 0.15, 0.3, 0.5)
# What may be lost: mean KL to full recompute in nats/token, and, as in the paper, F1.
MAX_KL = 0.05
MAX_SCORE_LOSS = 0.015
METHODS = (
    kr.FullRecompute(),
    kr.PrefixCaching(insert=False),
    kr.FullReuse(context="prefix"),
    *(kr.CacheBlend(ratio=ratio, context="prefix") for ratio in RATIOS),
)


def keeps_kl(row: pd.Series, full: pd.Series) -> bool:
    """Whether the mean KL is at most `MAX_KL`."""
    return bool(row["kl"] <= MAX_KL)


def keeps_score(row: pd.Series, full: pd.Series) -> bool:
    """Whether the mean score is at most `MAX_SCORE_LOSS` below full recompute's."""
    return bool(row["score"] >= full["score"] - MAX_SCORE_LOSS)


# criterion -> (words, what keeps the quality, line style)
CRITERIA: Mapping[str, tuple[str, Callable[[pd.Series, pd.Series], bool], str]] = {
    "kl": (f"KL at most {MAX_KL} nats/token", keeps_kl, "-"),
    "score": (f"F1 loss at most {MAX_SCORE_LOSS}", keeps_score, ":"),
}


def ratio_of(method: str) -> float:
    """The ratio in a CacheBlend's repr; full reuse is 0, full recompute 1."""
    for m in METHODS:
        if repr(m) == method and isinstance(m, kr.CacheBlend):
            return float(m.ratio)
    return {"FullReuse": 0.0, "FullRecompute": 1.0}.get(method.split("(", 1)[0], math.nan)


def least_compute(frame: pd.DataFrame, keeps: Callable[[pd.Series, pd.Series], bool]) -> pd.Series:
    """The row of the smallest ratio from which on every larger one keeps the quality; full recompute's if none does.

    From which on: a score that is good by chance at one ratio alone does not count.
    """
    rows = frame.assign(ratio=[ratio_of(m) for m in frame["method"]]).dropna(subset="ratio")
    full = rows[rows["ratio"] == 1].iloc[0]
    least = full
    for _, row in rows.sort_values("ratio", ascending=False).iterrows():
        if row["ratio"] < 1 and not keeps(row, full):
            break
        least = row
    return least


def draw(tables: Sequence[Table], x: str, label: str) -> Figure:
    """TTFT of the baselines and the least CacheBlend, over ``x``; a panel per dataset.

    Of a batch its share per request: the time until all first tokens are known, divided by the batch's size.
    """
    groups = by_dataset(list(tables))
    figure, panels = new_figure(1, len(groups))
    for axes, tables_of in zip(panels[0], groups.values(), strict=True):
        group = sorted(tables_of, key=lambda t: float(t.header[x]))  # records may be given in any order
        xs = [t.header[x] for t in group]
        sizes = [t.header.get("batch_size", 1) for t in group]
        for name in ("FullRecompute", "PrefixCaching", "FullReuse"):
            found = [t.frame[t.frame["method"].str.startswith(f"{name}(")] for t in group]
            if any(rows.empty for rows in found):
                continue
            rows = [f.iloc[0] for f in found]
            colour, marker = style_of(name)
            axes.plot(
                xs,
                [r["ttft_s"] / n for r, n in zip(rows, sizes, strict=True)],
                color=colour,
                marker=marker,
                label=rows[0]["label"],
            )
        colour, marker = style_of("CacheBlend")
        lines = []
        for words, keeps, style in CRITERIA.values():
            rows = [least_compute(t.frame, keeps) for t in group]
            shares = [r["ttft_s"] / n for r, n in zip(rows, sizes, strict=True)]
            axes.plot(xs, shares, style, color=colour, marker=marker, label=f"CacheBlend, {words}")
            lines.append([(float(r["ratio"]), share) for r, share in zip(rows, shares, strict=True)])
        place: Any = {"textcoords": "offset points", "ha": "center", "fontsize": 8, "color": colour}
        for at, *points in zip(xs, *lines, strict=True):
            # The upper point's label above it, the lower's below; where both criteria meet, one label is enough.
            for (ratio, share), offset in zip(sorted(set(points), key=lambda p: -p[1]), (7, -14), strict=False):
                axes.annotate(f"{ratio:.0%}", (at, share), xytext=(0, offset), **place)
        axes.set_title(dataset_title(group[0]), fontsize=10)
        axes.set_xlabel(label)
        axes.set_ylabel("TTFT / batch size (s), median" if max(sizes) > 1 else "TTFT (s), median")
        axes.set_ylim(bottom=0)
        axes.set_xticks(xs)
        axes.margins(x=0.08)
        tidy(axes)
    figure.suptitle(f"{tables[0].header['model']}: least compute that keeps the quality (labels: ratio)", fontsize=11)
    legend_below(figure, 2)
    return figure


def least_compute_experiment(
    name: str,
    x: str,
    values: Sequence[int],
    label: str,
    settings: Mapping[str, Any],
    cost: str,
    methods: tuple[kr.ReuseMethod, ...] = METHODS,
) -> Experiment:
    """The experiment that sweeps ``x`` (a setting of `RunConfig`) over ``values``."""
    return Experiment(
        name=name,
        shows=f"least compute that keeps the quality, by {label}.",
        section="CacheBlend 7.3",
        cost=cost,
        methods=methods,
        draw=lambda tables, paper: draw(tables, x, label),
        datasets=("2wikimqa",),
        settings={"context": "retrieve", **settings},
        sweep=tuple({x: value} for value in values),
        smoke={
            "sweep": tuple({x: value} for value in values[:2]),
            "methods": methods[:4],
            "settings": {"context": "retrieve", **settings, "limit": values[1] if x == "batch_size" else 1},
        },
    )
