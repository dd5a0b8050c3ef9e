"""RAGCache, figure 19: speculative pipelining on and off, against the share of the vectors that is searched.

python -m experiments.ragcache.fig19 --data-dir ../shared/data
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from experiments.plotting import legend_below, new_figure, tidy
from experiments.ragcache.bench import Bench, sweep
from experiments.ragcache.frame import WORKLOAD_TITLES
from experiments.ragcache.notes import notes_of, scale_note
from experiments.ragcache.scales import Scale
from experiments.ragcache.seeds import interval_of, lines, over_seeds, percent, ratio_of, text
from experiments.ragcache.simulated import SimulatedConfig, SimulatedExperiment, simulated_app
from experiments.results import Results
from experiments.timed import Records
from kvreuse.ragcache.systems import RAGCACHE

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

FRACTIONS = (0.125, 0.25, 0.5, 1.0)  # the paper's
LOADS = (0.1, 0.75)
ON, OFF = "speculation", "search first"
SYSTEMS = (replace(RAGCACHE, name=OFF, speculate=False), replace(RAGCACHE, name=ON))
STYLES = {ON: ("#0072B2", "o"), OFF: ("#D55E00", "v")}
PANELS = {"ttft_s": "mean TTFT (s)", "search_alone_s": "search not overlapped (s)"}
NOTES = (
    "The searched share of the clusters is real (an IVF index over the corpus, four stages, every question's lists); "
    "the time of a search is proportional to it, and that of searching everything is presumed. Search not overlapped: "
    "the part of a request's search in which the prefill of its answer did not run. Kept: answers that had been begun "
    "during the search. Prefills: started per request, those on wrong lists included."
)


def searched(scale: Scale, fraction: float) -> Scale:
    """The same server with searches of that share of everything: the scale's search time is that of all."""
    stages = tuple(fraction * seconds for seconds in scale.costs.search_stage_s)
    costs: Any = scale.costs
    return replace(scale, costs=replace(costs, search_stage_s=stages))


def count(config: SimulatedConfig) -> Records:
    """With and without, at every share and rate."""
    (scale, *_) = config.scales
    for name in config.datasets:
        for fraction in FRACTIONS:
            retrieved = config.retrieved(name, replace(config.search(), probed=fraction))
            bench = Bench(retrieved, searched(scale, fraction))
            search_s = math.fsum(bench.costs.search_stage_s)
            yield from sweep(config, bench, SYSTEMS, LOADS, fraction=fraction, search_s=search_s)


def tabulate(results: Results) -> tuple[pd.DataFrame, str]:
    """A row per question set, rate and share."""
    import pandas as pd

    rows = []
    for (name, load, fraction), here in pd.DataFrame(results.records).groupby(
        ["case_id", "load", "fraction"], sort=False
    ):
        on, off = here[here["method"] == ON], here[here["method"] == OFF]
        rows.append(
            {
                "questions": WORKLOAD_TITLES[name],
                "load": f"{load:g}",
                "searched": f"{fraction:.1%}",
                "search, s": f"{on['search_s'].iloc[0]:.3g}",
                "TTFT without, s": text(interval_of(off, "ttft_s")),
                "with, s": text(interval_of(on, "ttft_s")),
                "without / with": text(ratio_of(here, "ttft_s", OFF, ON)),
                "kept": percent(interval_of(on, "speculative")),
                "prefills per request": text(interval_of(on, "prefills")),
                "prefill seconds per request without": text(interval_of(off, "computed_s")),
                "with": text(interval_of(on, "computed_s")),
                "documents hit without": percent(interval_of(off, "document_hits")),
                "with, documents hit": percent(interval_of(on, "document_hits")),
            }
        )
    return pd.DataFrame(rows), f"{NOTES}\n\n{notes_of(results)}"


def draw(results: Results) -> Figure:
    """A row of panels per question set; TTFT and search at both rates."""
    import pandas as pd

    frame = pd.DataFrame(results.records)
    names = list(frame["case_id"].unique())
    figure, axes = new_figure(len(names), 2 * len(LOADS), sharex=True)
    for row, name in enumerate(names):
        for column, (load, (value, label)) in enumerate((load, panel) for load in LOADS for panel in PANELS.items()):
            panel, here = axes[row][column], frame[(frame["case_id"] == name) & (frame["load"] == load)]
            points = over_seeds(here, ["method", "fraction"], (value,))
            points["fraction"] *= 100
            lines(panel, points, "fraction", value, STYLES)
            panel.set_title(f"{WORKLOAD_TITLES[name]}, load {load:g}", fontsize=10)
            panel.set_ylabel(label)
            panel.set_ylim(0, None)
            panel.set_xticks([100 * f for f in FRACTIONS], [f"{100 * f:g}" for f in FRACTIONS])
            tidy(panel)
            if row == len(names) - 1:
                panel.set_xlabel("share of vectors searched (%)")
    title = f"Simulated, {results.records[0]['server']}, {scale_note(results)}: speculative pipelining"
    figure.suptitle(title, fontsize=11)
    legend_below(figure, 2)
    return figure


FIG19 = SimulatedExperiment(
    name="ragcache.fig19",
    shows="speculative pipelining on and off over the share of vectors searched: TTFT, search left (simulated).",
    count=count,
    tabulate=tabulate,
    draw=draw,
    section="RAGCache 7.3",
    cost="100 s; the first time half an hour, for embeddings",
    requests=600,
)

if __name__ == "__main__":
    simulated_app(FIG19)()
