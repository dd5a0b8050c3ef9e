"""CacheBlend, figure 16: quality against TTFT as the recompute ratio goes from 0 to 1, on four datasets.

python -m experiments.fig16 --model demo --dataset musique,2wikimqa --limit 20
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from experiments.experiment import Experiment
from experiments.least_compute import METHODS, ratio_of
from experiments.options import app_for
from experiments.plotting import band, dataset_title, from_zero, legend_below, log_axis, new_figure, style_of, tidy
from experiments.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS = (("score", "{metric} (higher is better)"), ("kl", "KL to full recompute\n(nats/token, lower is better)"))


def draw(tables: list[Table], paper: bool) -> Figure:
    """Score above, KL below, a column per dataset; CacheBlend's ratios joined by a line and labelled."""
    figure, panels = new_figure(2, len(tables), sharex="col")
    for column, table in enumerate(tables):
        frame = table.frame.assign(ratio=[ratio_of(m) for m in table.frame["method"]])
        for row, (name, label) in enumerate(ROWS):
            axes = panels[row][column]
            line = frame[frame["ratio"].between(0, 1)].sort_values("ratio")
            colour, _ = style_of("CacheBlend")
            band(axes, line["ttft_s"], line, name, color=colour, linewidth=1.2)
            for _, point in frame.iterrows():
                color, marker = style_of(str(point["method"]))
                blend = 0 < point["ratio"] < 1
                text = f"CacheBlend ({point['context']}), ratio in %" if blend else point["label"]
                axes.plot(point["ttft_s"], point[name], marker, color=color, markersize=7, label=text, linestyle="none")
                if blend:
                    place: Any = {"textcoords": "offset points", "xytext": (0, 6), "ha": "center", "fontsize": 7}
                    axes.annotate(f"{100 * point['ratio']:g}", (point["ttft_s"], point[name]), color=colour, **place)
            axes.set_ylabel(label.format(metric=table.metric))
            from_zero(axes)
            tidy(axes)
        panels[0][column].set_title(dataset_title(table), fontsize=10)
        log_axis(panels[1][column])
        panels[1][column].set_xlabel("TTFT (s, log scale), median")
    figure.suptitle(f"{tables[0].header['model']}: quality against TTFT by recompute ratio", fontsize=11)
    legend_below(figure)
    return figure


FIG16 = Experiment(
    name="fig16",
    shows="quality against TTFT by recompute ratio, on four datasets.",
    section="CacheBlend 7.3",
    cost="25 s a case, SAMSum and MultiNews 40 to 50 s",
    methods=METHODS,
    draw=draw,
    smoke={"methods": METHODS[:5], "datasets": ("musique", "samsum")},
)

if __name__ == "__main__":
    app_for(FIG16)()
