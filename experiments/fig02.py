"""CacheBlend, figure 2: quality against the number of retrieved chunks, for full recompute and full reuse.

python -m experiments.fig02 --model demo --dataset musique --limit 20
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

import kvreuse as kr
from experiments.experiment import Experiment
from experiments.options import app_for
from experiments.plotting import band, dataset_title, from_zero, legend_below, new_figure, style_of, tidy
from experiments.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# (column, axis label) of the two rows of panels
ROWS = (("score", "{metric} (higher is better)"), ("kl", "KL to full recompute\n(nats/token, lower is better)"))


def by_dataset(tables: list[Table]) -> dict[str, list[Table]]:
    """The tables of a sweep, by dataset."""
    found: dict[str, list[Table]] = {}
    for table in tables:
        found.setdefault(table.dataset, []).append(table)
    return found


def sweep_lines(axes: Any, tables: list[Table], name: str, x: str) -> None:
    """A line per method over the swept setting ``x``."""
    frame = pd.concat([t.frame.assign(x=t.header[x]) for t in tables])
    for method, line in frame.groupby("method", sort=False):
        if line[name].isna().all():
            continue
        colour, marker = style_of(str(method))
        face = "white" if line["context"].iloc[0] == "prefix" else colour
        line = line.sort_values("x")
        label = line["label"].iloc[0]
        band(axes, line["x"], line, name, color=colour, marker=marker, markerfacecolor=face, label=label)


def draw(tables: list[Table], paper: bool) -> Figure:
    """F1 above, KL below, a column per dataset."""
    groups = by_dataset(tables)
    figure, panels = new_figure(2, len(groups), sharex="col")
    for column, group in enumerate(groups.values()):
        for row, (name, label) in enumerate(ROWS):
            axes = panels[row][column]
            sweep_lines(axes, group, name, "num_chunks")
            axes.set_ylabel(label.format(metric=group[0].metric))
            from_zero(axes)
            axes.set_xticks([t.header["num_chunks"] for t in group])
            tidy(axes)
        panels[0][column].set_title(dataset_title(group[0]), fontsize=10)
        panels[1][column].set_xlabel(f"retrieved chunks of at most {group[0].header['chunk_tokens']} tokens")
    figure.suptitle(f"{tables[0].header['model']}: quality against the number of retrieved chunks", fontsize=11)
    legend_below(figure)
    return figure


FIG02 = Experiment(
    name="fig02",
    shows="quality against the number of retrieved 128-token chunks: full recompute and full reuse.",
    section="CacheBlend 3.2, 3.3",
    cost="a minute a case",
    methods=(kr.FullRecompute(), kr.FullReuse(context="bare"), kr.FullReuse(context="prefix")),
    draw=draw,
    datasets=("musique", "2wikimqa"),
    settings={"context": "retrieve-own", "chunk_tokens": 128},
    sweep=tuple({"num_chunks": n} for n in (1, 2, 4, 6, 8, 12)),
    smoke={"sweep": ({"num_chunks": 1}, {"num_chunks": 3}), "datasets": ("musique",)},
)

if __name__ == "__main__":
    app_for(FIG02)()
