"""The picture of `benchmarks.growth`: TTFT over length and over ratio, measured and counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.measured import Measured
from experiments.plotting import legend_below, log_axis, new_figure, style_of, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = {
    "FullRecompute": "full recompute",
    "PrefixCaching": "prefix caching",
    "FullReuse": "full reuse",
    "CacheBlend": "CacheBlend (labels: ratio)",
}


def ratio_of(name: str) -> float | None:
    """The ratio in a CacheBlend's repr; None for other methods."""
    return float(name.split("ratio=", 1)[1].split(",", 1)[0]) if name.startswith("CacheBlend(") else None


def draw(data: dict[str, Any]) -> Figure:
    """Left: over the prompt's length. Right: over the ratio, a line per length. Points measured, lines counted."""
    header, points = data["header"], data["points"]
    measured = [(int(point["tokens"]), Measured.from_json(point)) for point in points]
    figure, panels = new_figure(1, 2)
    figure.set_size_inches(11.5, 5.6)
    left, right = panels[0]
    _over_length(left, header["methods"], measured)
    _over_ratio(right, header["methods"], measured)
    for axes in (left, right):
        log_axis(axes, which="y")
        axes.set_ylabel(f"prefill ({'CPU seconds' if header['clock'] == 'process_time' else 's'}, log scale)")
        tidy(axes)
    threads = header["threads"]
    figure.suptitle(
        f"{header['model']}: time to first token, measured (points, medians) and counted (lines: FLOP and bytes at "
        f"measured rates)\n{header['device']}, {header['dtype']}, {threads} thread{'s' if threads != 1 else ''}",
        fontsize=11,
    )
    legend_below(figure, 4)
    return figure


def _over_length(axes: Axes, names: list[str], measured: list[tuple[int, Measured]]) -> None:
    tokens = [t for t, _ in measured]
    for name in sorted(names, key=lambda name: ratio_of(name) is None):  # blends first: single marks lie on top
        kind = name.split("(", 1)[0]
        colour, marker = style_of(name)
        ttft = [m.taken_s(name) for _, m in measured]
        axes.plot(tokens, [m.floor_s(name) for _, m in measured], color=colour, linewidth=1.1, alpha=0.7)
        axes.plot(tokens, ttft, marker, color=colour, markersize=5.5, label=NAMES.get(kind, kind))
        ratio = ratio_of(name)
        if ratio is not None:
            where: Any = {"textcoords": "offset points", "va": "center", "fontsize": 8, "color": colour}
            axes.annotate(f"{ratio:.0%}", (tokens[-1], ttft[-1]), xytext=(8, 0), **where)
    log_axis(axes)
    axes.set_xticks(tokens, [str(t) for t in tokens])
    axes.minorticks_off()
    axes.set_xlabel("prompt tokens (log scale)")
    axes.set_title("over the prompt's length", fontsize=10)
    axes.margins(x=0.12)


def _over_ratio(axes: Axes, names: list[str], measured: list[tuple[int, Measured]]) -> None:
    ratios = {name: ratio for name in names if (ratio := ratio_of(name)) is not None}
    blends, at = sorted(ratios, key=ratios.__getitem__), sorted(ratios.values())
    colour, marker = style_of("CacheBlend")
    full, reuse = (next((n for n in names if n.startswith(kind)), None) for kind in ("FullRecompute(", "FullReuse("))
    for tokens, m in measured:
        _mark(axes, full, at[-1] * 1.15, m)
        _mark(axes, reuse, at[0] / 1.15, m)
        axes.plot(at, [m.floor_s(name) for name in blends], color=colour, linewidth=1.1, alpha=0.7)
        axes.plot(at, [m.taken_s(name) for name in blends], marker, color=colour, markersize=5.5)
        where: Any = {"textcoords": "offset points", "va": "center", "fontsize": 8, "color": "#444444"}
        axes.annotate(f"{tokens}", (at[-1], m.taken_s(blends[-1])), xytext=(18, 0), **where)
    log_axis(axes)
    axes.set_xticks(at, [f"{r:g}" for r in at])
    axes.minorticks_off()
    axes.set_xlabel("recompute ratio (log scale)")
    axes.set_title("over the recompute ratio (labels: prompt tokens)", fontsize=10)
    axes.margins(x=0.16)


def _mark(axes: Axes, name: str | None, x: float, measured: Measured) -> None:
    """A method without a ratio, beside the end that it corresponds to."""
    if name is not None:
        colour, marker = style_of(name)
        axes.plot([x], [measured.taken_s(name)], marker, color=colour, markersize=5.5)
