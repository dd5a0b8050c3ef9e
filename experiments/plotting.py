"""Pictures from tables. Nothing here touches a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from experiments.tables import Table

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DATASET_TITLES = {
    "musique": "MuSiQue",
    "musique_cacheblend": "MuSiQue (CacheBlend's input)",
    "2wikimqa": "2WikiMultihopQA",
    "samsum": "SAMSum",
    "multinews": "MultiNews",
}
# Okabe and Ito's colours, told apart by colour-blind readers; the shapes say the same again.
STYLES: dict[str, tuple[str, str]] = {
    "FullRecompute": ("#000000", "s"),
    "PrefixCaching": ("#E69F00", "D"),
    "FullReuse": ("#D55E00", "v"),
    "CacheBlend": ("#0072B2", "o"),
    "LegoLink": ("#009E73", "^"),
    "Funnel": ("#882255", "*"),
    "MapReduce": ("#CC79A7", "P"),
    "MapRerank": ("#56B4E9", "X"),
}
OTHER_STYLE = ("#777777", "h")


def quality_against_ttft(tables: list[Table], paper: bool = False) -> Figure:
    """Two rows of panels, a column per dataset: quality against TTFT, and KL to full recompute against TTFT.

    Points are means (quality, KL) with 95% intervals and medians (TTFT) with quartiles.
    """
    from matplotlib.figure import Figure

    columns = len(tables)
    figure = Figure(figsize=(max(7.6, 3.9 * columns), 7.4), layout="constrained")
    panels = figure.subplots(2, columns, squeeze=False, sharex="col")
    for column, table in enumerate(tables):
        quality, divergence = panels[0][column], panels[1][column]
        title = DATASET_TITLES.get(table.dataset, table.dataset)
        quality.set_title(f"{title}\n{_source(table)}, {table.num_cases} cases", fontsize=10)
        _points(quality, table.frame, "score")
        _points(divergence, table.frame, "kl")
        if paper:
            _paper_points(quality, table)
        quality.set_ylabel(f"{table.metric} (higher is better)")
        divergence.set_ylabel("KL to full recompute\n(nats/token, lower is better)")
        for axes in (quality, divergence):
            top = max(axes.get_ylim()[1], 0.01)
            axes.set_ylim(-0.03 * top, top)  # a point at zero is drawn whole
            axes.margins(x=0.12)
            axes.grid(True, color="#e4e4e4", linewidth=0.7)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        _time_axis(divergence)
    header = tables[0].header
    figure.suptitle(
        f"{header['model']}: quality against time to first token ({header['device']}, {header['dtype']}, "
        f"{header['threads']} thread{'s' if header['threads'] != 1 else ''})",
        fontsize=11,
    )
    handles: dict[str, Any] = {}
    for row in panels:
        for axes in row:
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
    handles = dict(sorted(handles.items(), key=lambda item: item[0].startswith("paper")))  # ours first
    ncols = min(3 if paper else 4, len(handles))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=ncols, frameon=False, fontsize=9)
    return figure


def _points(axes: Axes, frame: pd.DataFrame, name: str) -> None:
    for _, row in frame.iterrows():
        if row[name] != row[name]:  # a method without this measure
            continue
        color, marker = STYLES.get(str(row["method"]).split("(", 1)[0], OTHER_STYLE)
        hollow = row["context"] == "prefix"
        axes.errorbar(
            row["ttft_s"],
            row[name],
            xerr=[[row["ttft_s"] - row["ttft_q25"]], [row["ttft_q75"] - row["ttft_s"]]],
            yerr=[[row[name] - row[f"{name}_low"]], [row[f"{name}_high"] - row[name]]],
            fmt=marker,
            color=color,
            markersize=8,
            markerfacecolor="white" if hollow else color,
            markeredgewidth=1.6,
            elinewidth=1.0,
            alpha=0.95,
            label=row["label"],
        )


def _time_axis(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 3.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("TTFT (s, log scale)")


def _source(table: Table) -> str:
    """Where the cases are from, without the folder."""
    source = str(table.header["source"])
    return {"data-dir": "real data", "hub": "hub data"}.get(source.split(":")[0], source)


def _paper_points(axes: Axes, table: Table) -> None:
    from experiments.paper_values import FIG12_MISTRAL

    for label, ttft_s, score, marker in FIG12_MISTRAL.get(table.dataset, ()):
        axes.plot(ttft_s, score, marker, color="#999999", markersize=7, fillstyle="none", label=label)
