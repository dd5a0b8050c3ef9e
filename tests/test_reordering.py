"""The queue against a rescan of everybody at every dequeue; the starvation window; RAGCache's own example."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvreuse.ragcache import Document, KnowledgeTree, Match
from kvreuse.ragcache.scheduler import ReorderQueue

Docs = tuple[Hashable, ...]
ROOT = 7
TOKENS = {"a": 3, "b": 3, "c": 10, "d": 1}


def documents(path: Sequence[Hashable]) -> list[Document]:
    """Documents of one letter, of a size each."""
    return [Document(d, TOKENS.get(str(d), 10)) for d in path]


@dataclass(frozen=True)
class Changed:
    path: Docs


class PathSet:
    """Cached paths without any K/V: a set closed under parents."""

    def __init__(self) -> None:
        self.paths: set[Docs] = {()}
        self.listeners: list[Callable[[Changed, bool], None]] = []

    def match(self, documents: Sequence[Document]) -> Match:
        ids = tuple(d.id for d in documents)
        cached = 0
        while cached <= len(ids) and ids[:cached] in self.paths:
            cached += 1
        return Match((Document("root", ROOT), *documents), (), cached, 0, 0, 0)

    def cached_tokens(self, documents: Sequence[Document]) -> int:
        match = self.match(documents)
        return sum(d.num_tokens for d in match.path[: match.num_cached])

    def subscribe(self, listener: Callable[[Changed, bool], None]) -> None:
        self.listeners.append(listener)

    def toggle(self, path: Docs) -> None:
        """Cache a path whose parent is cached, or free one that has no cached child."""
        if path in self.paths:
            if any(p[:-1] == path for p in self.paths if p):
                return
            self.paths.remove(path)
        else:
            if path and path[:-1] not in self.paths:
                return
            self.paths.add(path)
        for listener in self.listeners:
            listener(Changed(path), path in self.paths)


@dataclass
class Waiting:
    item: int
    docs: list[Document]
    question: int
    overtaken: int = 0


class Rescan:
    """The definition: at every dequeue the priorities of all who wait, from the tree as it stands."""

    def __init__(self, tree: PathSet | KnowledgeTree, window: int) -> None:
        self.tree, self.window = tree, window
        self.waiting: list[Waiting] = []

    def pop(self) -> int:
        def priority(w: Waiting) -> float:
            cached = self.tree.cached_tokens(w.docs)
            return cached / (ROOT + sum(d.num_tokens for d in w.docs) + w.question - cached)

        starved = [w for w in self.waiting if w.overtaken >= self.window]
        chosen = starved[0] if starved else max(self.waiting, key=priority)  # max keeps the first among ties
        for earlier in self.waiting[: self.waiting.index(chosen)]:
            earlier.overtaken += 1
            assert earlier.overtaken <= self.window
        self.waiting.remove(chosen)
        return chosen.item


paths = st.lists(st.sampled_from("abcd"), max_size=3).map(tuple)
steps = st.one_of(
    st.tuples(st.just("push"), paths, st.integers(1, 3)),
    st.tuples(st.just("pop"), st.just(()), st.just(0)),
    st.tuples(st.just("remove"), st.just(()), st.integers(0, 30)),
    st.tuples(st.just("change"), paths, st.just(0)),
)


def run(
    tree: PathSet | KnowledgeTree, window: int, sequence: list[tuple[str, Docs, int]], change: Callable[[Docs], None]
) -> None:
    """Drive the queue and the rescan by the same steps."""
    queue: ReorderQueue[int] = ReorderQueue(tree, window)  # type: ignore[arg-type]
    rescan = Rescan(tree, window)
    for number, (kind, path, size) in enumerate(sequence):
        if kind == "push":
            docs = documents(path)
            queue.push(number, docs, size)
            rescan.waiting.append(Waiting(number, docs, size))
        elif kind == "change":
            change(path)
        elif kind == "remove":
            gone = queue.remove(size)
            assert gone == any(w.item == size for w in rescan.waiting)
            rescan.waiting = [w for w in rescan.waiting if w.item != size]
        elif rescan.waiting:
            assert queue.pop() == rescan.pop()
        assert queue.items() == [w.item for w in rescan.waiting]
    while rescan.waiting:
        assert queue.pop() == rescan.pop()
    assert len(queue) == 0
    assert not queue._by_path
    assert not queue._in_order
    assert queue._overtook_oldest == 0


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 4), st.lists(steps, min_size=20, max_size=120))
def test_equals_a_rescan_at_every_dequeue(window: int, sequence: list[tuple[str, Docs, int]]) -> None:
    tree = PathSet()
    run(tree, window, sequence, tree.toggle)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 4), st.integers(8, 40), st.integers(0, 20), st.lists(steps, min_size=20, max_size=120))
def test_equals_a_rescan_over_a_tree_that_evicts(
    window: int, gpu: int, host: int, sequence: list[tuple[str, Docs, int]]
) -> None:
    tree = KnowledgeTree(gpu, host, system_tokens=ROOT)

    def change(path: Docs) -> None:
        if path == ("d", "d", "d"):
            tree.lose_gpu()
        else:
            tree.serve(documents(path), 1)

    run(tree, window, sequence, change)


def test_figure_10_longer_context_and_shorter_computation_first() -> None:
    tree = PathSet()
    for path in (("x",), ("y",)):
        tree.toggle(path)
    queue: ReorderQueue[str] = ReorderQueue(tree)
    queue.push("shorter context", [Document("x", 1)], 2)
    queue.push("longer context", [Document("y", 2)], 2)
    assert queue.pop() == "longer context"
    queue.push("longer computation", [Document("x", 1)], 3)
    queue.push("shorter computation", [Document("x", 1)], 1)
    assert [queue.pop() for _ in range(3)] == ["shorter computation", "shorter context", "longer computation"]


def test_alternating_requests_are_grouped() -> None:
    """The paper's motivation: one document fits; reordered, two of three requests hit it."""
    tree = PathSet()
    queue: ReorderQueue[int] = ReorderQueue(tree)
    for i in range(6):
        queue.push(i, documents("a" if i % 2 == 0 else "b"), 1)
    served, hits = [], 0
    while len(queue):
        i = queue.pop()
        doc: Docs = ("a" if i % 2 == 0 else "b",)
        hits += doc in tree.paths
        for path in sorted(tree.paths - {(), doc}):
            tree.toggle(path)
        if doc not in tree.paths:
            tree.toggle(doc)
        served.append(i)
    assert served == [0, 2, 4, 1, 3, 5]
    assert hits == 4


