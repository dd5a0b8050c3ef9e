"""CacheBlend, figure 6: attention deviation against the recompute ratio, for HKVD, random tokens and an oracle.

python -m experiments.fig06 --model demo --limit 10
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import kvreuse as kr
from experiments.experiment import Experiment
from experiments.inside import encoder_panels, recording, rounded
from experiments.options import app_for
from experiments.plotting import band, legend_below, new_figure
from experiments.results import Results
from experiments.value_tables import Record, ValueTable, value_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RATIOS = (0.05, 0.1, 0.15, 0.3, 0.5)
CONTEXTS = ("bare", "prefix")
# rule -> (selector, colour, marker); HKVD is CacheBlend and has its colour
RULES: dict[str, tuple[kr.Selector | None, str, str]] = {
    "HKVD": (None, "#0072B2", "o"),
    "random": (kr.RandomTokens(), "#777777", "x"),
    "oracle": (kr.OracleDeviation(), "#E69F00", "*"),
}
NOTE = (
    "Mean [95% bootstrap interval over cases]. Attention deviation: L2 norm of the difference of the attention weights "
    "from the question to the context (all heads) to full recompute's, mean over layers. Of full reuse's: as a share "
    "of full reuse's on the same case and encoder. Recomputed: tokens over reused tokens, mean over layers, HKVD's "
    "full layer 0 counted. Schedule: constant."
)


def _methods(context: Any) -> Iterator[kr.ReuseMethod]:
    yield kr.FullReuse(context=context)
    for selector, _, _ in RULES.values():
        for ratio in RATIOS:
            yield kr.CacheBlend(ratio=ratio, schedule="constant", context=context, selector=selector)


def _place(method: str) -> tuple[str, float]:
    """Rule and ratio of a method's repr."""
    for context in CONTEXTS:
        for m in _methods(context):
            if repr(m) == method and isinstance(m, kr.CacheBlend):
                rule = next(name for name, (selector, _, _) in RULES.items() if selector == m.selector)
                return rule, float(m.ratio)
    return "full reuse", 0.0


def _rows(record: Record, case: Mapping[str, Record]) -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
    mean = statistics.fmean(record["attention_deviation"])
    context = "bare" if "context='bare'" in record["method"] else "prefix"
    reuse = statistics.fmean(case[repr(kr.FullReuse(context=context))]["attention_deviation"])  # type: ignore[arg-type]
    rule, ratio = _place(record["method"])
    numbers = {
        "deviation": mean,
        "share": mean / reuse if reuse else float("nan"),
        "recomputed": _share(record),
    }
    yield {"rule": rule, "ratio": ratio}, numbers


def _share(record: Record) -> float:
    reused = record["num_reused"]
    return record["recomputed_tokens"] / reused if reused else float("nan")


def tabulate(results: Results) -> ValueTable | None:
    """A row per encoder, rule and ratio."""
    headings = {"deviation": "attention deviation", "share": "of full reuse's", "recomputed": "recomputed"}
    return value_table(results, _rows, headings, ("rule", "ratio"), NOTE)


def draw(tables: list[ValueTable], paper: bool) -> Figure:
    """A row of panels per dataset, a column per encoder."""
    import pandas as pd

    figure, panels = new_figure(len(tables), tables[0].frame["context"].nunique())
    for axes, frame in encoder_panels(panels, tables):
        reuse = frame[frame["rule"] == "full reuse"]
        for rule, (_, colour, marker) in RULES.items():
            line = pd.concat([reuse, frame[frame["rule"] == rule].sort_values("ratio")])
            band(axes, line["ratio"], line, "deviation", color=colour, marker=marker, label=rule)
        axes.set_xlabel("recompute ratio (0 is full reuse)")
        axes.set_ylim(bottom=0)
    for row in panels:
        row[0].set_ylabel("attention deviation\n(L2, mean over layers)")
    figure.suptitle(f"{tables[0].header['model']}: attention deviation against recompute ratio", fontsize=11)
    legend_below(figure)
    return figure


FIG06 = Experiment(
    name="fig06",
    shows="attention deviation against the recompute ratio: HKVD, random, oracle.",
    section="CacheBlend 4.3",
    cost="1 min a case",
    methods=tuple(m for context in CONTEXTS for m in _methods(context)),
    draw=draw,
    datasets=("musique",),
    measure=recording(
        (kr.AttentionDeviation(),), lambda rec, _: {"attention_deviation": rounded(rec.attention_deviation.tolist())}
    ),
    tabulate=tabulate,
    smoke={"methods": tuple(m for m in _methods("bare") if getattr(m, "ratio", 0.3) == 0.3)},
)

if __name__ == "__main__":
    app_for(FIG06)()
