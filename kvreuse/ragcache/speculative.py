"""Dynamic speculative pipelining (RAGCache, 5.3 and algorithm 2): no threads, no clock, no model.

A search shows its candidate documents stage by stage. A generation may start on them before the search is done, if
few enough requests wait for a prefill; if the final documents are the same, in the same order, it is the answer.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from kvreuse.ragcache.node import Document

Documents = tuple[Document, ...]


class State(enum.Enum):
    """Where a generation is."""

    WAITING = "waiting for its prefill"
    RUNNING = "prefilled or being prefilled"
    FINISHED = "has all its tokens"
    CANCELLED = "not wanted any more"


@dataclass(eq=False)
class Generation:
    """The answering of one request from one list of documents. ``final``: the search is done, and this is its list.

    Cancelled while it runs, it ends behind the current iteration: whoever runs it looks at ``state`` in between.
    """

    request_id: int
    documents: Documents
    final: bool = False
    state: State = State.WAITING

    @property
    def live(self) -> bool:
        """Whether it is still wanted."""
        return self.state is not State.CANCELLED

    def __repr__(self) -> str:
        kind = "final" if self.final else "speculative"
        return f"Generation(request {self.request_id}, {[d.id for d in self.documents]}, {kind}, {self.state.name})"


class Decision(NamedTuple):
    """What to do now: end one generation, start another; None for neither."""

    cancel: Generation | None = None
    start: Generation | None = None


@dataclass
class SpeculationStats:
    """Counts of speculative generations. ``deferred``: stages at whose end the pool was full."""

    started: int = 0
    kept: int = 0
    cancelled: int = 0
    deferred: int = 0


@dataclass
class _Search:
    documents: Documents | None = None
    generation: Generation | None = None


@dataclass
class Speculator:
    """Decides at every stage's end whether a generation ends or starts.

    Args:
        max_prefill_batch: a speculative generation starts only while fewer requests than this wait for their prefill.
        enabled: False waits for the final list, as systems without speculation do.
    """

    max_prefill_batch: int = 4
    enabled: bool = True
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    _searches: dict[int, _Search] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.max_prefill_batch < 1:
            raise ValueError(f"max_prefill_batch={self.max_prefill_batch}: a prefill iteration takes at least one")

    def stage(self, request_id: int, documents: Documents, pool_size: int) -> Decision:
        """A stage ended with these documents, in order; ``pool_size`` requests wait for their prefill.

        The same list as before changes nothing, unless the pool was full when it came: then it is tried again.
        """
        if not self.enabled:
            return Decision()
        search = self._searches.setdefault(request_id, _Search())
        cancel = None
        if documents != search.documents:
            cancel = self._cancel(search)
            search.documents = documents
        if search.generation is not None or not documents:
            return Decision(cancel)
        waiting = cancel is not None and cancel.state is State.WAITING
        return Decision(cancel, self._try(request_id, search, pool_size - waiting))

    def final(self, request_id: int, documents: Documents) -> Decision:
        """The search is done: a generation from this very list is kept, else one starts, however full the pool is."""
        search = self._searches.pop(request_id, _Search())
        if search.generation is not None and search.generation.documents == documents:
            search.generation.final = True
            self.stats.kept += 1
            return Decision()
        return Decision(self._cancel(search), Generation(request_id, documents, final=True))

    def abandon(self, request_id: int) -> Decision:
        """The search failed or was given up: end what it started."""
        return Decision(self._cancel(self._searches.pop(request_id, _Search())))

    def _try(self, request_id: int, search: _Search, pool_size: int) -> Generation | None:
        if pool_size >= self.max_prefill_batch:
            self.stats.deferred += 1
            return None
        assert search.documents is not None
        search.generation = Generation(request_id, search.documents)
        self.stats.started += 1
        return search.generation

    def _cancel(self, search: _Search) -> Generation | None:
        generation, search.generation = search.generation, None
        if generation is not None:
            self.stats.cancelled += 1
        return generation
