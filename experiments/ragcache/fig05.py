"""RAGCache, figure 5: how skewed retrieval is, over question sets and a real service's trace.

python -m experiments.ragcache.fig05 --data-dir ../shared/data
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from experiments.plotting import legend_below, new_figure
from experiments.ragcache.frame import (
    WORKLOAD_STYLES,
    WORKLOAD_TITLES,
    CountedConfig,
    CountedExperiment,
    counted_app,
    embedder_note,
)
from experiments.ragcache.skew import access_record, curve, skew_axes, skew_row
from experiments.results import Results
from experiments.timed import Records
from experiments.traces import ragpulse, ragpulse_passages
from experiments.vectors import Search

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

NOTES = (
    "Exact search, the nearest document of each question; RAGPulse as it was retrieved (mostly six passages a "
    "request). By chance: the share if every document were equally likely, from as many retrievals. Documents that no "
    "request got count in the percentages."
)


def count(config: CountedConfig) -> Records:
    """Retrievals per document: of each question set (top 1), and of RAGPulse where it is there."""
    for name in config.datasets:
        found = config.retrieved(name, Search("flat", 1, embedder=config.embedder))
        nearest = found.found[:, -1, 0]
        yield access_record(name, "top 1", nearest.tolist(), len(found.corpus.texts), len(nearest))
    if config.has_trace("ragpulse"):
        with_passages = [r for r in ragpulse(config.data).requests if r.documents]
        accessed = [d.id for r in with_passages for d in r.documents]
        corpus = len(ragpulse_passages(config.data))
        yield access_record("ragpulse", "as retrieved", accessed, corpus, len(with_passages))


def tabulate(results: Results) -> tuple[pd.DataFrame, str]:
    """A row per workload."""
    import pandas as pd

    seeds = results.header["seeds"]
    rows = [{"workload": WORKLOAD_TITLES[r["case_id"]], **skew_row(r, seeds)} for r in results.records]
    return pd.DataFrame(rows), f"{embedder_note(results)} {NOTES}"


def draw(results: Results) -> Figure:
    """A curve per workload."""
    figure, panels = new_figure(1, 1)
    axes = panels[0][0]
    for record in results.records:
        colour, marker = WORKLOAD_STYLES[record["case_id"]]
        label = f"{WORKLOAD_TITLES[record['case_id']]} ({record['requests']:,} requests)"
        curve(axes, record, color=colour, marker=marker, markersize=5, label=label)
    skew_axes(axes)
    figure.suptitle(f"Retrievals of the most used documents (embedder: {results.header['embedder']})", fontsize=11)
    figure.set_size_inches(7.2, 5.4)
    legend_below(figure, 2)
    return figure


FIG05 = CountedExperiment(
    name="ragcache.fig05",
    shows="retrieval skew: share of retrievals over the most used documents.",
    count=count,
    tabulate=tabulate,
    draw=draw,
    section="RAGCache 3.2",
    cost="seconds; the first time 20 minutes, for embeddings",
)

if __name__ == "__main__":
    counted_app(FIG05)()
