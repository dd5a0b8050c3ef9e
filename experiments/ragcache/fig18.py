"""RAGCache, figure 18: cache-aware reordering on and off, against the request rate.

python -m experiments.ragcache.fig18 --data-dir ../shared/data
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from experiments.plotting import legend_below, log_axis, new_figure, tidy
from experiments.ragcache.bench import Bench, sweep
from experiments.ragcache.frame import WORKLOAD_TITLES
from experiments.ragcache.notes import notes_of, scale_note
from experiments.ragcache.seeds import interval_of, lines, over_seeds, percent, ratio_of, text
from experiments.ragcache.simulated import SimulatedConfig, SimulatedExperiment, simulated_app
from experiments.results import Results
from experiments.timed import Records
from kvreuse.ragcache.systems import RAGCACHE

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

LOADS = (0.8, 1.2, 1.8, 2.5)
ON, OFF = "reordering", "first come, first served"
SYSTEMS = (replace(RAGCACHE, name=OFF, window=0), replace(RAGCACHE, name=ON))
STYLES = {ON: ("#0072B2", "o"), OFF: ("#D55E00", "v")}
RATIOS = {"ttft_s": ("mean", "#000000", "s"), "ttft_p95_s": ("95th percentile", "#CC79A7", "P")}
NOTES = (
    f"RAGCache with a window of {RAGCACHE.window} (how often a request may be overtaken) and without. Where more "
    "arrives than can be served, TTFT grows with the length of the run."
)


def count(config: SimulatedConfig) -> Records:
    """Both orders at every rate."""
    (scale, *_) = config.scales
    for name in config.datasets:
        yield from sweep(config, Bench(config.retrieved(name, config.search()), scale), SYSTEMS, LOADS)


def tabulate(results: Results) -> tuple[pd.DataFrame, str]:
    """A row per question set and rate."""
    import pandas as pd

    rows = []
    for (name, load), here in pd.DataFrame(results.records).groupby(["case_id", "load"], sort=False):
        on, off = here[here["method"] == ON], here[here["method"] == OFF]
        rows.append(
            {
                "questions": WORKLOAD_TITLES[name],
                "load": f"{load:g}",
                "rate, 1/s": f"{on['rate'].iloc[0]:.3g}",
                "TTFT without, s": text(interval_of(off, "ttft_s")),
                "with, s": text(interval_of(on, "ttft_s")),
                "without / with": text(ratio_of(here, "ttft_s", OFF, ON)),
                "95th percentile, without / with": text(ratio_of(here, "ttft_p95_s", OFF, ON)),
                "documents hit without": percent(interval_of(off, "document_hits")),
                "with": percent(interval_of(on, "document_hits")),
                "prefill without, s": text(interval_of(off, "prefill_s")),
                "with, prefill s": text(interval_of(on, "prefill_s")),
            }
        )
    return pd.DataFrame(rows), f"{NOTES}\n\n{notes_of(results)}"


def draw(results: Results) -> Figure:
    """A row of panels per question set: TTFT, what reordering does to it, hits."""
    import pandas as pd

    frame = pd.DataFrame(results.records)
    names = list(frame["case_id"].unique())
    figure, axes = new_figure(len(names), 3)
    for (left, middle, right), name in zip(axes, names, strict=True):
        mine = frame[frame["case_id"] == name]
        points = over_seeds(mine, ["method", "rate"], ("ttft_s", "document_hits"))
        lines(left, points, "rate", "ttft_s", STYLES)
        log_axis(left, which="y")
        left.set_ylabel("mean TTFT (s, log scale)")
        for value, (label, colour, marker) in RATIOS.items():
            found = [ratio_of(here, value, OFF, ON) for _, here in mine.groupby("rate")]
            means, rates = [f.mean for f in found], sorted(mine["rate"].unique())
            spread = [[f.mean - f.low for f in found], [f.high - f.mean for f in found]]
            look = {"color": colour, "marker": marker, "markersize": 5, "capsize": 3}
            middle.errorbar(rates, means, yerr=spread, label=f"{label}, without / with", **look)
        middle.axhline(1.0, color="#777777", linewidth=1.0)
        middle.set_ylabel("TTFT without / with reordering")
        lines(right, points, "rate", "document_hits", STYLES, 100.0)
        right.set_ylabel("documents hit (%)")
        right.set_ylim(0, None)
        for panel in (left, middle, right):
            panel.set_title(WORKLOAD_TITLES[name], fontsize=10)
            panel.set_xlabel("arriving requests per second")
            tidy(panel)
    title = f"Simulated, {results.records[0]['server']}, {scale_note(results)}: cache-aware reordering"
    figure.suptitle(title, fontsize=11)
    legend_below(figure, 4)
    return figure


FIG18 = SimulatedExperiment(
    name="ragcache.fig18",
    shows="cache-aware reordering on and off against rate: TTFT, its tail, hits (simulated).",
    count=count,
    tabulate=tabulate,
    draw=draw,
    section="RAGCache 7.3",
    cost="40 s; the first time half an hour, for embeddings",
)

if __name__ == "__main__":
    simulated_app(FIG18)()
