"""The two runs that `check_simulator` compares: the real server on real questions, the simulator on the same ones."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

import kvreuse as kr
from experiments.corpora import load_corpus, load_questions
from experiments.dataset_types import seeded_order
from experiments.vectors import embed, embedder_named
from experiments.workloads import Request, poisson_arrivals
from kvreuse.ragcache.corpus import Corpus, Retriever
from kvreuse.ragcache.cost_models import MeasuredCosts
from kvreuse.ragcache.cost_profiling import measure_costs
from kvreuse.ragcache.index import IVFStages
from kvreuse.ragcache.kv import TreeCache, bytes_per_token
from kvreuse.ragcache.serving_types import ServedAnswer
from kvreuse.ragcache.simulation_input import Requests
from kvreuse.ragcache.simulator import Simulator
from kvreuse.ragcache.systems import System

POLICIES: dict[str, kr.Policy] = {"PGDSF": kr.PGDSF(), "LRU": kr.LRU(), "LFU": kr.LFU()}
SYSTEM = "Answer from the passages."
PROFILE_QUESTIONS = 13  # at most, beside the workload's
TIMEOUT_S = 3600.0
TIMES = ("arrived_s", "retrieved_s", "first_token_s", "finished_s")

Values = dict[str, list[float]]  # one list per quantity, a number per request


@dataclass(frozen=True)
class CheckConfig:
    """What is run; its hash is part of the records file's name.

    Args:
        model: "demo", a hub id or a folder.
        requests: of each run.
        questions: different ones; question r is asked in proportion to 1 / r^skew, so that documents come back.
        rates: Poisson arrivals per second.
        policies: names in `POLICIES`.
        doc_tokens: documents are cut to so many tokens.
        top_k, max_new_tokens: documents per question; tokens per answer at most.
        gpu_tokens, host_tokens: K/V in each tier.
        speculate: start prefills during the search.
        segments: parts of a run; between them the server is idle while a profile is measured.
        repeats: timed rounds of a profile.
        pause_s: idle before what a profile serves, as the server is between requests.
        seed: of order and arrivals.
        small: take the project's own small set and an embedder by words.
    """

    model: str = "demo"
    requests: int = 300
    questions: int = 120
    skew: float = 0.8
    rates: tuple[float, ...] = (0.8, 1.1)
    policies: tuple[str, ...] = tuple(POLICIES)
    doc_tokens: int = 48
    top_k: int = 2
    max_new_tokens: int = 3
    gpu_tokens: int = 1500
    host_tokens: int = 3000
    max_batch: int = 4
    window: int = 32
    speculate: bool = False
    segments: int = 4
    repeats: int = 2
    pause_s: float = 0.2
    seed: int = 0
    small: bool = False
    data_dir: str | None = None
    threads: int = 1

    def __post_init__(self) -> None:
        for name in (
            "requests",
            "questions",
            "doc_tokens",
            "top_k",
            "max_new_tokens",
            "segments",
            "repeats",
            "threads",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.segments > self.requests:
            raise ValueError(f"segments={self.segments}: give at most as many as requests={self.requests}")
        unknown = [name for name in self.policies if name not in POLICIES]
        if unknown or not self.policies:
            raise ValueError(f"policies={self.policies}: choose some of {', '.join(POLICIES)}")
        if not self.rates or min(self.rates) <= 0:
            raise ValueError(f"rates={self.rates}: give requests per second, each above 0")


class Check:
    """Model, corpus, retrieval and workload of a check; `profile`, `serve` and `simulate` are its parts."""

    def __init__(self, config: CheckConfig) -> None:
        torch.set_num_threads(config.threads)
        self.config, self.model = config, kr.load_model(config.model, device="cpu")
        data = "small" if config.small else config.data_dir
        corpus, every = load_corpus(data), load_questions("2wiki", data)
        embedder = embedder_named("words" if config.small else "demo")
        self.source = corpus.source
        vectors = embed(corpus.texts, embedder)
        texts = [self.model.decode(self.model.tokenize(t)[: config.doc_tokens]).strip() for t in corpus.texts]
        self.corpus = Corpus(self.model, texts, system=SYSTEM)
        self.retriever = Retriever(embedder, IVFStages(vectors, num_stages=4), config.top_k)
        order = [q.text for q in seeded_order(every, config.seed, "check_simulator", "questions")]
        aside = min(PROFILE_QUESTIONS, len(order) // 3)
        if aside < config.max_batch:
            raise ValueError(f"{len(order)} questions: {3 * config.max_batch} at least are needed")
        self.others, asked = order[:aside], order[aside:][: config.questions]
        rng = np.random.default_rng([config.seed, 2])
        weights = 1 / np.arange(1, len(asked) + 1) ** config.skew
        self.questions = [asked[i] for i in rng.choice(len(asked), config.requests, p=weights / weights.sum())]
        self._found = {question: self._search(question) for question in dict.fromkeys(self.questions)}
        self.token_bytes = bytes_per_token(self.model)

    def _search(self, question: str) -> list[tuple[kr.Document, ...]]:
        shown: list[Sequence[int]] = []
        shown.append(self.retriever.search(question, shown.append))
        return [tuple(self.corpus.document(n) for n in numbers) for numbers in shown]

    def system(self, policy: str) -> System:
        """The server that both run."""
        config = self.config
        return System(policy, POLICIES[policy], window=config.window, speculate=config.speculate)

    def arrivals(self, rate: float) -> list[float]:
        """Seconds; the same for every policy."""
        return poisson_arrivals(rate, self.config.requests, self.config.seed)

    def profile(self) -> MeasuredCosts:
        """What everything takes now, up to the longest prompt there is."""
        size, prefix = self.config.doc_tokens, self.corpus.prefix.numel()
        context = max(sum(d.num_tokens for d in shown) for found in self._found.values() for shown in found)
        prompt = prefix + context + max(self.corpus.question_ids(q).numel() for q in self._found)
        return measure_costs(
            self.model,
            self.corpus,
            self.retriever,
            self.others,
            cached_tokens=sorted({16, 16 + size, prefix + context}),
            new_tokens=sorted({16, 24, 32, 32 + size, prompt}),
            lengths=sorted({prompt // 2, prompt + self.config.max_new_tokens}),
            max_batch=self.config.max_batch,
            max_new_tokens=self.config.max_new_tokens,
            repeats=self.config.repeats,
            pause_s=self.config.pause_s,
        )

    def segment(self, number: int) -> int:
        """Of which part of a run a request is."""
        return number * self.config.segments // self.config.requests

    def serve(self, rate: float, policy: str, costs: MeasuredCosts) -> tuple[Values, list[MeasuredCosts]]:
        """The real server, and the profiles between its segments. ``iterations``: tokens, the end token counted.

        Times are as if segments followed each other without the profile between them.
        """
        config = self.config
        tokens = config.gpu_tokens * self.token_bytes, config.host_tokens * self.token_bytes
        cache = TreeCache(
            self.model, self.corpus.prefix, *tokens, policy=POLICIES[policy], cost=costs.prefill, max_nodes=None
        )
        options = kr.ServerOptions(
            max_new_tokens=config.max_new_tokens,
            max_batch=config.max_batch,
            window=config.window,
            speculate=config.speculate,
        )
        arrivals = self.arrivals(rate)
        futures: list[Future[ServedAnswer]] = []
        profiles: list[MeasuredCosts] = []
        zeros: list[float] = []  # per segment: when the arrivals' clock stood at 0
        with kr.RagServer(self.model, self.corpus, self.retriever, cache, options) as server:
            for number, question in enumerate(self.questions):
                if self.segment(number) == len(zeros):
                    if number:
                        if wait(futures, TIMEOUT_S).not_done:
                            raise TimeoutError(f"requests were not answered within {TIMEOUT_S:g} s")
                        profiles.append(self.profile())
                    zeros.append(time.monotonic() - (arrivals[number - 1] if number else 0.0))
                time.sleep(max(0.0, zeros[-1] + arrivals[number] - time.monotonic()))
                futures.append(server.submit(question))
            requests = [future.result(TIMEOUT_S).request for future in futures]
        server.tree.check_integrity()
        values: Values = {
            name: [(getattr(r, name) or 0.0) - zeros[self.segment(n)] for n, r in enumerate(requests)] for name in TIMES
        }
        limit = config.max_new_tokens
        values["cached_tokens"] = [r.cached_tokens for r in requests]
        values["hit_documents"] = [r.cached_documents for r in requests]
        values["iterations"] = [r.num_tokens if r.num_tokens == limit else r.num_tokens + 1 for r in requests]
        return values, profiles

    def simulate(
        self, rate: float, policy: str, profiles: Sequence[MeasuredCosts], iterations: Sequence[float]
    ) -> Values:
        """The simulator on the same requests, a segment after the other, each at the mean cost around it.

        Of the real run it gets ``profiles``, measured before, between and behind the segments, and the lengths of the
        answers, nothing else.
        """
        arrivals = self.arrivals(rate)
        asked = []
        for at, question, tokens in zip(arrivals, self.questions, iterations, strict=True):
            found, size = self._found[question], self.corpus.question_ids(question).numel()
            asked.append(Request(at, found[-1], size, int(tokens), tuple(found)))
        requests = Requests.of(asked)
        parts = np.array([self.segment(number) for number in range(len(asked))])
        tree = self._simulator(policy, profiles[0]).new_tree()  # whose policy goes by these costs, as the server's does
        values: Values = {name: [] for name in (*TIMES, "cached_tokens", "hit_documents")}
        for part, around in enumerate(pairwise(profiles)):
            simulator = self._simulator(policy, MeasuredCosts.mean(around))
            result = simulator.run(requests.some(parts == part), tree)
            for name, numbers in values.items():
                numbers += getattr(result, name).tolist()
        return values

    def _simulator(self, policy: str, costs: MeasuredCosts) -> Simulator:
        return Simulator(
            costs,
            self.config.gpu_tokens * self.token_bytes,
            self.config.host_tokens * self.token_bytes,
            self.system(policy),
            self.corpus.prefix.numel(),
            max_batch=self.config.max_batch,
            max_nodes=None,
        )

    def header(self) -> dict[str, Any]:
        """What the table says about the workload."""
        return {
            "source": self.source,
            "distinct_questions": len(self._found),
            "distinct_documents": len({d for found in self._found.values() for d in found[-1]}),
            "system_tokens": self.corpus.prefix.numel(),
            "documents_per_request": [len(self._found[q][-1]) for q in self.questions],
        }
