"""CacheBlend, figure 17: quality against TTFT with K/V on storage devices of different speed.

python -m experiments.fig17 --model demo --threads 1 --limit 6 --max-new-tokens 16
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import kvreuse as kr
from experiments.experiment import Experiment
from experiments.options import app_for
from experiments.plotting import DATASET_TITLES, STYLES
from experiments.profiled import DEVICES
from experiments.stored import OnDevice
from experiments.tables import Table

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLACES = (None, *DEVICES)
METHODS = (kr.PrefixCaching(insert=False), kr.FullReuse(), kr.CacheBlend())
NAMES = {
    "FullRecompute": "full recompute (loads nothing)",
    "PrefixCaching": "prefix caching",
    "FullReuse": "full reuse",
    "CacheBlend": "CacheBlend",
}


def draw(tables: list[Table], paper: bool) -> Figure:
    """A column of panels per device: quality above, KL to full recompute below, against TTFT."""
    from matplotlib.figure import Figure

    table = tables[0]
    figure = Figure(figsize=(13.5, 6.4), layout="constrained")
    panels = figure.subplots(2, len(PLACES), sharex=True, sharey="row")
    for column, place in enumerate(PLACES):
        name = "memory" if place is None else place.label
        here = [m for m in table.frame["method"] if m.endswith(f" on {name}") or m.startswith("FullRecompute(")]
        for row, measure in enumerate(("score", "kl")):
            axes = panels[row][column]
            _points(axes, table.frame[table.frame["method"].isin(here)], measure)
            axes.grid(True, color="#e4e4e4", linewidth=0.7)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            axes.margins(x=0.12)
        panels[0][column].set_title(name, fontsize=10)
        _time_axis(panels[1][column])
    panels[0][0].set_ylabel(f"{table.metric} (higher is better)")
    panels[1][0].set_ylabel("KL to full recompute\n(nats/token, lower is better)")
    for row in panels:
        top = row[0].get_ylim()[1]
        row[0].set_ylim(-0.03 * top, top)
    h = table.header
    figure.suptitle(
        f"{h['model']}, {DATASET_TITLES.get(table.dataset, table.dataset)}, {table.num_cases} cases: K/V on devices of "
        f"different speed ({h['device']}, {h['threads']} thread{'s' if h['threads'] != 1 else ''})",
        fontsize=11,
    )
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _points(axes: Axes, frame: pd.DataFrame, measure: str) -> None:
    for _, row in frame.iterrows():
        method = str(row["method"]).split("(", 1)[0]
        colour, marker = STYLES[method]
        axes.errorbar(
            row["ttft_s"],
            row[measure],
            xerr=[[row["ttft_s"] - row["ttft_q25"]], [row["ttft_q75"] - row["ttft_s"]]],
            yerr=[[row[measure] - row[f"{measure}_low"]], [row[f"{measure}_high"] - row[measure]]],
            fmt=marker,
            color=colour,
            markersize=8,
            elinewidth=1.0,
            label=NAMES[method],
        )


def _time_axis(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("TTFT (s, log scale)")


FIG17 = Experiment(
    name="fig17",
    shows="quality against TTFT with K/V in memory, on this disk, and on slower devices.",
    section="CacheBlend 7.4",
    cost="a minute a case",
    methods=(kr.FullRecompute(), *(OnDevice(method, place) for place in PLACES for method in METHODS)),
    draw=draw,
    datasets=("2wikimqa",),
)

if __name__ == "__main__":
    app_for(FIG17)()
