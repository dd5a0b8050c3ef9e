"""Records of several seeds: means with 95% intervals, ratios paired by seed, lines with bands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from experiments.plotting import band
from kvreuse.intervals import Interval, bootstrap_interval

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

# Okabe and Ito's colours; no reuse and prefix caching look as in the other figures.
SYSTEM_STYLES: dict[str, Any] = {
    "no reuse": ("#000000", "s"),
    "vLLM-like": ("#E69F00", "D"),
    "SGLang-like": ("#009E73", "^"),
    "RAGCache": ("#0072B2", "o"),
    "RAGCache, search first": {"color": "#0072B2", "marker": "o", "markerfacecolor": "white", "linestyle": "--"},
}


def interval_of(frame: pd.DataFrame, value: str) -> Interval:
    """The mean over seeds, a row each."""
    return bootstrap_interval(frame.sort_values("seed")[value].tolist())


def ratio_of(frame: pd.DataFrame, value: str, above: str, below: str) -> Interval:
    """The mean over seeds of one method's value over another's, of the same requests."""
    wide = frame.pivot(index="seed", columns="method", values=value)
    return bootstrap_interval((wide[above] / wide[below]).tolist())


def over_seeds(frame: pd.DataFrame, by: Sequence[str], values: Iterable[str]) -> pd.DataFrame:
    """A row per combination of ``by``, in the order of the records: ``value``, ``value_low``, ``value_high``."""
    import pandas as pd

    rows = []
    for key, group in frame.groupby(list(by), sort=False, dropna=False):
        row: dict[str, Any] = dict(zip(by, key, strict=True))
        for value in values:
            found = interval_of(group, value)
            row |= {value: found.mean, f"{value}_low": found.low, f"{value}_high": found.high}
        rows.append(row)
    return pd.DataFrame(rows)


def text(found: Interval, digits: int = 3) -> str:
    """Mean and bounds, to so many significant digits."""
    mean, low, high = (f"{v:#.{digits}g}".rstrip(".") for v in (found.mean, found.low, found.high))
    return f"{mean} [{low}, {high}]"


def percent(found: Interval) -> str:
    """Mean and bounds of a share."""
    return f"{found:.1%}"


def lines(axes: Axes, frame: pd.DataFrame, x: str, value: str, styles: dict[str, Any], scale: float = 1.0) -> None:
    """A line with its band per method; ``styles``: colour and marker, or keywords of matplotlib."""
    for method, style in styles.items():
        mine = frame[frame["method"] == method]
        if mine.empty:
            continue
        look = style if isinstance(style, dict) else {"color": style[0], "marker": style[1]}
        numbers = mine[[value, f"{value}_low", f"{value}_high"]].astype(float) * scale
        band(axes, mine[x], numbers, value, label=method, **look)
