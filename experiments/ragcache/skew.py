"""How unevenly documents are retrieved: counts, the share of the most used ones, and their curve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.plotting import log_axis, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TOP = 0.03  # RAGCache, 3.2: the top 3% of documents get 60% of MMLU's requests


def access_record(case: str, method: str, accessed: Iterable[Hashable], corpus: int, requests: int) -> dict[str, Any]:
    """A record of counts alone: how many documents were accessed how often, of ``corpus`` documents."""
    times = Counter(Counter(accessed).values())
    ordered = {str(n): times[n] for n in sorted(times, reverse=True)}
    return {"case_id": case, "method": method, "corpus": corpus, "requests": requests, "documents_by_accesses": ordered}


def access_counts(record: Mapping[str, Any]) -> np.ndarray:
    """Accesses of every document of the corpus, most used first [corpus]; zeros for those that nobody got."""
    counts = [int(n) for n, documents in record["documents_by_accesses"].items() for _ in range(documents)]
    return np.pad(np.array(sorted(counts, reverse=True), dtype=np.int64), (0, record["corpus"] - len(counts)))


def top_share(counts: np.ndarray, share: float = TOP) -> float:
    """Share of accesses that go to the most used ``share`` of all documents (the last one in part)."""
    places = share * len(counts)
    whole = int(places)
    part = (places - whole) * counts[whole] if whole < len(counts) else 0.0
    return float((counts[:whole].sum() + part) / counts.sum())


def uniform_top_shares(counts: np.ndarray, seeds: int, share: float = TOP) -> list[float]:
    """The same share if every document were equally likely, from as many accesses: what chance alone does."""
    total, size = int(counts.sum()), len(counts)
    draws = (np.random.default_rng([seed, 2]).multinomial(total, np.full(size, 1 / size)) for seed in range(seeds))
    return [top_share(np.sort(drawn)[::-1], share) for drawn in draws]


def needed_share(counts: np.ndarray, accesses: float) -> float:
    """The smallest share of all documents that gets this share of the accesses."""
    return float((np.searchsorted(np.cumsum(counts), accesses * counts.sum()) + 1) / len(counts))


def skew_row(record: Mapping[str, Any], seeds: int) -> dict[str, Any]:
    """A row of the table."""
    counts = access_counts(record)
    uniform = uniform_top_shares(counts, seeds)
    return {
        "requests": record["requests"],
        "documents": record["corpus"],
        "retrieved at all": f"{np.count_nonzero(counts) / len(counts):.0%}",
        "top 1% get": f"{top_share(counts, 0.01):.1%}",
        "top 3% get": f"{top_share(counts):.1%}",
        "top 10% get": f"{top_share(counts, 0.1):.1%}",
        f"top 3% by chance ({seeds} seeds)": f"{min(uniform):.1%} - {max(uniform):.1%}",
        "60% need": f"{needed_share(counts, 0.6):.1%}",
    }


def curve(axes: Axes, record: Mapping[str, Any], **style: Any) -> None:
    """Cumulative share of accesses over the share of documents, most used first."""
    counts = access_counts(record)
    total = np.cumsum(counts) / counts.sum()
    places = np.unique(np.geomspace(1, len(counts), 200).astype(int))
    marks = np.flatnonzero(np.isin(places, _decades(len(counts))))
    axes.plot(100 * places / len(counts), 100 * total[places - 1], markevery=list(marks), **style)


def _decades(size: int) -> Sequence[int]:
    """Where markers stand: about the same places on every curve."""
    targets = np.geomspace(1, size, 9)
    places = np.unique(np.geomspace(1, size, 200).astype(int))
    return [int(places[np.abs(np.log(places / t)).argmin()]) for t in targets]


def skew_axes(axes: Axes, paper: bool = True) -> None:
    """Labels, the line of equal use, and the paper's point for MMLU."""
    axes.set_xlim(0.01, 100)
    axes.set_ylim(0, 102)
    grid = np.geomspace(0.01, 100, 100)
    axes.plot(grid, grid, color="#999999", linestyle=":", linewidth=1.2, label="all documents alike")
    if paper:
        axes.plot([3], [60], "*", color="black", markersize=11, label="paper, MMLU: top 3% get 60%", zorder=5)
    log_axis(axes, (1.0,))
    axes.set_xlabel("most retrieved documents (% of the corpus, log scale)")
    axes.set_ylabel("share of retrievals (%)")
    tidy(axes)
