"""What a server reports: latencies, hit rates, scheduling time, tiers, failures (RAGCache, section 7)."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field

from kvreuse.ragcache.controller import Request
from kvreuse.ragcache.tree import KnowledgeTree

_KEPT = 10_000  # the latest records; a server that runs for weeks keeps no more


@dataclass
class ServingMetrics:
    """Records of answered requests and counters; `summary` makes numbers of them.

    ``scheduling_s``: seconds of every scheduling step (match, update, reorder, speculate), moving K/V not included.
    ``occupancy``: fraction of the GPU's and the host's bytes in use, as each request was answered. ``counts``: threads
    restarted, work retried, GPUs lost, requests failed.
    """

    requests: deque[Request] = field(default_factory=lambda: deque(maxlen=_KEPT))
    scheduling_s: deque[float] = field(default_factory=lambda: deque(maxlen=10 * _KEPT))
    occupancy: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    counts: Counter[str] = field(default_factory=Counter)

    def answered(self, request: Request, tree: KnowledgeTree) -> None:
        """Record a request that has all its tokens."""
        self.requests.append(request)
        fill = [t.used_bytes / t.capacity_bytes if t.capacity_bytes else 0.0 for t in (tree.gpu, tree.host)]
        self.occupancy.append((fill[0], fill[1]))

    def summary(self) -> dict[str, float]:
        """Means, medians, 95th and 99th percentiles. Times are seconds; rates are fractions."""
        done = self.requests
        out: dict[str, float] = {"answered": len(done), **{k: float(v) for k, v in sorted(self.counts.items())}}
        if not done:
            return out
        ttft = [_after(r.first_token_s, r.arrived_s) for r in done]
        waited = [_after(r.retrieved_s, r.arrived_s) for r in done]
        tpot = [_after(r.finished_s, r.first_token_s or 0.0) / (r.num_tokens - 1) for r in done if r.num_tokens > 1]
        first, last = min(r.arrived_s for r in done), max(r.finished_s or 0.0 for r in done)
        out |= {
            **spread("ttft", ttft),
            **spread("retrieval", waited),
            **spread("tpot", tpot),
            **spread("scheduling", self.scheduling_s),
            "throughput_per_s": len(done) / (last - first) if last > first else 0.0,
            "token_hit_rate": _share(sum(r.cached_tokens for r in done), sum(r.context_tokens for r in done)),
            "document_hit_rate": _share(
                sum(r.cached_documents for r in done), sum(len(r.documents or ()) for r in done)
            ),
            "speculative_share": sum(r.speculative for r in done) / len(done),
            "gpu_occupancy": statistics.mean(o[0] for o in self.occupancy),
            "host_occupancy": statistics.mean(o[1] for o in self.occupancy),
        }
        return out


def _after(later: float | None, earlier: float) -> float:
    return (later or 0.0) - earlier


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def spread(name: str, values: Collection[float]) -> dict[str, float]:
    """Mean, median and percentiles, each of them one of the values; nothing of no values."""
    if not values:
        return {}
    ranked = sorted(values)
    return {
        f"{name}_mean_s": statistics.fmean(ranked),
        f"{name}_median_s": statistics.median(ranked),
        f"{name}_p95_s": ranked[95 * len(ranked) // 100],
        f"{name}_p99_s": ranked[99 * len(ranked) // 100],
    }
