"""RAGCache, figure 18: cache-aware reordering on and off, against the request rate.

python -m experiments.ragcache.fig18 --data-dir ../shared/data
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from experiments.plotting import legend_below, new_figure, tidy
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
PANELS = {
    "ttft_s": "mean TTFT (s)",
    "ttft_p95_s": "95th percentile of TTFT (s)",
    "document_hits": "documents hit (%)",
}
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
    """A row of panels per question set."""
    import pandas as pd

    frame = pd.DataFrame(results.records)
    names = list(frame["case_id"].unique())
    figure, axes = new_figure(len(names), len(PANELS))
    for row, name in enumerate(names):
        points = over_seeds(frame[frame["case_id"] == name], ["method", "rate"], PANELS)
        for panel, (value, label) in zip(axes[row], PANELS.items(), strict=True):
            lines(panel, points, "rate", value, STYLES, 100.0 if value == "document_hits" else 1.0)
            panel.set_title(WORKLOAD_TITLES[name], fontsize=10)
            panel.set_xlabel("arriving requests per second")
            panel.set_ylabel(label)
            panel.set_ylim(0, None)
            tidy(panel)
    title = f"Simulated, {results.records[0]['server']}, {scale_note(results)}: cache-aware reordering"
    figure.suptitle(title, fontsize=11)
    legend_below(figure, 2)
    return figure


FIG18 = SimulatedExperiment(
    name="ragcache.fig18",
    shows="cache-aware reordering on and off against rate: TTFT, its tail, hits (simulated).",
    count=count,
    tabulate=tabulate,
    draw=draw,
    section="RAGCache 7.3",
    cost="?",
)

if __name__ == "__main__":
    simulated_app(FIG18)()
