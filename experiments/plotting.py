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
    "worldcup": "Two players",
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
            axes.margins(x=0.12)
            from_zero(axes)
            tidy(axes)
        log_axis(divergence, (1.0, 2.0, 3.0, 5.0))
        divergence.set_xlabel("TTFT (s, log scale)")
    header = tables[0].header
    figure.suptitle(
        f"{header['model']}: quality against time to first token ({header['device']}, {header['dtype']}, "
        f"{header['threads']} thread{'s' if header['threads'] != 1 else ''})",
        fontsize=11,
    )
    legend_below(figure, 3 if paper else 4)
    return figure


def _points(axes: Axes, frame: pd.DataFrame, name: str) -> None:
    for _, row in frame.iterrows():
        if row[name] != row[name]:  # a method without this measure
            continue
        color, marker = style_of(str(row["method"]))
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


def log_axis(axes: Axes, steps: tuple[float, ...] = (1.0, 2.0, 5.0), which: str = "x") -> None:
    """A logarithmic x (or y) axis with plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(base=10, subs=steps))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _source(table: Any) -> str:
    """Where the cases are from, without the folder."""
    source = str(table.header["source"])
    return {"data-dir": "real data", "hub": "hub data"}.get(source.split(":")[0], source)


def _paper_points(axes: Axes, table: Table) -> None:
    from experiments.paper_values import FIG12_MISTRAL

    for label, ttft_s, score, marker in FIG12_MISTRAL.get(table.dataset, ()):
        axes.plot(ttft_s, score, marker, color="#999999", markersize=7, fillstyle="none", label=label)


# -- parts of other figures -----------------------------------------------------------------------------------------


def new_figure(rows: int, columns: int, **sharing: Any) -> tuple[Figure, Any]:
    """A figure and its panels [rows, columns]."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.4, 4.1 * columns), 0.9 + 3.2 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **sharing)


def tidy(axes: Axes) -> None:
    """A light grid behind the data, no frame above and at the right."""
    axes.grid(True, color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def from_zero(axes: Axes) -> None:
    """The y axis from zero, where a point is drawn whole."""
    top = max(axes.get_ylim()[1], 0.01)
    axes.set_ylim(-0.03 * top, top)


def style_of(method: str) -> tuple[str, str]:
    """Colour and marker of a method by its repr."""
    return STYLES.get(method.split("(", 1)[0], OTHER_STYLE)


def dataset_title(table: Any) -> str:
    """Dataset, source and number of cases, for the top of a panel."""
    title = DATASET_TITLES.get(table.dataset, table.dataset)
    return f"{title}, {_source(table)}, {table.num_cases} case{'s' if table.num_cases != 1 else ''}"


def band(axes: Axes, x: Any, frame: pd.DataFrame, name: str, **style: Any) -> None:
    """Means over x as a line with their 95% intervals as a band."""
    values = frame[[name, f"{name}_low", f"{name}_high"]].astype(float)
    axes.plot(x, values[name], **({"markersize": 5, "linewidth": 1.5} | style))
    axes.fill_between(x, values[f"{name}_low"], values[f"{name}_high"], color=style["color"], alpha=0.15, linewidth=0)


def legend_below(figure: Figure, ncols: int = 4) -> None:
    """One legend for all panels, under them."""
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    handles = dict(sorted(handles.items(), key=lambda item: item[0].startswith("paper")))  # ours first
    ncols = min(ncols, len(handles))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=ncols, frameon=False, fontsize=9)
