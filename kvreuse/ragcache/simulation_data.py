"""What goes into a simulation and what comes out of it, as arrays with a row per request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvreuse.ragcache.controller import Request

Ints = np.ndarray[Any, np.dtype[np.int32]]
Floats = np.ndarray[Any, np.dtype[np.float64]]
NONE = -1  # no document


@dataclass(frozen=True, eq=False)
class Requests:
    """A workload of ``n`` requests.

    Args:
        arrival_s: [n], not falling.
        documents: [n, k] final lists of documents, nearest first, as numbers; -1 behind the last one of a shorter list.
        document_tokens: [number of documents].
        question_tokens: [n], or one number for all; with everything that stands behind the documents.
        new_tokens: [n], or one number for all; of the answers.
        stages: [n, stages - 1, k] what a search shows after each stage but the last, in the same form (-1 alone:
            nothing yet). None: searches show nothing before they end, so nothing can be speculated on.
    """

    arrival_s: Floats
    documents: Ints
    document_tokens: Ints
    question_tokens: Ints
    new_tokens: Ints
    stages: Ints | None = None

    def __post_init__(self) -> None:
        arrival = np.asarray(self.arrival_s, dtype=np.float64)
        if arrival.ndim != 1 or not arrival.size or not np.isfinite(arrival).all() or arrival[0] < 0:
            raise ValueError("arrival_s: give at least one time, each finite and from 0 up")
        if (np.diff(arrival) < 0).any():
            raise ValueError("arrival_s falls: sort requests by their arrival")
        count = arrival.size
        sizes = np.asarray(self.document_tokens, dtype=np.int32)
        if sizes.ndim != 1 or (sizes < 1).any():
            raise ValueError("document_tokens: one number per document, each 1 or more")
        lists: list[tuple[str, Any, tuple[int, ...]]] = [("documents", self.documents, (count,))]
        if self.stages is not None:
            lists.append(("stages", self.stages, (count, np.shape(self.stages)[1])))
        set_field = object.__setattr__
        for name, value, shape in lists:
            rows = np.asarray(value, dtype=np.int32)
            if rows.shape[:-1] != shape or rows.ndim != len(shape) + 1:
                raise ValueError(f"{name} has shape {rows.shape}: give lists of documents for each of {count} requests")
            if (rows >= sizes.size).any() or (rows < NONE).any():
                raise ValueError(f"{name}: a document's number is from 0 to {sizes.size - 1}, or -1 for none")
            if ((rows[..., 1:] != NONE) & (rows[..., :-1] == NONE)).any():
                raise ValueError(f"{name}: a document stands behind a -1")
            set_field(self, name, rows)
        if (np.asarray(self.documents)[:, :1] == NONE).any():
            raise ValueError("documents: every request needs at least one")
        for name in ("question_tokens", "new_tokens"):
            numbers = np.broadcast_to(np.asarray(getattr(self, name), dtype=np.int32), (count,))
            if (numbers < 1).any():
                raise ValueError(f"{name}: give 1 or more for every request")
            set_field(self, name, numbers)
        set_field(self, "arrival_s", arrival)
        set_field(self, "document_tokens", sizes)

    def __len__(self) -> int:
        return int(self.arrival_s.size)

    @classmethod
    def from_lists(
        cls,
        arrival_s: Sequence[float],
        documents: Sequence[Sequence[int]],
        document_tokens: Sequence[int],
        question_tokens: Sequence[int] | int,
        new_tokens: Sequence[int] | int,
        stages: Sequence[Sequence[Sequence[int]]] | None = None,
    ) -> Requests:
        """From lists of any lengths."""
        every = [*documents, *(found for shown in stages or () for found in shown)]
        width = max((len(found) for found in every), default=0)

        def padded(found: Sequence[int]) -> list[int]:
            return [*found, *[NONE] * (width - len(found))]

        return cls(
            np.asarray(arrival_s, dtype=np.float64),
            np.asarray([padded(found) for found in documents], dtype=np.int32),
            np.asarray(document_tokens, dtype=np.int32),
            np.asarray(question_tokens, dtype=np.int32),
            np.asarray(new_tokens, dtype=np.int32),
            None if stages is None else np.asarray([[padded(f) for f in shown] for shown in stages], dtype=np.int32),
        )

    def shown(self, num_stages: int) -> Ints | None:
        """`stages`, which must be one less than the stages of a search."""
        if self.stages is not None and self.stages.shape[1] != num_stages - 1:
            raise ValueError(
                f"stages shows {self.stages.shape[1]} lists per request, a search of {num_stages} stages shows "
                f"{num_stages - 1} before its last: give costs with as many search_stage_s, or other lists"
            )
        return self.stages

    def sizes(self) -> Ints:
        """Tokens of each request's documents [n, k]; 0 where there is none."""
        tokens = self.document_tokens[self.documents]
        tokens[self.documents == NONE] = 0
        return tokens


