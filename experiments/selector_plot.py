"""The picture of `experiments.selectors`: quality against measured TTFT, the Pareto front marked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from experiments.plotting import DATASET_TITLES
from experiments.selector_report import summary, time_column
from experiments.tables import Table

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colour and marker of each rule. FullReuse, HKVD (CacheBlend) and LegoLink look as in every other figure.
_STYLES: dict[str, tuple[str, str]] = {
    "FullReuse": ("#D55E00", "v"),
    "HKVD K+V, gradual": ("#0072B2", "o"),
    "CacheBlend": ("#0072B2", "P"),
    "HKVD K+V, constant": ("#0072B2", "p"),
    "HKVD V, constant": ("#0072B2", "s"),
    "HKVD K, gradual": ("#0072B2", "d"),
    "First tokens (LegoLink)": ("#009E73", "^"),
    "Question attention, all layers": ("#CC79A7", "<"),
    "Question attention, upper 2/3": ("#CC79A7", "D"),
    "Question attention x deviation": ("#56B4E9", "X"),
    "Random": ("#999999", "x"),
    "Windows": ("#999999", "+"),
    "Oracle deviation": ("#000000", "1"),
    "Funnel": ("#882255", "*"),
    "Funnel 1.8, attended": ("#882255", "h"),
    "Funnel 1.8, by deviation": ("#882255", "8"),
}
_OTHER = (("#E69F00", "D"), ("#B8860B", "p"), ("#7A5C00", "H"))  # rules of your own
_CONTEXTS = {"prefix": "none", "bos": "left", "bare": "full"}  # fill style, by encoder
_TIME = {
    "ttft_s": "measured TTFT, s (median)",
    "cpu_s": "measured TTFT, s of processor time (median; one thread)",
}
_NO_TTFT = ("Oracle deviation",)  # its time includes a full prefill: the point stands at no time anyone would see


def quality_against_ttft(tables: list[Table]) -> Figure:
    """A column per dataset: share of full reuse's KL removed, and KL, against TTFT.

    Upper row: chunks encoded behind the prefix. Lower row: all encoders. The grey line is the Pareto front.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(7.6, 5.6 * len(tables)), 9.6), layout="constrained")
    panels = figure.subplots(2, len(tables), squeeze=False, sharex="col")
    handles: dict[str, Any] = {}
    for column, table in enumerate(tables):
        frame = summary(table)
        frame = frame[~frame["rule"].isin([*_NO_TTFT, "FullRecompute"])]
        title = DATASET_TITLES.get(table.dataset, table.dataset)
        panels[0][column].set_title(f"{title}, {table.num_cases} cases", fontsize=11)
        same = frame[frame["context"] == "prefix"]
        _panel(panels[0][column], same, "share", handles, best=max)
        _panel(panels[1][column], frame, "kl", handles, best=min)
        panels[0][column].set_ylabel("share of full reuse's KL removed\n(prefix-encoded chunks; higher is better)")
        panels[1][column].set_ylabel("KL to full recompute, nats/token\n(all encoders; lower is better)")
        panels[1][column].set_xlabel(_TIME[time_column(table)])
    header = tables[0].header
    threads = f"{header['threads']} thread{'s' if header['threads'] != 1 else ''}"
    figure.suptitle(f"{header['model']}: selection rules at equal budget ({header['device']}, {threads})", fontsize=12)
    handles |= _fill_handles({m["context"] for t in tables for m in t.header["methods"]})
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=9,
        markerscale=1.0,
    )
    return figure


def _panel(axes: Axes, frame: pd.DataFrame, name: str, handles: dict[str, Any], best: Any) -> None:
    others = [r for r in dict.fromkeys(frame["rule"]) if r not in _STYLES]
    styles = {**_STYLES, **dict(zip(others, _OTHER * len(others), strict=False))}
    for (rule, context), part in frame.groupby(["rule", "context"], sort=False):
        color, marker = styles[str(rule)]
        part = part.sort_values("time_s")
        if len(part) > 1:
            axes.plot(part["time_s"], part[name], color=color, linewidth=0.9, alpha=0.55, zorder=1)
        for _, row in part.iterrows():
            low, high = row[f"{name}_low"], row[f"{name}_high"]
            axes.vlines(row["time_s"], low, high, color=color, linewidth=0.8, alpha=0.35, zorder=1)
            (point,) = axes.plot(
                row["time_s"],
                row[name],
                marker,
                color=color,
                markersize=8,
                markerfacecoloralt="white",
                fillstyle=_CONTEXTS.get(str(context), "none"),
                markeredgewidth=1.5,
                linestyle="none",
                zorder=3,
            )
            handles.setdefault(str(rule), point)
            if row["nominal"] == row["nominal"] and row["nominal"] is not None and len(part) > 1:
                axes.annotate(
                    f"{row['nominal']:.0%}",
                    (row["time_s"], row[name]),
                    textcoords="offset points",
                    xytext=(5, 5),
                    fontsize=7.5,
                    color=color,
                    zorder=4,
                )
    front = pareto(frame, name, best)
    (line,) = axes.step(front["time_s"], front[name], where="post", color="#555555", linewidth=3.5, alpha=0.3, zorder=0)
    handles.setdefault("Pareto front", line)
    axes.grid(True, color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def pareto(frame: pd.DataFrame, name: str, best: Any) -> pd.DataFrame:
    """The rows that no other row beats in both time and ``name`` (``best``: max or min), by rising time."""
    kept: list[int] = []
    so_far: float | None = None
    for index, row in frame.sort_values("time_s").iterrows():
        if so_far is None or best(so_far, row[name]) != so_far:
            kept.append(index)
            so_far = row[name]
    return frame.loc[kept]


def _fill_handles(contexts: set[str | None]) -> dict[str, Any]:
    from matplotlib.lines import Line2D

    look: dict[str, Any] = {"color": "#444444", "marker": "o", "linestyle": "none", "markersize": 8}
    return {
        f"chunks encoded {context}": Line2D([], [], fillstyle=fill, markerfacecoloralt="white", **look)
        for context, fill in _CONTEXTS.items()
        if context in contexts
    }
