"""CacheBlend, figure 10: recompute and load delay over the recompute ratio, and which storage device hides its load.

python -m experiments.fig10 --model demo --threads 1
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import kvreuse as kr
from experiments.environment import scratch_folder
from experiments.plotting import STYLES
from experiments.profiled import DEVICES, MEMORY_PRICE, profile_of, profile_record
from experiments.results import Results
from experiments.timed import Records, TimedConfig, TimedExperiment, timed_app
from kvreuse.store.controller import Formula

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

RATIOS = (0.05, 0.15, 0.3, 0.5, 1.0)
FORMULAS: tuple[Formula, ...] = ("paper", "measured")
COLOURS = ("#009E73", "#56B4E9", "#E69F00", "#D55E00", "#CC79A7")
NOTES = (
    "Times of the whole prompt in seconds, all layers; per layer both sides are divided by the same number. Paper: "
    "recompute takes ratio x full prefill. Measured: TTFT of the real blend from memory, with its full layer 0 and "
    "check, and the bytes it reads. Ratio: max(r*, the ratio whose recompute takes as long as loading). Hides: load "
    "is no longer than recompute at r* = 0.15. Prices are examples, of the order of a cloud's list prices; "
    "throttled devices are this disk, braked."
)


def measure(config: TimedConfig, model: kr.ReuseModel) -> Records:
    """One profile at the prompt's length."""
    length = config.num_chunks * config.chunk_tokens
    with scratch_folder() as folder:
        yield profile_record(
            kr.LoadingController.profile(
                model,
                [device.at(folder / str(number)) for number, device in enumerate(DEVICES)],
                lengths=(length,),
                ratios=RATIOS,
                repeats=config.repeats,
                memory_price_per_gb_month=MEMORY_PRICE,
                chunk_tokens=config.chunk_tokens,
            )
        )


def tabulate(results: Results) -> tuple[pd.DataFrame, str]:
    """A row per device."""
    import pandas as pd

    c = profile_of(results)
    (length,) = c.model.lengths
    rows = []
    for d in c.devices:
        row: dict[str, object] = {"device": d.label, "$ / GB month": d.price_per_gb_month}
        row["$ / prompt month"] = c.cost_per_month(length, d)
        for f in FORMULAS:
            row[f"load, s ({f})"] = c.T_load(length, d, formula=f)
            row[f"ratio ({f})"] = c.choose_ratio(length, d, formula=f)
            row[f"hides ({f})"] = "yes" if c.hides(d, c.min_ratio, length, formula=f) else "no"
        rows.append(row)
    recompute = ", ".join(f"{c.T_recompute(c.min_ratio, length, formula=f):.3g} s ({f})" for f in FORMULAS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # none hides: the table says so
        chosen = ", ".join(f"{c.choose_device(length=length, formula=f).name} ({f})" for f in FORMULAS)
    about = (
        f"{length} tokens; full prefill {c.model.prefill(length):.3g} s; recompute at r* = {c.min_ratio}: {recompute}. "
        f"The cheapest device that hides its load, or the fastest: {chosen}."
    )
    return pd.DataFrame(rows), f"{about}\n\n{NOTES}"


def draw(results: Results) -> Figure:
    """Left: delays over the ratio. Right: price against load, with recompute at r*."""
    from matplotlib.figure import Figure

    c = profile_of(results)
    (length,) = c.model.lengths
    figure = Figure(figsize=(10.5, 5.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    ratios = [i / 50 for i in range(1, 51)]
    dark = STYLES["CacheBlend"][0]
    for formula, style in zip(FORMULAS, ("--", "-"), strict=True):
        times = [c.T_recompute(r, length, formula=formula) for r in ratios]
        left.plot(ratios, times, color=dark, linestyle=style, label=f"recompute, {_NAMES[formula]}")
    points = [c.model.blend_s[i][0] for i in range(len(c.model.ratios))]
    left.plot(c.model.ratios, points, "o", color=dark, markersize=5)
    for d, colour in zip(c.devices, COLOURS, strict=True):
        load = c.T_load(length, d)
        left.axhline(load, color=colour, linewidth=1.4)
        right.plot(d.price_per_gb_month, load, "o", color=colour, markersize=9, label=f"load, {d.label}")
        ratio = c.choose_ratio(length, d)
        left.plot(ratio, max(load, c.T_recompute(ratio, length)), "*", color=colour, markersize=13, markeredgecolor="k")
    left.axvline(c.min_ratio, color="#777777", linestyle=":", label="r* = 0.15")
    left.plot([], [], "*", color="white", markeredgecolor="k", markersize=13, label="ratio chosen for a device")
    left.set_xlabel("recompute ratio")
    left.set_title("(a) which ratio costs no extra delay", fontsize=10)
    for formula, style in zip(FORMULAS, ("--", "-"), strict=True):
        right.axhline(c.T_recompute(c.min_ratio, length, formula=formula), color=dark, linestyle=style)
    right.set_xscale("log")
    right.set_xlabel("price ($ per GB and month, log scale)")
    right.set_title("(b) a device below a line hides its load at r* = 0.15", fontsize=10)
    for axes in (left, right):
        axes.set_yscale("log")
        axes.set_ylabel("delay (s, log scale)")
        axes.grid(True, color="#e4e4e4", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.08)
    h = results.header
    figure.suptitle(f"{h['model']}: recompute and load delay, {length} tokens ({h['device']}, threads: {h['threads']})")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


_NAMES = {"paper": "paper's formula (ratio x prefill)", "measured": "measured"}

FIG10 = TimedExperiment(
    name="fig10",
    shows="recompute and load delay over the recompute ratio; which device hides its load.",
    section="CacheBlend 5",
    cost="2 minutes",
    measure=measure,
    tabulate=tabulate,
    draw=draw,
    repeats=3,
)

if __name__ == "__main__":
    timed_app(FIG10)()
