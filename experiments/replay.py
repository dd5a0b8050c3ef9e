"""Replays of workloads by sizes alone: what an exact prefix, chunks at any place, and both find in a cache.

The prefix cache is the library's `KnowledgeTree`, so that what is counted is what a server would reuse.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

import kvreuse as kr
from experiments.workloads import Request, Workload

INFINITE = 1 << 62  # tokens: nothing is ever evicted
RATIO = 0.15  # CacheBlend's r*


class ChunkCache:
    """Documents by id, wherever they stood, least recently used out first; ``capacity`` and sizes in tokens."""

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"capacity={capacity}: give tokens, 0 or more")
        self.capacity, self.used = capacity, 0
        self._held: OrderedDict[Hashable, int] = OrderedDict()

    def __contains__(self, id_: Hashable) -> bool:
        return id_ in self._held

    def use(self, documents: Iterable[kr.Document]) -> None:
        """Each becomes the most recently used; what is larger than the cache is not kept."""
        for document in documents:
            if document.id in self._held:
                self._held.move_to_end(document.id)
                continue
            if document.num_tokens > self.capacity:
                continue
            self._held[document.id] = document.num_tokens
            self.used += document.num_tokens
            while self.used > self.capacity:
                self.used -= self._held.popitem(last=False)[1]


@dataclass(frozen=True)
class Found:
    """What one request found. ``hits``: per document, whether its K/V were there to be used.

    ``prefix_tokens``: exact, at the front. ``other_tokens``: reused anywhere else, approximate.
    """

    hits: tuple[bool, ...]
    prefix_tokens: int
    other_tokens: int

    def computed(self, request: Request, ratio: float = RATIO) -> float:
        """Tokens whose K/V are computed: the question, what was not found, and ``ratio`` of what is approximate.

        A blend's full first layer and check layer are left out, as in the paper's own count.
        """
        return request.input_tokens - self.prefix_tokens - (1 - ratio) * self.other_tokens


def prefix_tree(workload: Workload, capacity: int, policy: kr.Policy | None = None) -> kr.KnowledgeTree:
    """A tree of one tier that holds ``capacity`` tokens besides the system prompt, LRU by default."""
    return kr.KnowledgeTree(
        capacity + workload.system_tokens, 0, policy=policy or kr.LRU(), system_tokens=workload.system_tokens
    )


def replay_prefix(workload: Workload, capacity: int) -> Iterator[Found]:
    """Exact prefixes: a document counts if all before it, in their order, are cached too."""
    tree = prefix_tree(workload, capacity)
    for request in workload.requests:
        match = tree.serve(request.documents, request.question_tokens)
        yield _exact(request, match.cached_documents)


def replay_chunks(workload: Workload, capacity: int) -> Iterator[Found]:
    """Chunks at any place. The first document of a prompt is encoded where it stands: found there, it is exact."""
    cache = ChunkCache(capacity)
    for request in workload.requests:
        yield _anywhere(request, cache, 0)
        cache.use(request.documents)


def replay_hybrid(workload: Workload, capacity: int, grow: int = 1) -> Iterator[Found]:
    """`HybridReuse`: half the capacity for a tree of exact prefixes, half for chunks behind them.

    As the method does, the tree learns leading documents that were computed whole, and ``grow`` more per request.
    """
    tree, cache = prefix_tree(workload, capacity // 2), ChunkCache(capacity - capacity // 2)
    for request in workload.requests:
        exact = tree.match(request.documents).cached_documents
        found = _anywhere(request, cache, exact)
        approximate = (i for i, hit in enumerate(found.hits) if hit and i >= max(1, exact))
        known = min(next(approximate, len(request.documents)) + grow, len(request.documents))
        tree.serve(request.documents[:known], request.question_tokens)
        cache.use(request.documents[exact:])
        yield found


def _exact(request: Request, count: int) -> Found:
    tokens = sum(d.num_tokens for d in request.documents[:count])
    return Found(tuple(i < count for i in range(len(request.documents))), tokens, 0)


def _anywhere(request: Request, cache: ChunkCache, exact: int) -> Found:
    hits = tuple(i < exact or d.id in cache for i, d in enumerate(request.documents))
    front = max(exact, 1 if hits and hits[0] else 0)
    prefix = sum(d.num_tokens for d in request.documents[:front])
    other = sum(d.num_tokens for d, hit in zip(request.documents[front:], hits[front:], strict=True) if hit)
    return Found(hits, prefix, other)


@dataclass(frozen=True)
class Totals:
    """Sums over the requests behind the warm-up, in tokens. ``input_tokens`` without the system prompt."""

    requests: int
    input_tokens: int
    document_tokens: int
    prefix_tokens: int
    other_tokens: int
    computed_tokens: float

    @property
    def hit_rate(self) -> float:
        """Share of the documents' tokens that was found."""
        return (self.prefix_tokens + self.other_tokens) / self.document_tokens if self.document_tokens else 0.0

    @property
    def computed_share(self) -> float:
        """Share of the input, question included, whose K/V are computed."""
        return self.computed_tokens / self.input_tokens


def totals(workload: Workload, found: Iterable[Found], ratio: float = RATIO) -> Totals:
    """Adds a replay up."""
    pairs = list(zip(workload.requests, found, strict=True))[workload.warmup :]
    return Totals(
        len(pairs),
        sum(request.input_tokens for request, _ in pairs),
        sum(request.document_tokens for request, _ in pairs),
        sum(f.prefix_tokens for _, f in pairs),
        sum(f.other_tokens for _, f in pairs),
        sum(f.computed(request, ratio) for request, f in pairs),
    )
