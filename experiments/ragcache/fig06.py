"""RAGCache, figure 6: retrieval skew under other settings: top-k, vector index, embedder, what is searched for.

python -m experiments.ragcache.fig06 --data-dir ../shared/data
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from experiments.plotting import new_figure
from experiments.ragcache.frame import WORKLOAD_TITLES, CountedConfig, CountedExperiment, counted_app, embedder_note
from experiments.ragcache.skew import access_record, curve, skew_axes, skew_row
from experiments.results import Results
from experiments.timed import Records
from experiments.vectors import Search

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
MARKERS = ("o", "s", "^", "P")
NOTES = (
    "One question set; what is not varied is: exact search, top 1, the run's embedder, questions with their choices. "
    "Hashed words: word weights, a lexical embedder without a model. By chance: the share if every document were "
    "equally likely, from as many retrievals."
)


@dataclass(frozen=True)
class Setting:
    """One curve: the panel it is in, its name, and what is searched how."""

    panel: str
    name: str
    search: Search


def settings(embedder: str, choices: bool) -> list[Setting]:
    """All curves. ``choices``: whether the questions have choices that can be left out."""
    found = [Setting("documents per request", f"top {k}", Search("flat", k, embedder=embedder)) for k in (1, 2, 3, 5)]
    indexes = (("flat", "flat (exact)"), ("ivf", "IVF"), ("hnsw", "HNSW"))
    found += [Setting("vector index", name, Search(index, 1, embedder=embedder)) for index, name in indexes]  # type: ignore[arg-type]
    for name in () if embedder == "words" else (embedder, "words"):
        label = {"demo": "all-MiniLM-L6-v2", "words": "hashed words"}.get(name, name)
        found.append(Setting("embedder", label, Search("flat", 1, embedder=name)))
    if choices:
        for stem, name in ((False, "question and choices"), (True, "question alone")):
            found.append(Setting("searched for", name, Search("flat", 1, embedder=embedder, stem=stem)))
    return found


def count(config: CountedConfig) -> Records:
    """Retrievals per document of the first question set, under every setting."""
    name = config.datasets[0]
    for setting in settings(config.embedder, choices=name == "mmlu"):
        found = config.retrieved(name, setting.search)
        rows = found.found[:, -1]
        record = access_record(name, setting.name, rows[rows >= 0].tolist(), len(found.corpus.texts), len(rows))
        yield record | {"panel": setting.panel}


def tabulate(results: Results) -> tuple[pd.DataFrame, str]:
    """A row per setting."""
    import pandas as pd

    seeds = results.header["seeds"]
    rows = [{"varied": r["panel"], "setting": r["method"], **skew_row(r, seeds)} for r in results.records]
    return pd.DataFrame(rows), f"{embedder_note(results)} {NOTES}"


def draw(results: Results) -> Figure:
    """A panel per thing that is varied."""
    panels = list(dict.fromkeys(r["panel"] for r in results.records))
    figure, axes = new_figure(1, len(panels), sharey=True)
    for place, panel in enumerate(panels):
        here = [r for r in results.records if r["panel"] == panel]
        for record, colour, marker in zip(here, COLOURS, MARKERS, strict=False):
            curve(axes[0][place], record, color=colour, marker=marker, markersize=4, label=record["method"])
        skew_axes(axes[0][place])
        axes[0][place].set_title(panel, fontsize=10)
        axes[0][place].set_xlabel("most retrieved documents\n(% of the corpus, log scale)")
        if place:
            axes[0][place].set_ylabel("")
        handles, labels = axes[0][place].get_legend_handles_labels()
        keep = len(here)
        axes[0][place].legend(handles[:keep], labels[:keep], loc="upper left", frameon=False, fontsize=8)
    handles, labels = axes[0][0].get_legend_handles_labels()
    own = sum(r["panel"] == panels[0] for r in results.records)
    figure.legend(handles[own:], labels[own:], loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    name = results.records[0]["case_id"]
    figure.suptitle(
        f"{WORKLOAD_TITLES[name]}, {results.records[0]['requests']:,} questions: retrieval skew", fontsize=11
    )
    return figure


FIG06 = CountedExperiment(
    name="ragcache.fig06",
    shows="retrieval skew over top-k, vector index, embedder, with and without choices.",
    count=count,
    tabulate=tabulate,
    draw=draw,
    section="RAGCache 3.2",
    cost="a minute; the first time 30 minutes, for embeddings",
    datasets=("mmlu",),
)

if __name__ == "__main__":
    counted_app(FIG06)()