@dataclass(eq=False)
class SimulationResult:
    """What became of each request; arrays [n] in the order of arrival, times on the simulated clock in seconds.

    ``arrived_s``: later than asked for where arrivals were put off. ``cached_tokens``: system prompt included.
    ``hit_documents``: leading documents that were cached whole (up to their last full block). ``computed_tokens``: of
    the prefill, question included. ``prefill_s``: what computing that prefill took. ``counts``: totals, wrong
    speculation included.
    """

    system: str
    costs: str
    requests: Requests = field(repr=False)
    arrived_s: Floats
    retrieved_s: Floats
    first_token_s: Floats
    finished_s: Floats
    prefill_s: Floats
    cached_tokens: Ints
    context_tokens: Ints
    hit_documents: Ints
    speculative: np.ndarray[Any, np.dtype[np.bool_]]
    counts: Mapping[str, float] = field(default_factory=dict)
    num_answered: int = 0
    system_tokens: int = 0

    @classmethod
    def empty(cls, system: str, costs: str, requests: Requests) -> SimulationResult:
        """Before the first request."""
        count = len(requests)
        times = (np.full(count, np.nan) for _ in range(5))
        arrived, retrieved, first_token, finished, prefill = times
        return cls(
            system,
            costs,
            requests,
            arrived,
            retrieved,
            first_token,
            finished,
            prefill,
            cached_tokens=np.zeros(count, dtype=np.int32),
            context_tokens=requests.sizes().sum(axis=1, dtype=np.int32),
            hit_documents=np.zeros(count, dtype=np.int32),
            speculative=np.zeros(count, dtype=bool),
        )

    def record(self, request: Request, prefill_s: float) -> None:
        """A request has all its tokens.

        Raises:
            ValueError: it was answered before.
        """
        number = request.id
        if not np.isnan(self.finished_s[number]):
            raise ValueError(f"request {number} was answered twice")
        self.num_answered += 1
        self.arrived_s[number] = request.arrived_s
        self.retrieved_s[number] = request.retrieved_s
        self.first_token_s[number] = request.first_token_s
        self.finished_s[number] = request.finished_s
        self.prefill_s[number] = prefill_s
        self.cached_tokens[number] = request.cached_tokens
        self.speculative[number] = request.speculative

    def finished(self, counts: Mapping[str, float], system_tokens: int, block_tokens: int = 1) -> SimulationResult:
        """After the last one. Of documents that are cached by blocks, all full blocks make a hit."""
        if self.num_answered != len(self.requests):
            raise RuntimeError(f"{self.num_answered} of {len(self.requests)} requests were answered")
        sizes = self.requests.sizes()
        ends = np.cumsum(sizes, axis=1)
        cached = self.cached_tokens[:, None] - system_tokens
        hit = (ends - ends % block_tokens <= cached) & (ends - sizes < cached) & (self.requests.documents != NONE)
        self.hit_documents = hit.sum(axis=1, dtype=np.int32)
        self.context_tokens = self.context_tokens + np.int32(system_tokens)
        self.counts, self.system_tokens = dict(counts), system_tokens
        return self

    # -- numbers ------------------------------------------------------------------------------------------------------

    @property
    def ttft_s(self) -> Floats:
        """Arrival to the first token that was known to be right."""
        return self.first_token_s - self.arrived_s

    @property
    def computed_tokens(self) -> Ints:
        """Of each request's prefill."""
        computed: Ints = self.context_tokens - self.cached_tokens + self.requests.question_tokens
        return computed

    @property
    def document_hit_rate(self) -> float:
        """Documents that were cached, of all that were retrieved."""
        return float(self.hit_documents.sum() / (self.requests.documents != NONE).sum())

    @property
    def token_hit_rate(self) -> float:
        """Context tokens that were cached, system prompt included."""
        return float(self.cached_tokens.sum() / self.context_tokens.sum())

    @property
    def throughput_per_s(self) -> float:
        """Requests answered by the time from the first arrival to the last token."""
        return len(self.requests) / float(self.finished_s.max() - self.arrived_s.min())

    def summary(self) -> dict[str, float]:
        """Means, percentiles, rates and counts; named as in `ServingMetrics.summary`."""
        ttft = self.ttft_s
        median, p95, p99 = np.percentile(ttft, (50, 95, 99)).tolist()
        return {
            "answered": float(self.num_answered),
            "ttft_mean_s": float(ttft.mean()),
            "ttft_median_s": median,
            "ttft_p95_s": p95,
            "ttft_p99_s": p99,
            "retrieval_mean_s": float((self.retrieved_s - self.arrived_s).mean()),
            "finished_mean_s": float((self.finished_s - self.arrived_s).mean()),
            "prefill_mean_s": float(self.prefill_s.mean()),
            "throughput_per_s": self.throughput_per_s,
            "token_hit_rate": self.token_hit_rate,
            "document_hit_rate": self.document_hit_rate,
            "speculative_share": float(self.speculative.mean()),
            **self.counts,
        }
