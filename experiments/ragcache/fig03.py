"""RAGCache, figure 3: how long documents and requests are.

python -m experiments.ragcache.fig03 --data-dir ../shared/data
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.corpora import load_corpus, load_questions
from experiments.plotting import legend_below, log_axis, new_figure, tidy
from experiments.ragcache.frame import WORKLOAD_STYLES, CountedConfig, CountedExperiment, counted_app
from experiments.results import Results
from experiments.timed import Records
from experiments.traces import mooncake, ragpulse, ragpulse_passages
from experiments.vectors import SEPARATOR, count_tokens

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

PANELS = {"documents": "documents", "requests": "requests"}
QUESTION_LINES = {"mmlu": "-", "nq": "--", "2wiki": "-.", "musique": ":"}
NOTES = (
    "Texts in tokens of the model's tokenizer, a document with the empty line behind it; traces in their own tokens, "
    "as published. A question is what is asked, without documents; a prompt is everything. Documents here are "
    "paragraphs, the paper's come from a far larger Wikipedia corpus: see docs/reproduction.md."
)


def _record(panel: str, name: str, lengths: Sequence[int]) -> dict[str, Any]:
    values = np.asarray(lengths)
    return {
        "case_id": panel,
        "method": name,
        "count": len(values),
        "mean": float(values.mean()),
        "percentiles": [float(v) for v in np.percentile(values, np.arange(101))],
    }


def count(config: CountedConfig) -> Records:
    """Percentiles of every length: no text, no single value but the extremes."""
    counter, corpus = config.counter(), load_corpus(config.data)
    label = {"wiki": "wiki corpus", "small": "small sets' paragraphs"}[corpus.name]
    yield _record("documents", label, count_tokens([text + SEPARATOR for text in corpus.texts], counter))
    for name in config.datasets:
        texts = [question.text for question in load_questions(name, config.data)]
        yield _record("requests", f"{_TITLES[name]}, question", count_tokens(texts, counter)[: config.limit])
    if config.has_trace("ragpulse"):
        yield _record("documents", "RAGPulse, passages", list(ragpulse_passages(config.data).values()))
        whole = ragpulse(config.data, view="prompt")
        yield _record("requests", "RAGPulse, prompt", [r.input_tokens for r in whole.requests])
    if config.has_trace("mooncake"):
        chats = mooncake(config.data)
        yield _record("requests", "Mooncake, prompt", [r.input_tokens for r in chats.requests])


_Line = str | tuple[int, tuple[int, ...]]
_TITLES = {"mmlu": "MMLU", "nq": "Natural Questions", "2wiki": "2WikiMultihopQA", "musique": "MuSiQue"}


def tabulate(results: Results) -> tuple[pd.DataFrame, str]:
    """A row per kind of text."""
    import pandas as pd

    rows = [
        {
            "what": r["case_id"],
            "of": r["method"],
            "number": r["count"],
            "mean, tokens": f"{r['mean']:,.1f}",
            **{f"{p}%": f"{r['percentiles'][p]:,.0f}" for p in (5, 50, 95, 99)},
            "longest": f"{r['percentiles'][100]:,.0f}",
        }
        for r in results.records
    ]
    return pd.DataFrame(rows), NOTES


def _style(label: str) -> tuple[str, _Line]:
    """Colour, that of the workload in all figures, and line."""
    for name, title in _TITLES.items():
        if label.startswith(title):
            return WORKLOAD_STYLES[name][0], QUESTION_LINES[name]
    for name in ("ragpulse", "mooncake"):
        if label.lower().startswith(name):
            return WORKLOAD_STYLES[name][0], (0, (5, 1)) if name == "ragpulse" else (0, (1, 1))
    return "#000000", "-"


def _decades(results: Results, panel: str) -> float:
    """How many powers of ten a panel spans."""
    ends = [r["percentiles"][end] for r in results.records if r["case_id"] == panel for end in (0, 100)]
    return float(np.log10(max(ends) / max(1.0, min(ends))))


def draw(results: Results) -> Figure:
    """Cumulative distributions: documents left, requests right."""
    figure, panels = new_figure(1, 2, sharey=True)
    for axes, (panel, title) in zip(panels[0], PANELS.items(), strict=True):
        for record in (r for r in results.records if r["case_id"] == panel):
            colour, line = _style(record["method"])
            label = f"{record['method']} (mean {record['mean']:,.0f})"
            axes.plot(record["percentiles"], range(101), color=colour, linestyle=line, label=label)
        log_axis(axes, (1.0,) if _decades(results, panel) > 1.5 else (1.0, 2.0, 5.0))
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("tokens (log scale)")
        axes.set_ylim(0, 102)
        tidy(axes)
    panels[0][0].set_ylabel("shorter than that (%)")
    figure.suptitle("Lengths of documents and of requests", fontsize=11)
    legend_below(figure, 2)
    return figure


FIG03 = CountedExperiment(
    name="ragcache.fig03",
    shows="lengths of documents, questions and whole prompts, in tokens.",
    count=count,
    tabulate=tabulate,
    draw=draw,
    section="RAGCache 3.1",
    cost="half a minute",
)

if __name__ == "__main__":
    counted_app(FIG03)()
