"""Cache-aware reordering of waiting requests (RAGCache, section 5.2): no threads, no clock, no model.

    OrderPriority = CachedLength / ComputationLength

as it stands at the moment of every dequeue, first come first served among ties, and nobody is overtaken more than
``window`` times. The tree says when a node gains its K/V or loses the last copy, so a dequeue costs a heap operation,
not a match of everybody who waits.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from typing import Generic, Protocol, TypeVar

from kvreuse.ragcache.node import Document, Match, Node

Docs = tuple[Hashable, ...]
T = TypeVar("T", bound=Hashable)
_MOVED = 4  # lines of an old heap looked at per change; fewer than 2 would let outdated ones pile up


class WatchedTree(Protocol):
    """What the queue asks of a `KnowledgeTree`. "Cached" is: K/V in some tier; a cached node's parent is cached."""

    def match(self, documents: Sequence[Document]) -> Match:
        """The cached prefix of ``documents``."""
        ...

    def subscribe(self, listener: Callable[[Node, bool], None]) -> None:
        """Have ``listener(node, cached)`` called whenever a node becomes cached or ceases to be."""
        ...

    def unsubscribe(self, listener: Callable[[Node, bool], None]) -> None:
        """Call it no more."""
        ...


class _Waiting(Generic[T]):
    """A request in the queue. ``lengths[d]``: tokens of the root and the first d documents."""

    __slots__ = ("cached_depth", "docs", "in_queue", "item", "lengths", "number", "served", "total", "version")

    def __init__(self, item: T, number: int, docs: Docs, lengths: list[int], total: int, cached_depth: int) -> None:
        self.item, self.number, self.docs, self.lengths, self.total = item, number, docs, lengths, total
        self.cached_depth, self.version = cached_depth, 0
        self.in_queue, self.served = True, False

    @property
    def cached_tokens(self) -> int:
        return self.lengths[self.cached_depth] if self.cached_depth >= 0 else 0

    @property
    def priority(self) -> float:
        cached = self.cached_tokens
        return cached / (self.total - cached)


class ReorderQueue(Generic[T]):
    """The pool of requests that wait for their prefill.

    Args:
        tree: whose cached paths decide the order.
        window: how many requests that came later may be served before one that waits. 0 is first come, first served.
    """

    def __init__(self, tree: WatchedTree, window: int = 32) -> None:
        if window < 0:
            raise ValueError(f"window={window}: the number of times a request may be overtaken, 0 or more")
        self.window = window
        self._tree = tree
        self._entries: dict[T, _Waiting[T]] = {}
        self._by_path: dict[Docs, dict[int, _Waiting[T]]] = {}
        self._heap: list[tuple[float, int, int, _Waiting[T]]] = []  # everybody's line, and outdated ones
        self._old: list[tuple[float, int, int, _Waiting[T]]] = []  # a heap that is being moved over, without those
        self._in_order: deque[_Waiting[T]] = deque()  # by arrival; those that left are dropped from the front
        self._overtook_oldest = 0  # served requests in `_in_order` that came after its first
        self._pushed = 0
        tree.subscribe(self._on_change)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: object) -> bool:
        return item in self._entries

    def push(self, item: T, documents: Sequence[Document], question_tokens: int) -> None:
        """Queue a request for ``documents``.

        Raises:
            ValueError: it waits already, has no question, or a document is of another size than the tree knows.
        """
        if item in self._entries:
            raise ValueError(f"{item!r} waits in the queue already")
        if question_tokens < 1:
            raise ValueError(f"question_tokens={question_tokens}: a request computes at least one token")
        match = self._tree.match(documents)
        path = tuple(d.id for d in documents)
        lengths = list(accumulate((d.num_tokens for d in documents), initial=match.path[0].num_tokens))
        entry = _Waiting(item, self._pushed, path, lengths, lengths[-1] + question_tokens, match.num_cached - 1)
        self._pushed += 1
        self._entries[item] = entry
        for depth in range(len(path) + 1):
            self._by_path.setdefault(path[:depth], {})[entry.number] = entry
        self._in_order.append(entry)
        heapq.heappush(self._heap, (-entry.priority, entry.number, 0, entry))

    def pop(self) -> T:
        """Take out the request to serve next.

        Raises:
            IndexError: the queue is empty.
        """
        if not self._entries:
            raise IndexError("the queue is empty")
        oldest = self._in_order[0]
        # Whoever overtakes somebody overtakes the oldest too: its count is the largest, the only one to look at.
        entry = oldest if self._overtook_oldest >= self.window else self._best()
        entry.served = True
        self._overtook_oldest += entry is not oldest
        self._take_out(entry)
        return entry.item

    def remove(self, item: T) -> bool:
        """Take out a request that is not to be served (any more); False if it does not wait."""
        entry = self._entries.get(item)
        if entry is None:
            return False
        self._take_out(entry)
        return True

    def items(self) -> list[T]:
        """Those who wait, first come first."""
        return list(self._entries)

    def priority(self, item: T) -> float:
        """The order priority of a waiting request as things stand."""
        return self._entries[item].priority

    def close(self) -> None:
        """Be told no more of the tree's changes, which goes on without this queue."""
        self._tree.unsubscribe(self._on_change)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _best(self) -> _Waiting[T]:
        """The first of those with the highest priority."""
        tops = []
        for lines in (self._heap, self._old):
            while lines and not _is_current(lines[0]):
                heapq.heappop(lines)
            tops += lines[:1]
        return min(tops)[3]  # lines differ in number or version

    def _take_out(self, entry: _Waiting[T]) -> None:
        entry.in_queue = False
        del self._entries[entry.item]
        for depth in range(len(entry.docs) + 1):
            path = entry.docs[:depth]
            waiting = self._by_path[path]
            del waiting[entry.number]
            if not waiting:
                del self._by_path[path]
        while self._in_order and not self._in_order[0].in_queue:
            self._in_order.popleft()
            # Those who are left count only who came after the new first.
            if self._in_order and self._in_order[0].served:
                self._overtook_oldest -= 1
        self._tidy()

    def _tidy(self) -> None:
        """Once outdated lines are the majority, move the others to a new heap, a few at every change.

        All at once took 2 ms with a thousand waiting. A heap without its last line still is a heap.
        """
        if not self._old and len(self._heap) > 2 * len(self._entries) + 64:
            self._heap, self._old = [], self._heap
        for line in self._old[: -_MOVED - 1 : -1]:
            self._old.pop()
            if _is_current(line):
                heapq.heappush(self._heap, line)

    def _on_change(self, node: Node, cached: bool) -> None:
        """A node gained its K/V (its children have none) or lost them (its children have lost theirs before)."""
        path = node.path
        waiting = self._by_path.get(path)
        if waiting is None:
            return
        depth = len(path) if cached else len(path) - 1
        for entry in waiting.values():
            if entry.cached_depth == depth or (not cached and entry.cached_depth < depth):
                continue
            entry.cached_depth = depth
            entry.version += 1
            heapq.heappush(self._heap, (-entry.priority, entry.number, entry.version, entry))
            self._tidy()


def _is_current(line: tuple[float, int, int, _Waiting[T]]) -> bool:
    """Whether a heap's line is of one who waits, with the priority as it is now."""
    return line[3].in_queue and line[2] == line[3].version
