"""What comes out of a simulation, as arrays with a row per request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvreuse.ragcache.controller import Request
from kvreuse.ragcache.serving_metrics import spread
from kvreuse.ragcache.simulation_input import NONE, Floats, Ints, Requests


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
    is_finished: bool = False

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
        """After the last one, once. Of documents that are cached by blocks, all full blocks make a hit.

        Raises:
            RuntimeError: requests are open, or it was called before.
        """
        if self.is_finished:
            raise RuntimeError("finished was called before: the system prompt would be counted twice")
        if self.num_answered != len(self.requests):
            raise RuntimeError(f"{self.num_answered} of {len(self.requests)} requests were answered")
        sizes = self.requests.sizes()
        ends = np.cumsum(sizes, axis=1)
        cached = self.cached_tokens[:, None] - system_tokens
        hit = (ends - ends % block_tokens <= cached) & (ends - sizes < cached) & (self.requests.documents != NONE)
        self.hit_documents = hit.sum(axis=1, dtype=np.int32)
        self.context_tokens = self.context_tokens + np.int32(system_tokens)
        self.is_finished = True
        self.counts, self.system_tokens = dict(counts), system_tokens
        return self

    # -- numbers ------------------------------------------------------------------------------------------------------

    @property
    def ttft_s(self) -> Floats:
        """Arrival to the first token that was known to be right."""
        return self.first_token_s - self.arrived_s

    @property
    def tpot_s(self) -> Floats:
        """Seconds per token behind the first; nan of answers that have one."""
        behind = self.requests.new_tokens - 1
        seconds = self.finished_s - self.first_token_s
        return np.divide(seconds, behind, out=np.full(len(seconds), np.nan), where=behind > 0)

    @property
    def computed_tokens(self) -> Ints:
        """Of each request's prefill."""
        computed: Ints = self.context_tokens - self.cached_tokens + self.requests.question_tokens
        return computed

    @property
    def document_hit_rate(self) -> float:
        """Documents that were cached, of all that were retrieved."""
        return float(self.hit_documents.sum() / max(1, (self.requests.documents != NONE).sum()))

    @property
    def token_hit_rate(self) -> float:
        """Context tokens that were cached, system prompt included."""
        return float(self.cached_tokens.sum() / max(1, self.context_tokens.sum()))

    @property
    def throughput_per_s(self) -> float:
        """Requests answered by the time from the first arrival to the last token."""
        return len(self.requests) / float(self.finished_s.max() - self.arrived_s.min())

    def summary(self) -> dict[str, float]:
        """Means, percentiles, rates and counts; named as in `ServingMetrics.summary`."""
        tpot = self.tpot_s
        return {
            "answered": float(self.num_answered),
            **spread("ttft", self.ttft_s.tolist()),
            **spread("retrieval", (self.retrieved_s - self.arrived_s).tolist()),
            **spread("tpot", tpot[~np.isnan(tpot)].tolist()),
            "finished_mean_s": float((self.finished_s - self.arrived_s).mean()),
            "prefill_mean_s": float(self.prefill_s.mean()),
            "throughput_per_s": self.throughput_per_s,
            "token_hit_rate": self.token_hit_rate,
            "document_hit_rate": self.document_hit_rate,
            "speculative_share": float(self.speculative.mean()),
            **self.counts,
        }
