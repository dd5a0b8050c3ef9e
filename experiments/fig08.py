"""CacheBlend, figure 8: rank correlation of the KV deviation of neighbouring layers, and with the check layer's.

python -m experiments.fig08 --model demo --limit 20
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import kvreuse as kr
from experiments.experiment import Experiment
from experiments.inside import encoder_panels, number, recording, rounded
from experiments.options import app_for
from experiments.plotting import band, legend_below, new_figure
from experiments.results import Results
from experiments.value_tables import Record, ValueTable, value_table
from kvreuse.record.rank import spearman

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHECK_LAYER = 1
# what is correlated -> (heading, colour, marker)
LINES = {
    "neighbour": ("with the next layer", "#0072B2", "o"),
    "check": ("with the check layer (1)", "#D55E00", "v"),
}
NOTE = (
    "Spearman's rank correlation of the tokens' KV deviation (full reuse against full recompute, K and V, reused "
    "tokens that are not exact), mean [95% bootstrap interval over cases]. Layer 0 does not deviate."
)


def _fields(rec: kr.Recording, result: kr.Prefill) -> dict[str, Any]:
    deviation = rec.kv_deviation[:, result.trace.reused]
    with_check = [spearman(deviation[CHECK_LAYER], layer) for layer in deviation[CHECK_LAYER + 1 :]]
    return {"neighbour": rounded(rec.rank_correlation[CHECK_LAYER:].tolist()), "check": rounded(with_check)}


def _rows(record: Record, case: Mapping[str, Record]) -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
    """Row ``layer``: its correlation with the layer before it, and with the check layer."""
    pairs = zip(record["neighbour"], record["check"], strict=True)
    for layer, (neighbour, check) in enumerate(pairs, CHECK_LAYER + 1):
        yield {"layer": layer}, {"neighbour": number(neighbour), "check": number(check)}


def tabulate(results: Results) -> ValueTable | None:
    """A row per encoder and layer."""
    headings = {"neighbour": "with the layer before", "check": "with the check layer (1)"}
    return value_table(results, _rows, headings, ("layer",), NOTE)


def draw(tables: list[ValueTable], paper: bool) -> Figure:
    """A row of panels per dataset, a column per encoder."""
    figure, panels = new_figure(len(tables), 2, sharey=True)
    for axes, frame in encoder_panels(panels, tables):
        line = frame.sort_values("layer")
        for name, (label, colour, marker) in LINES.items():
            # the pair (l - 1, l) stands at l - 1 in the paper's sense: each layer with its next one
            x = line["layer"] - 1 if name == "neighbour" else line["layer"]
            band(axes, x, line, name, color=colour, marker=marker, label=label)
        axes.axhline(0, color="#777777", linewidth=0.8)
        axes.set_ylim(min(-0.05, float(line["check_low"].min()) - 0.05), 1.02)
        axes.set_xlabel("layer")
    for row in panels:
        row[0].set_ylabel("Spearman correlation of KV deviation")
    figure.suptitle(f"{tables[0].header['model']}: rank correlation of KV deviation between layers", fontsize=11)
    legend_below(figure)
    return figure


FIG08 = Experiment(
    name="fig08",
    shows="rank correlation of KV deviation between neighbouring layers, and with the check layer.",
    section="CacheBlend 4.3",
    cost="10 s a case",
    methods=(kr.FullReuse(context="bare"), kr.FullReuse(context="prefix")),
    draw=draw,
    datasets=("musique",),
    measure=recording((kr.KVDeviation(), kr.RankCorrelation()), _fields),
    tabulate=tabulate,
)

if __name__ == "__main__":
    app_for(FIG08)()
