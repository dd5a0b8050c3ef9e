"""One simulation on its way: arrivals, searches and the model's iterations as simpy processes over one clock.

What a search has found waits until the running iteration is over; an iteration is one prefill or one decode step of the
whole batch; a prefill goes first. No random numbers are drawn: equal inputs give equal results, bit for bit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import numpy as np

from kvreuse.ragcache.controller import Request
from kvreuse.ragcache.node import Document
from kvreuse.ragcache.simulated import SimulatedBooks, SimulatedEngine, SimulatedSequence
from kvreuse.ragcache.simulation_input import Requests
from kvreuse.ragcache.simulation_result import SimulationResult
from kvreuse.ragcache.speculative import Documents, Generation
from kvreuse.ragcache.tree import KnowledgeTree

if TYPE_CHECKING:
    import simpy

    from kvreuse.ragcache.simulator import Simulator

    Process = Generator[simpy.Event, None, None]

INSTALL = "the simulator needs simpy: pip install simpy (or 'kvreuse[experiments]')"


class Run:
    """One simulation on its way."""

    def __init__(
        self, server: Simulator, requests: Requests, tree: KnowledgeTree, progress: Callable[[int], None] | None
    ) -> None:
        try:
            import simpy
        except ImportError as error:
            raise ImportError(INSTALL) from error
        self.server, self.requests, self.tree, self.progress = server, requests, tree, progress
        self.env = simpy.Environment()
        system, costs = server.system, server.costs
        self.stages = requests.shown(len(costs.search_stage_s)) if system.speculate else None
        self.before = self._tier_counts()
        self.controller = server.new_controller(tree)
        self.engine = SimulatedEngine(costs, tree, server.max_batch)
        self.books = SimulatedBooks(self.controller, self.engine, self.now, self._new_sequence, self._answered)
        whole = costs.search_stage_s
        self.stage_s = whole if self.stages is not None else (math.fsum(whole),)
        self.documents = [Document(i, int(n)) for i, n in enumerate(requests.document_tokens.tolist())]
        self.inbox: deque[tuple[int, Documents, bool]] = deque()
        self.questions: deque[int] = deque()
        self.model_idle: simpy.Event | None = None
        self.idle_searchers: deque[simpy.Event] = deque()
        self.full: simpy.Event | None = None
        self.computing = False
        self.apart: set[int] = set()  # searches that have not met an iteration
        self.delay_s = 0.0  # of the running iteration, by searches that began beside it
        self.out = SimulationResult.empty(server.system.name, costs.name, requests)

    def now(self) -> float:
        """The simulated clock."""
        return float(self.env.now)

    def result(self) -> SimulationResult:
        """Run to the end."""
        self.env.process(self._arrivals())
        for _ in range(self.server.search_threads or 0):
            self.env.process(self._searcher())
        self.env.process(self._model())
        try:
            self.env.run()
        finally:
            self.controller.queue.close()
        stats = self.controller.speculator.stats
        counts: dict[str, float] = {
            "prefills": self.engine.num_prefills,
            "decode_steps": self.engine.num_steps,
            **{f"speculations_{name}": value for name, value in vars(stats).items()},
            **{name: value - self.before[name] for name, value in self._tier_counts().items()},
            **{f"{name}_s": value for name, value in sorted(self.engine.seconds.items())},
        }
        return self.out.finished(counts, self.server.system_tokens, self.server.system.block_tokens or 1)

    def _tier_counts(self) -> dict[str, int]:
        """Of the tree, since it was made."""
        names = ("evictions", "bytes_in")
        return {f"{tier.name}_{name}": getattr(tier, name) for name in names for tier in self.tree.tiers}

    # -- processes ----------------------------------------------------------------------------------------------------

    def _arrivals(self) -> Process:
        env, threads, late = self.env, self.server.search_threads, 0.0
        for number, at in enumerate(self.requests.arrival_s.tolist()):
            if at + late > env.now:
                yield self._until(at + late)
            if self.server.max_open is not None and len(self.controller.open) >= self.server.max_open:
                self.full = env.event()
                yield self.full
                late = self.now() - at
            self.controller.arrive(number, int(self.requests.question_tokens[number]), self.now())
            if threads is None:
                env.process(self._search(number))
            else:
                self.questions.append(number)
                if self.idle_searchers:
                    self.idle_searchers.popleft().succeed()

    def _searcher(self) -> Process:
        while True:
            while not self.questions:
                idle = self.env.event()
                self.idle_searchers.append(idle)
                yield idle
            yield from self._search(self.questions.popleft())

    def _search(self, number: int) -> Process:
        last, costs = len(self.stage_s) - 1, self.server.costs
        if self.computing:
            self.delay_s += costs.contention_s
        else:
            self.apart.add(number)
        for stage, seconds in enumerate(self.stage_s):
            yield self.env.timeout(seconds * costs.contended_search if self.computing else seconds)
            if stage == last:
                self.apart.discard(number)
                self._post(number, self._documents(self.requests.documents[number]), True)
            elif self.stages is not None:
                found = self._documents(self.stages[number, stage])
                if found:
                    self._post(number, found, False)

    def _model(self) -> Process:
        env, engine, books = self.env, self.engine, self.books
        while True:
            while self.inbox:
                number, documents, final = self.inbox.popleft()
                if final:
                    books.searched(number, documents)
                else:
                    self.controller.stage(number, documents)
            moved_s = engine.moved_s()
            work = books.plan()
            if work is None:
                if moved_s:
                    yield env.timeout(moved_s)
                else:
                    self.model_idle = env.event()
                    yield self.model_idle
                continue
            end = env.now + (moved_s + work.compute() + len(self.apart) * self.server.costs.contention_s)
            self.apart.clear()
            self.computing = True
            if work.is_step and not self.server.stepwise:
                end = engine.run_ahead(end, env.peek())
            yield self._until(end)
            while self.delay_s:
                delay_s, self.delay_s = self.delay_s, 0.0
                yield env.timeout(delay_s)
            self.computing = False
            work.record(None)
            moved_s = engine.moved_s()
            if moved_s:
                yield env.timeout(moved_s)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _until(self, at: float) -> simpy.Event:
        """An event at exactly ``at``: now + (at - now) may round to something else."""
        now = self.env.now
        delay = at - now
        while now + delay < at:
            delay = math.nextafter(delay, math.inf)
        while now + delay > at:
            delay = math.nextafter(delay, -math.inf)
        return self.env.timeout(delay)

    def _post(self, number: int, documents: Documents, final: bool) -> None:
        self.inbox.append((number, documents, final))
        if self.model_idle is not None:
            idle, self.model_idle = self.model_idle, None
            idle.succeed()

    def _documents(self, row: np.ndarray[Any, Any]) -> Documents:
        found = tuple([self.documents[i] for i in row.tolist() if i >= 0])
        return self.server.system.units(found)[0]

    def _new_sequence(self, generation: Generation) -> SimulatedSequence:
        number = generation.request_id
        if self.server.system.speculate:
            prompt = sum(document.num_tokens for document in generation.documents)
        else:  # the tree may not look at all tokens
            prompt = self.out.context_tokens[number].item()
        prompt += self.server.system_tokens + self.requests.question_tokens[number].item()
        return SimulatedSequence(generation, prompt, self.requests.new_tokens[number].item())

    def _answered(self, request: Request, sequence: SimulatedSequence) -> None:
        self.out.record(request, sequence.prefill_s)
        if self.full is not None:
            full, self.full = self.full, None
            full.succeed()
        if self.progress is not None and self.out.num_answered % 1000 == 0:
            self.progress(self.out.num_answered)
