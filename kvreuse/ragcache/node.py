"""What the knowledge tree is made of: documents, nodes, tiers, match handles. Sizes only; K/V are opaque payloads."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from kvreuse.ragcache.heap import Key, NodeHeap

GPU, HOST = 0, 1  # index of a tier in `Node.kv` and `Node.priority`


class Document(NamedTuple):
    """A retrieved document: an id that names its content, and its size."""

    id: Hashable
    num_tokens: int


class KVBackend(Protocol):
    """Moves a node's K/V between tiers. The tree treats what it is given as opaque."""

    def to_host(self, payload: Any) -> Any:
        """A copy in host memory; the original stays."""
        ...

    def to_gpu(self, payload: Any) -> Any:
        """A copy in GPU memory; the original stays."""
        ...

    def drop(self, payload: Any) -> None:
        """The tree has let go of a copy."""
        ...

    def num_bytes(self, payload: Any) -> int | None:
        """Bytes of a copy, to check the tree's books; None where there are no tensors."""
        ...


class SizesOnly:
    """No K/V at all: the tree counts bytes and tokens. For simulation."""

    def to_host(self, payload: Any) -> Any:
        """The same mark."""
        return payload

    def to_gpu(self, payload: Any) -> Any:
        """The same mark."""
        return payload

    def drop(self, payload: Any) -> None:
        """Nothing to free."""

    def num_bytes(self, payload: Any) -> int | None:
        """Nothing to weigh."""
        return None


class Node:
    """One document behind one sequence of documents. Read it; only the tree writes it.

    ``kv[GPU]``, ``kv[HOST]``: the payload in that tier, None if it is not there. ``priority``: stored, per tier.
    ``gpu_children`` / ``kv_children``: how many children are in GPU / have K/V in any tier. ``pins``: live locks
    whose path runs through it.
    """

    __slots__ = (
        "children",
        "depth",
        "document_cost",
        "evictable",
        "frequency",
        "gpu_children",
        "history",
        "id",
        "kv",
        "kv_children",
        "last_access",
        "num_bytes",
        "num_computed",
        "num_tokens",
        "number",
        "parent",
        "pins",
        "priority",
        "total_cost",
    )

    def __init__(
        self, id_: Hashable, num_tokens: int, num_bytes: int, parent: Node | None, number: int, document_cost: float
    ) -> None:
        self.id, self.num_tokens, self.num_bytes, self.parent, self.number = id_, num_tokens, num_bytes, parent, number
        self.children: dict[Hashable, Node] = {}
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.kv: list[Any] = [None, None]
        self.priority: list[float] = [0.0, 0.0]
        self.evictable = bytearray(2)  # 0 or 1 per tier; unlike a list, nothing that the garbage collector visits
        self.gpu_children = self.kv_children = self.pins = 0
        self.frequency: float = 0
        self.last_access = 0
        self.history: deque[int] | None = None
        self.total_cost = 0.0
        self.num_computed = 0
        self.document_cost = document_cost

    @property
    def in_gpu(self) -> bool:
        """Whether its K/V are in GPU memory."""
        return self.kv[GPU] is not None

    @property
    def in_host(self) -> bool:
        """Whether its K/V are in host memory."""
        return self.kv[HOST] is not None

    @property
    def has_kv(self) -> bool:
        """Whether its K/V are in any tier."""
        return self.kv[GPU] is not None or self.kv[HOST] is not None

    @property
    def payload(self) -> Any:
        """Its K/V from the fastest tier that has them; None where no tier does."""
        return self.kv[GPU] if self.kv[GPU] is not None else self.kv[HOST]

    @property
    def mean_cost(self) -> float:
        """Mean of Cost_i / NewSize_i over the requests that had to compute it."""
        return self.total_cost / self.num_computed if self.num_computed else 0.0

    @property
    def path(self) -> tuple[Hashable, ...]:
        """Document ids from below the root down to this node; () for the root."""
        ids: list[Hashable] = []
        node = self
        while node.parent is not None:
            ids.append(node.id)
            node = node.parent
        return tuple(reversed(ids))

    def __repr__(self) -> str:
        tiers = "+".join(name for name, kv in zip(("gpu", "host"), self.kv, strict=True) if kv is not None)
        return f"Node({list(self.path)}, {self.num_tokens} tokens, {tiers or 'free'})"


@dataclass
class Tier:
    """Bytes, clock and eviction candidates of one tier. ``evictable_bytes``: of nodes that may be made to leave it."""

    name: str
    capacity_bytes: int
    used_bytes: int = 0
    evictable_bytes: int = 0
    clock: float = 0.0
    evictions: int = 0
    bytes_in: int = 0
    candidates: NodeHeap = field(default_factory=NodeHeap, repr=False)

    def can_make_room(self, num_bytes: int) -> bool:
        """Whether ``num_bytes`` fit if everything that may leave does."""
        return self.used_bytes - self.evictable_bytes + num_bytes <= self.capacity_bytes


@dataclass(frozen=True, eq=False)
class Match:
    """What the tree had of a request's documents when it was asked; never changes.

    ``path``: the system prompt, then the documents (no deeper than the tree's ``max_depth``). ``nodes``: the nodes this
    handle holds, a prefix of the path: those matched, and behind an insertion those inserted. ``num_cached``: how
    many of ``path`` had K/V. ``gpu_tokens`` / ``host_tokens``: tokens of these in GPU / on host only.
    ``new_tokens``: tokens of the system prompt and *all* the request's documents that no tier had.
    """

    path: tuple[Document, ...]
    nodes: tuple[Node, ...]
    num_cached: int
    gpu_tokens: int
    host_tokens: int
    new_tokens: int

    @property
    def cached_tokens(self) -> int:
        """alpha: tokens in any tier, system prompt included."""
        return self.gpu_tokens + self.host_tokens

    @property
    def cached_documents(self) -> int:
        """Documents in any tier; the system prompt is none."""
        return max(0, self.num_cached - 1)

    @property
    def uncached(self) -> tuple[Document, ...]:
        """What of ``path`` had no K/V; the system prompt comes first if it is among them."""
        return self.path[self.num_cached :]

    def __repr__(self) -> str:
        return f"Match({self.cached_documents} of {len(self.path) - 1} documents, {self.cached_tokens} tokens cached)"


def free_key(node: Node) -> Key:
    """In which order nodes without K/V are forgotten: least recently retrieved first."""
    return (float(node.last_access), node.last_access, node.number)
