"""CacheBlend, figure 7: how KV deviation is distributed over the tokens of a layer.

python -m experiments.fig07 --model demo --limit 20
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

import kvreuse as kr
from experiments.experiment import Experiment
from experiments.inside import encoder_panels, number, recording, rounded
from experiments.options import app_for
from experiments.plotting import legend_below, log_axis, new_figure
from experiments.results import Results
from experiments.value_tables import Record, ValueTable, value_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOP = (0.05, 0.1, 0.15, 0.3)
LEVELS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.975, 0.99, 1.0)
NOTE = (
    "KV deviation of full reuse from full recompute, L2 over heads and dimensions of K and V, of the reused tokens "
    "that are not exact. Top x%: share of the layer's squared deviation that the x% most deviating tokens hold (x% if "
    "all deviated alike), mean [95% bootstrap interval over cases]. Layer 0 does not deviate."
)


def _fields(rec: kr.Recording, result: kr.Prefill) -> dict[str, Any]:
    """Per layer behind 0: quantiles of the deviation by its mean, and the shares of the top tokens."""
    reused = rec.kv_deviation[1:, result.trace.reused]
    if not reused.numel():  # one exact chunk: nothing deviates
        return {"quantiles": [], "top": []}
    deviation = reused.sqrt()
    relative = deviation / deviation.mean(dim=1, keepdim=True)
    quantiles = torch.quantile(relative, torch.tensor(LEVELS), dim=1).T
    falling = reused.sort(dim=1, descending=True).values.cumsum(dim=1)
    counts = [max(1, round(share * reused.shape[1])) for share in TOP]
    top = torch.stack([falling[:, n - 1] / falling[:, -1] for n in counts], dim=1)
    return {"quantiles": rounded(quantiles.tolist()), "top": rounded(top.tolist())}


def _rows(record: Record, case: Mapping[str, Record]) -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
    for layer, (top, quantiles) in enumerate(zip(record["top"], record["quantiles"], strict=True), 1):
        values = {f"top{100 * t:g}": number(v) for t, v in zip(TOP, top, strict=True)}
        yield {"layer": layer}, values | {f"q{level:g}": number(v) for level, v in zip(LEVELS, quantiles, strict=True)}


def tabulate(results: Results) -> ValueTable | None:
    """A row per encoder and layer."""
    return value_table(results, _rows, {f"top{100 * t:g}": f"top {100 * t:g}%" for t in TOP}, ("layer",), NOTE)


def draw(tables: list[ValueTable], paper: bool) -> Figure:
    """A row of panels per dataset, a column per encoder; a line per layer, from early (dark) to late (light)."""
    from matplotlib import colormaps

    figure, panels = new_figure(len(tables), 2, sharex=True, sharey=True)
    for axes, frame in encoder_panels(panels, tables):
        layers = sorted(frame["layer"])
        shown = sorted({layers[round(i * (len(layers) - 1) / 4)] for i in range(5)})
        for place, layer in enumerate(shown):
            line = frame[frame["layer"] == layer].iloc[0]
            colour = colormaps["cividis"](place / max(1, len(shown) - 1) * 0.9)
            axes.plot([line[f"q{level:g}"] for level in LEVELS], LEVELS, color=colour, label=f"layer {layer}")
        axes.axhline(0.85, color="#D55E00", linewidth=1, linestyle=":", label="above: the top 15%")
        axes.axvline(1.0, color="#777777", linewidth=0.8, linestyle="--", label="the layer's mean")
        log_axis(axes)
        axes.set_xlabel("KV deviation by the layer's mean (L2, log scale)")
    for row in panels:
        row[0].set_ylabel("share of tokens below (CDF)")
    figure.suptitle(f"{tables[0].header['model']}: distribution of KV deviation on a layer", fontsize=11)
    legend_below(figure)
    return figure


FIG07 = Experiment(
    name="fig07",
    shows="distribution of KV deviation over the tokens of a layer.",
    section="CacheBlend 4.3",
    cost="10 s a case",
    methods=(kr.FullReuse(context="bare"), kr.FullReuse(context="prefix")),
    draw=draw,
    datasets=("musique",),
    measure=recording((kr.KVDeviation(),), _fields),
    tabulate=tabulate,
)

if __name__ == "__main__":
    app_for(FIG07)()
