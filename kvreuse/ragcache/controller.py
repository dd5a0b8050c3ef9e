"""`Controller`: what is decided about requests between retrieval and the model (RAGCache, figure 7).

It ties the tree, the reordering queue and the speculator together. Time is handed in, K/V are opaque, nothing runs by
itself: the server drives it with a model behind, a simulator with a cost model.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvreuse.ragcache.node import Match
from kvreuse.ragcache.scheduler import ReorderQueue
from kvreuse.ragcache.segments import MakePayload
from kvreuse.ragcache.speculative import Decision, Documents, Generation, Speculator, State
from kvreuse.ragcache.tree import KnowledgeTree


@dataclass(eq=False, slots=True)
class Request:
    """One request and what became of it. Times are on the caller's clock.

    ``first_token_s``: when the first token was known *and* known to be right: not before the search was done.
    ``cached_tokens`` (system prompt included) and ``cached_documents`` were in some tier when the answer's prefill
    started; ``context_tokens``: system prompt and documents. ``speculative``: the answer was begun during the search.
    """

    id: int
    question_tokens: int
    arrived_s: float
    documents: Documents | None = None
    retrieved_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    cached_tokens: int = 0
    cached_documents: int = 0
    context_tokens: int = 0
    num_tokens: int = 0
    speculative: bool = False
    failures: int = 0


@dataclass(eq=False)
class _Running:
    """A generation that is, or has been, prefilled. ``make_payload``: where its documents' K/V can be had."""

    match: Match | None
    make_payload: MakePayload | None = None
    prefilled_s: float | None = None
    finished_s: float | None = None
    num_tokens: int = 0
    was_speculative: bool = False


class Controller:
    """Decides for all open requests; changes only when called.

    Args:
        tree: exact K/V; only the controller touches it while requests are open.
        speculator: how far generation runs ahead of the search.
        window: of the reordering queue; 0 serves first come, first served.
    """

    def __init__(self, tree: KnowledgeTree, speculator: Speculator | None = None, window: int = 32) -> None:
        self.tree = tree
        self.speculator = speculator or Speculator()
        self.queue: ReorderQueue[Generation] = ReorderQueue(tree, window)
        self.open: dict[int, Request] = {}
        self._running: dict[Generation, _Running] = {}
        self._current: dict[int, Generation] = {}  # what is being done for a request, searching or not
        self._committed: set[int] = set()

    # -- the search ---------------------------------------------------------------------------------------------------

    def arrive(self, request_id: int, question_tokens: int, now: float) -> Request:
        """A request came in; its search starts."""
        if request_id in self.open:
            raise ValueError(f"request {request_id} is open already")
        self.open[request_id] = request = Request(request_id, question_tokens, now)
        return request

    def stage(self, request_id: int, documents: Documents) -> Decision:
        """A stage of the search ended with these documents."""
        if request_id not in self.open or self.open[request_id].documents is not None:
            return Decision()
        return self._carry_out(self.speculator.stage(request_id, documents, len(self.queue)))

    def final(self, request_id: int, documents: Documents, now: float) -> Request | None:
        """The search ended. Returns the request if it is answered by that: its generation was done already."""
        request = self.open.get(request_id)
        if request is None or request.documents is not None:
            return None  # an answered request, or the result of a search that was given up and done again
        request.documents, request.retrieved_s = documents, now
        decision = self._carry_out(self.speculator.final(request_id, documents))
        return self._settle(self._current[request_id], now) if decision.start is None else None

    def give_up(self, request_id: int) -> Request | None:
        """Close a request that cannot be served."""
        self._carry_out(self.speculator.abandon(request_id))
        if request_id in self._current:
            self.cancel(self._current[request_id])
        return self._close(request_id)

    # -- the model ----------------------------------------------------------------------------------------------------

    def next_prefill(self) -> tuple[Generation, Match] | None:
        """The generation to prefill next, and its pinned, promoted K/V; None if nobody waits."""
        if not len(self.queue):
            return None
        generation = self.queue.pop()
        generation.state = State.RUNNING
        match = self.tree.acquire(generation.documents)
        self.tree.promote(match)
        self._running[generation] = _Running(match, was_speculative=not generation.final)
        return generation, match

    def prefilled(self, generation: Generation, make_payload: MakePayload | None, now: float) -> None:
        """Its first token is known. ``make_payload`` gives the K/V of the documents by their index in the match.

        The tree learns of it now if the documents are final, else when they turn out to be.
        """
        if not generation.live:
            return
        running = self._running[generation]
        running.make_payload, running.prefilled_s, running.num_tokens = make_payload, now, 1
        if generation.final:
            self._settle(generation, now)

    def finished(self, generation: Generation, num_tokens: int, now: float) -> Request | None:
        """It has all its tokens. Returns its request if that is answered now: its documents are final."""
        if not generation.live:
            return None
        generation.state = State.FINISHED
        running = self._running[generation]
        running.finished_s, running.num_tokens = now, num_tokens
        return self._settle(generation, now) if generation.final else None

    def requeue(self, generation: Generation, extra_tokens: int = 0) -> None:
        """Its work was lost: it waits for a prefill again, ``extra_tokens`` (emitted ones) longer."""
        self._release(generation)
        generation.state = State.WAITING
        question = self.open[generation.request_id].question_tokens
        self.queue.push(generation, generation.documents, question + extra_tokens)

    def cancel(self, generation: Generation) -> None:
        """It is not wanted any more: out of the queue, or ended behind the current iteration."""
        generation.state = State.CANCELLED
        self.queue.remove(generation)
        self._release(generation)
        if self._current.get(generation.request_id) is generation:
            del self._current[generation.request_id]

    @property
    def running(self) -> list[Generation]:
        """Generations whose prefill has started and whose request is not answered."""
        return list(self._running)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _carry_out(self, decision: Decision) -> Decision:
        if decision.cancel is not None:
            self.cancel(decision.cancel)
        if decision.start is not None:
            request = self.open[decision.start.request_id]
            self._current[request.id] = decision.start
            self.queue.push(decision.start, decision.start.documents, request.question_tokens)
        return decision

    def _close(self, request_id: int) -> Request | None:
        self._committed.discard(request_id)
        self._current.pop(request_id, None)
        return self.open.pop(request_id, None)

    def _settle(self, generation: Generation, now: float) -> Request | None:
        """The documents are final: commit what is known; returns the request once it has all its tokens."""
        running = self._running.get(generation)
        if running is None or running.prefilled_s is None:
            return None
        request = self.open[generation.request_id]
        if request.first_token_s is None:
            assert request.retrieved_s is not None
            request.first_token_s = max(running.prefilled_s, request.retrieved_s)
            request.speculative = running.was_speculative
        self._commit(request, running)
        request.num_tokens = running.num_tokens
        if running.finished_s is None:
            return None
        request.finished_s = max(running.finished_s, now)
        del self._running[generation]
        return self._close(request.id)

    def _commit(self, request: Request, running: _Running) -> None:
        """K/V into the tree; frequencies and costs once per request, for its final documents (algorithm 1)."""
        match, running.match = running.match, None
        if match is None:
            return
        held = self.tree.insert(match, running.make_payload)
        if request.id not in self._committed:
            self._committed.add(request.id)
            self.tree.update(held, request.question_tokens)
            request.cached_tokens, request.cached_documents = match.cached_tokens, match.cached_documents
            request.context_tokens = match.cached_tokens + match.new_tokens
        self.tree.release(held)
        running.make_payload = None

    def _release(self, generation: Generation) -> None:
        running = self._running.pop(generation, None)
        if running is not None and running.match is not None:
            self.tree.release(running.match)
