"""`Planner`: what a server computes next and what it makes of the outcome.

The real server's books and the simulated one's are subclasses: the order of decisions is written once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from kvreuse.ragcache.controller import Controller, Request
from kvreuse.ragcache.node import Match
from kvreuse.ragcache.segments import MakePayload
from kvreuse.ragcache.speculative import Documents, Generation


class Planned(Protocol):
    """A generation on its way through the engine. ``done``: it has all its tokens."""

    generation: Generation
    done: bool

    @property
    def num_emitted(self) -> int:
        """Tokens of the answer so far."""
        ...


S = TypeVar("S", bound=Planned)


class Runs(Protocol[S]):
    """An engine, as far as planning goes: `prefill` and `step` compute and change nothing, the rest keeps the books."""

    rows: list[S]

    @property
    def has_room(self) -> bool:
        """Whether another sequence may join the batch."""
        ...

    @property
    def prefill(self) -> Callable[..., Any]:
        """Computes a prefill from what `prepare` returned."""
        ...

    @property
    def step(self) -> Callable[[], Any]:
        """Computes one more token of every sequence in the batch."""
        ...

    def prepare(self, sequence: S, match: Match) -> tuple[Any, ...]:
        """What a prefill behind the K/V of ``match`` needs."""
        ...

    def admit(self, sequence: S, outcome: Any) -> None:
        """Record a prefill: its first token; the sequence joins the batch unless that was all."""
        ...

    def payloads(self, sequence: S, outcome: Any) -> MakePayload | None:
        """Where the K/V of a prefill's documents can be had."""
        ...

    def record(self, outcome: Any) -> list[S]:
        """Record a step; returns the sequences that are done, which have left the batch."""
        ...

    def drop(self, sequence: S) -> None:
        """Out of the batch, if it is in."""
        ...


@dataclass(frozen=True)
class Iteration:
    """A piece of work for the model: ``compute`` changes nothing, ``record`` takes its outcome; whose it is."""

    compute: Callable[[], Any]
    record: Callable[[Any], None]
    request_ids: list[int]
    is_step: bool = False


class Planner(ABC, Generic[S]):
    """Ties a controller's decisions to an engine's iterations; ``now`` is its clock, in seconds."""

    def __init__(self, controller: Controller, engine: Runs[S], now: Callable[[], float]) -> None:
        self.controller, self.now = controller, now
        self._runs = engine

    def searched(self, request_id: int, documents: Documents) -> None:
        """A search ended with these documents."""
        with self._scheduling():
            done = self.controller.final(request_id, documents, self.now())
        self._answer(done)

    def plan(self) -> Iteration | None:
        """The next iteration, a prefill before a decode step; None if there is nothing to do."""
        for sequence in [row for row in self._runs.rows if not row.generation.live]:
            self._runs.drop(sequence)
        if self._runs.has_room:
            urgent = self._urgent()
            if urgent is not None:
                return urgent
            with self._scheduling():
                ready = self.controller.next_prefill()
            if ready is not None:
                sequence = self._sequence(ready[0])
                prefill = partial(self._runs.prefill, *self._runs.prepare(sequence, ready[1]))
                return Iteration(prefill, partial(self._record_prefill, sequence), [id_of(sequence)])
        if self._runs.rows:
            return Iteration(self._runs.step, self._record_step, [id_of(s) for s in self._runs.rows], is_step=True)
        return None

    # -- what the two servers do differently --------------------------------------------------------------------------

    @abstractmethod
    def _sequence(self, generation: Generation) -> S:
        """The sequence of a generation, made at its first prefill."""

    @abstractmethod
    def _answer(self, request: Request | None) -> None:
        """A request has all its tokens; None: nobody has."""

    def _urgent(self) -> Iteration | None:
        """Work that comes before the queue."""
        return None

    def _scheduling(self) -> AbstractContextManager[None]:
        """What runs inside is a decision, not computation."""
        return nullcontext()

    # -- outcomes -----------------------------------------------------------------------------------------------------

    def _record_prefill(self, sequence: S, outcome: Any) -> None:
        if not sequence.generation.live:
            return
        self._runs.admit(sequence, outcome)
        make_payload = self._runs.payloads(sequence, outcome)
        with self._scheduling():
            self.controller.prefilled(sequence.generation, make_payload, self.now())
        if sequence.done:
            self._finish(sequence)

    def _record_step(self, outcome: Any) -> None:
        for sequence in self._runs.record(outcome):
            self._finish(sequence)

    def _finish(self, sequence: S) -> None:
        with self._scheduling():
            done = self.controller.finished(sequence.generation, sequence.num_emitted, self.now())
        self._answer(done)


def id_of(sequence: Planned) -> int:
    """The number of its request."""
    return sequence.generation.request_id
