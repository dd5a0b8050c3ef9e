"""One question set before one simulated server: requests at a rate, a run, and the numbers that are kept of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from experiments.ragcache.scales import Scale
from experiments.ragcache.simulated import WARMUP, SimulatedConfig
from experiments.workloads import Retrieved, Workload
from kvreuse.ragcache.cost_models import CostModel
from kvreuse.ragcache.simulation_input import Requests
from kvreuse.ragcache.simulation_result import SimulationResult
from kvreuse.ragcache.simulator import Simulator
from kvreuse.ragcache.systems import System

DIGITS = 7  # significant, in records


@dataclass(frozen=True, eq=False)
class Bench:
    """Questions and a server."""

    retrieved: Retrieved
    scale: Scale

    @cached_property
    def document_tokens(self) -> np.ndarray:
        """Of every document of the corpus, stretched to the scale's mean; at least 1."""
        tokens = np.asarray(self.retrieved.document_tokens, dtype=np.float64)
        if self.scale.mean_document_tokens is not None:
            tokens *= self.scale.mean_document_tokens / tokens.mean()
        return np.maximum(1, np.rint(tokens)).astype(np.int32)

    @cached_property
    def costs(self) -> CostModel:
        """The scale's, its search cut into as many equal stages as this one has."""
        costs, stages = self.scale.costs, self.retrieved.found.shape[1]
        if len(costs.search_stage_s) == stages:
            return costs
        equal = (math.fsum(costs.search_stage_s) / stages,) * stages
        return replace(costs, search_stage_s=equal)  # type: ignore[type-var]

    @cached_property
    def full_prefill_s(self) -> float:
        """Mean seconds of a prefill that finds nothing but the system prompt cached."""
        costs, system = self.scale.costs, self.retrieved.system_tokens
        found = self.retrieved.found[:, -1]
        context = np.where(found >= 0, self.document_tokens[found], 0).sum(axis=1)
        new = context + np.asarray(self.retrieved.question_tokens)
        return float(np.mean([costs.prefill_s(system, int(tokens)) for tokens in new]))

    def rate(self, load: float) -> float:
        """Requests per second; a server that reuses nothing is busy all the time at a load of 1."""
        return load / self.full_prefill_s

    def requests(self, rate: float, count: int, seed: int) -> Requests:
        """The questions in an order of the seed, at its Poisson arrivals."""
        workload: Workload = self.retrieved.workload(rate, count, seed)
        asked = workload.requests
        staged = any(r.stages for r in asked)
        return Requests.from_lists(
            [r.arrival_s for r in asked],
            [[int(str(d.id)) for d in r.documents] for r in asked],
            self.document_tokens.tolist(),
            [r.question_tokens for r in asked],
            [r.output_tokens for r in asked],
            [[[int(str(d.id)) for d in found] for found in r.stages[:-1]] for r in asked] if staged else None,
        )

    def simulator(self, system: System) -> Simulator:
        """The server; searches do not wait for each other."""
        scale = self.scale
        settings: Any = {"system_tokens": self.retrieved.system_tokens, "search_threads": None}
        return Simulator(self.costs, scale.gpu, scale.host, system, **settings)

    def with_host(self, host: int) -> Bench:
        """The same with another host memory, in bytes."""
        return replace(self, scale=replace(self.scale, host=host))


def measures(result: SimulationResult, search_s: float) -> dict[str, float]:
    """A run's numbers behind its warm-up. Hits concern documents alone, without the system prompt.

    ``throughput_per_s``: of the whole run, from the first arrival to the last token.
    ``computed_s``: prefill seconds per request of the whole run, those of wrong speculation included.
    ``search_alone_s``: of a search of ``search_s``, the part in which its answer's prefill did not run.
    """
    count = len(result.requests)
    part = slice(int(WARMUP * count), None)
    ttft, prefill = result.ttft_s[part], result.prefill_s[part]
    arrived, retrieved, first = result.arrived_s[part], result.retrieved_s[part], result.first_token_s[part]
    sizes = result.requests.sizes()[part]
    cached = result.cached_tokens[part] - result.system_tokens
    # A prefill that was done by the time the documents were known to be final ran inside the search.
    within = np.where(first > retrieved, arrived + search_s - (first - prefill), prefill)
    overlap = np.where(result.speculative[part], np.clip(within, 0.0, search_s), 0.0)
    median, p95, p99 = np.percentile(ttft, (50, 95, 99)).tolist()
    values = {
        "ttft_s": ttft.mean(),
        "ttft_median_s": median,
        "ttft_p95_s": p95,
        "ttft_p99_s": p99,
        "prefill_s": prefill.mean(),
        "computed_s": result.counts["prefill_s"] / count,
        "moving_s": result.counts["moving_s"] / count,
        "throughput_per_s": result.throughput_per_s,
        "document_hits": result.hit_documents[part].sum() / (sizes > 0).sum(),
        "token_hits": cached.sum() / sizes.sum(),
        "search_alone_s": search_s - overlap.mean(),
        "speculative": result.speculative[part].mean(),
        "prefills": result.counts["prefills"] / count,
    }
    return {name: float(f"{float(value):.{DIGITS}g}") for name, value in values.items()}


def run(bench: Bench, system: System, requests: Requests) -> dict[str, float]:
    """Simulate one run from empty caches."""
    return measures(bench.simulator(system).run(requests), math.fsum(bench.costs.search_stage_s))


def sweep(
    config: SimulatedConfig, bench: Bench, systems: Iterable[System], loads: Iterable[float], **about: Any
) -> Iterator[dict[str, Any]]:
    """A record per load, seed and system."""
    from tqdm import tqdm

    points = [(load, seed) for load in loads for seed in range(config.seeds)]
    for load, seed in tqdm(points, desc=f"{bench.retrieved.name}, {bench.scale.title}", leave=False):
        rate = bench.rate(load)
        requests = bench.requests(rate, config.requests, seed)
        for system in systems:
            yield record(bench, system, seed, load=load, rate=rate, **about) | run(bench, system, requests)


def record(bench: Bench, system: System, seed: int, **about: Any) -> dict[str, Any]:
    """What every record says."""
    named = {"case_id": bench.retrieved.name, "method": system.name, "server": bench.scale.title, "seed": seed}
    shape = {"questions": len(bench.retrieved.questions), "full_prefill_s": bench.full_prefill_s}
    return named | shape | about
