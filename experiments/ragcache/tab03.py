"""RAGCache, table 3: seconds of search that no prefill hides, with and without speculation; from figure 19's records.

python -m experiments.ragcache.tab03 --data-dir ../shared/data
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from experiments.plotting import legend_below, new_figure, tidy
from experiments.ragcache.fig19 import NOTES, OFF, ON, STYLES, count
from experiments.ragcache.frame import WORKLOAD_TITLES
from experiments.ragcache.notes import notes_of, scale_note
from experiments.ragcache.seeds import interval_of, over_seeds, ratio_of, text
from experiments.ragcache.simulated import SimulatedExperiment, simulated_app
from experiments.results import Results

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

VALUE = "search_alone_s"


def tabulate(results: Results) -> tuple[pd.DataFrame, str]:
    """A row per question set, rate and share."""
    import pandas as pd

    rows = []
    for (name, load, fraction), here in pd.DataFrame(results.records).groupby(
        ["case_id", "load", "fraction"], sort=False
    ):
        rows.append(
            {
                "questions": WORKLOAD_TITLES[name],
                "load": f"{load:g}",
                "searched": f"{fraction:.1%}",
                "not overlapped without, s": text(interval_of(here[here["method"] == OFF], VALUE)),
                "with, s": text(interval_of(here[here["method"] == ON], VALUE)),
                "without / with": text(ratio_of(here, VALUE, OFF, ON)),
            }
        )
    return pd.DataFrame(rows), f"{NOTES}\n\n{notes_of(results)}"


def draw(results: Results) -> Figure:
    """Bars per share; a panel per question set and rate."""
    import pandas as pd

    frame = pd.DataFrame(results.records)
    panels = list(frame.groupby(["case_id", "load"], sort=False))
    figure, axes = new_figure(1, len(panels), sharey=True)
    for panel, ((name, load), here) in zip(axes[0], panels, strict=True):
        points = over_seeds(here, ["method", "fraction"], (VALUE,))
        for shift, method in ((-0.2, OFF), (0.2, ON)):
            mine = points[points["method"] == method]
            spread = [mine[VALUE] - mine[f"{VALUE}_low"], mine[f"{VALUE}_high"] - mine[VALUE]]
            places = [place + shift for place in range(len(mine))]
            panel.bar(places, mine[VALUE], 0.36, yerr=spread, color=STYLES[method][0], label=method)
        panel.set_xticks(range(here["fraction"].nunique()), [f"{100 * f:g}" for f in here["fraction"].unique()])
        panel.set_title(f"{WORKLOAD_TITLES[name]}, load {load:g}", fontsize=10)
        panel.set_xlabel("share of vectors searched (%)")
        tidy(panel)
    axes[0][0].set_ylabel("search not overlapped (s)")
    title = f"Simulated, {results.records[0]['server']}, {scale_note(results)}: search that no prefill hides"
    figure.suptitle(title, fontsize=11)
    legend_below(figure, 2)
    return figure


TAB03 = SimulatedExperiment(
    name="ragcache.tab03",
    shows="search that no prefill hides, with and without speculation, from figure 19's records (simulated).",
    count=count,
    tabulate=tabulate,
    draw=draw,
    section="RAGCache 7.3",
    cost="seconds, behind figure 19",
    requests=600,
    records_of="ragcache.fig19",
)

if __name__ == "__main__":
    simulated_app(TAB03)()
