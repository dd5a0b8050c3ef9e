"""The engine of a simulated server: sequences as numbers of tokens, iterations that return their seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvreuse.ragcache.controller import Controller, Request
from kvreuse.ragcache.cost_models import CostModel
from kvreuse.ragcache.node import Match
from kvreuse.ragcache.planning import Planner
from kvreuse.ragcache.speculative import Generation
from kvreuse.ragcache.tree import KnowledgeTree


class SimulatedSequence:
    """A generation by its numbers of tokens. ``prefill_s``: what computing its prefill took."""

    __slots__ = ("done", "generation", "max_new_tokens", "num_emitted", "prefill_s", "prompt_tokens")

    def __init__(self, generation: Generation, prompt_tokens: int, max_new_tokens: int) -> None:
        self.generation, self.prompt_tokens, self.max_new_tokens = generation, prompt_tokens, max_new_tokens
        self.num_emitted, self.done, self.prefill_s = 0, False, 0.0

    def emit(self, count: int = 1) -> None:
        """More tokens."""
        self.num_emitted += count
        self.done = self.num_emitted >= self.max_new_tokens

    @property
    def kv_tokens(self) -> int:
        """Tokens whose K/V are there: all but the last one emitted."""
        return self.prompt_tokens + self.num_emitted - 1


class SimulatedEngine:
    """The batch of a server whose iterations are looked up in a cost model. ``seconds``: what was spent on what."""

    def __init__(self, costs: CostModel, tree: KnowledgeTree, max_batch: int) -> None:
        self.rows: list[SimulatedSequence] = []
        self.seconds = dict.fromkeys(("prefill", "overhead", "decode", "moving"), 0.0)
        self.num_prefills = self.num_steps = 0
        self._costs, self._tree, self._max_batch = costs, tree, max_batch
        self._gpu_seen, self._host_seen = tree.gpu.bytes_in, tree.host.bytes_in

    @property
    def has_room(self) -> bool:
        """Whether another sequence may join."""
        return len(self.rows) < self._max_batch

    def moved_s(self, promoting: bool = False) -> float:
        """Seconds of what has moved between tiers since this was last asked; into GPU: from host, or from a prefill."""
        gpu, host = self._tree.tiers
        into_gpu, to_host = gpu.bytes_in - self._gpu_seen, host.bytes_in - self._host_seen
        if not into_gpu and not to_host:
            return 0.0
        self._gpu_seen, self._host_seen = gpu.bytes_in, host.bytes_in
        seconds = self._costs.move_s(0 if promoting else into_gpu, into_gpu if promoting else 0, to_host)
        self.seconds["moving"] += seconds
        return seconds

    # -- computing ----------------------------------------------------------------------------------------------------

    def prepare(self, sequence: SimulatedSequence, match: Match) -> tuple[SimulatedSequence, float, int, int]:
        """The match's nodes have just been promoted: what that took, alpha and beta."""
        alpha = match.cached_tokens
        return sequence, self.moved_s(promoting=True), alpha, sequence.prompt_tokens - alpha

    def prefill(self, sequence: SimulatedSequence, promoted_s: float, alpha: int, beta: int) -> float:
        """Seconds of a prefill iteration."""
        sequence.prefill_s = self._costs.prefill_s(alpha, beta)
        self.seconds["prefill"] += sequence.prefill_s
        self.num_prefills += 1
        overhead = self._costs.prefill_overhead_s(len(self.rows))
        self.seconds["overhead"] += overhead
        return promoted_s + (sequence.prefill_s + overhead)

    def step(self) -> float:
        """Seconds of a decode step."""
        lengths = [row.kv_tokens for row in self.rows]
        seconds = self._costs.step_s(len(lengths), max(lengths) + 1, sum(lengths) + len(lengths))
        self.seconds["decode"] += seconds
        self.num_steps += 1
        return seconds

    def run_ahead(self, end: float, horizon: float) -> float:
        """Steps on from a first one that ends at ``end``, until one ends at or behind ``horizon`` or a row is done.

        All but the last step are recorded. Returns when the last one ends.
        """
        rows = self.rows
        left = min(row.max_new_tokens - row.num_emitted for row in rows)
        if left == 1 or end >= horizon:
            return end
        lengths = [row.kv_tokens for row in rows]
        count, longest, total = len(lengths), max(lengths) + 1, sum(lengths) + len(lengths)
        step_s, steps, spent = self._costs.step_s, 1, self.seconds["decode"]
        while steps < left and end < horizon:
            longest, total, steps = longest + 1, total + count, steps + 1
            seconds = step_s(count, longest, total)
            spent += seconds
            end += seconds
        self.seconds["decode"] = spent
        self.num_steps += steps - 1
        for row in rows:
            row.emit(steps - 1)
        return end

    # -- keeping the books --------------------------------------------------------------------------------------------

    def admit(self, sequence: SimulatedSequence, outcome: Any) -> None:
        """Its first token; it joins the batch unless that was all."""
        sequence.emit()
        if not sequence.done:
            self.rows.append(sequence)

    def payloads(self, sequence: SimulatedSequence, outcome: Any) -> None:
        """There are no K/V."""

    def record(self, outcome: Any) -> list[SimulatedSequence]:
        """One more token each; returns those that are done, which have left the batch."""
        done = []
        for row in self.rows:
            row.emit()
            if row.done:
                done.append(row)
        for row in done:
            self.drop(row)
        return done

    def drop(self, sequence: SimulatedSequence) -> None:
        """Out of the batch, if it is in; the last one takes its place, as in `Engine`."""
        if sequence in self.rows:
            self.rows[self.rows.index(sequence)] = self.rows[-1]
            self.rows.pop()


class SimulatedBooks(Planner[SimulatedSequence]):
    """The planner without jobs, futures and failures.

    Args:
        new_sequence: makes a generation's sequence.
        answered: told of every request that has all its tokens, and of its sequence.
    """

    def __init__(
        self,
        controller: Controller,
        engine: SimulatedEngine,
        now: Callable[[], float],
        new_sequence: Callable[[Generation], SimulatedSequence],
        answered: Callable[[Request, SimulatedSequence], None],
    ) -> None:
        super().__init__(controller, engine, now)
        self._new_sequence, self._answered = new_sequence, answered
        self._sequences: dict[int, SimulatedSequence] = {}  # by request: the one that was prefilled last

    def _sequence(self, generation: Generation) -> SimulatedSequence:
        sequence = self._sequences[generation.request_id] = self._new_sequence(generation)
        return sequence

    def _answer(self, request: Request | None) -> None:
        if request is not None:
            self._answered(request, self._sequences.pop(request.id))