def test_nobody_starves() -> None:
    tree = PathSet()
    tree.toggle(("hot",))
    queue: ReorderQueue[int] = ReorderQueue(tree, window=3)
    queue.push(0, documents(["cold"]), 1)
    order = []
    for i in range(1, 9):
        queue.push(i, documents(["hot"]), 1)
        order.append(queue.pop())
    assert order.index(0) == 3


def test_window_zero_is_first_come_first_served() -> None:
    tree = PathSet()
    tree.toggle(("hot",))
    queue: ReorderQueue[int] = ReorderQueue(tree, window=0)
    queue.push(0, documents(["cold"]), 1)
    queue.push(1, documents(["hot"]), 1)
    assert [queue.pop(), queue.pop()] == [0, 1]


def test_outdated_lines_do_not_pile_up() -> None:
    tree = PathSet()
    queue: ReorderQueue[int] = ReorderQueue(tree)
    for i in range(10):
        queue.push(i, documents("a"), 1)
    for _ in range(500):
        tree.toggle(("a",))
    assert len(queue._heap) + len(queue._old) <= 2 * (2 * 10 + 64 + 10)
    assert [queue.pop() for _ in range(10)] == list(range(10))


def test_bad_input() -> None:
    queue: ReorderQueue[int] = ReorderQueue(PathSet())
    with pytest.raises(IndexError, match="empty"):
        queue.pop()
    queue.push(1, documents("a"), 1)
    with pytest.raises(ValueError, match="1 waits in the queue already"):
        queue.push(1, documents("a"), 1)
    with pytest.raises(ValueError, match="question_tokens=0"):
        queue.push(2, documents("a"), 0)
    with pytest.raises(ValueError, match="document 'a' has 0 tokens"):
        ReorderQueue(KnowledgeTree(10)).push(2, [Document("a", 0)], 1)
    with pytest.raises(ValueError, match="window=-1"):
        ReorderQueue(PathSet(), window=-1)
