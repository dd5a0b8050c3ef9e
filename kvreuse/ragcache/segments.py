"""Which node's K/V are in which tier, what may leave, and algorithm 1's evictions (RAGCache, 5.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kvreuse.ragcache.heap import NodeHeap
from kvreuse.ragcache.node import GPU, HOST, Document, KVBackend, Match, Node, SizesOnly, Tier, free_key
from kvreuse.ragcache.policies import PGDSF, Policy
from kvreuse.store.tiers import parse_bytes

SYSTEM_PROMPT = "<system prompt>"  # the root's id
MARK = True  # the payload where there are no tensors

CostFunction = Callable[[int, int], float]
Listener = Callable[[Node, bool], None]
MakePayload = Callable[[int], Any]


def _tokens(alpha: int, beta: int) -> float:
    """The cost function where none is given: time proportional to the non-cached tokens."""
    return float(beta)


class Segments:
    """The GPU, host and free segments of a tree of nodes. `KnowledgeTree` puts a request's way on top.

    Everything that may leave a tier is in that tier's heap, at all times, and its bytes are counted: whether room can
    be made is known before anything is evicted, so a document that cannot be placed changes nothing.
    """

    def __init__(
        self,
        gpu: str | int,
        host: str | int = 0,
        *,
        bytes_per_token: int = 1,
        policy: Policy | None = None,
        cost: CostFunction | None = None,
        system_tokens: int = 0,
        max_depth: int | None = None,
        max_nodes: int | None = None,
        backend: KVBackend | None = None,
    ) -> None:
        if bytes_per_token < 1:
            raise ValueError(f"bytes_per_token={bytes_per_token}: a token's K/V take at least one byte")
        if system_tokens < 0:
            raise ValueError(f"system_tokens={system_tokens}: give the system prompt's number of tokens, 0 or more")
        for name, limit in (("max_depth", max_depth), ("max_nodes", max_nodes)):
            if limit is not None and limit < 1:
                raise ValueError(f"{name}={limit}: give 1 or more, or None for no limit")
        self.policy = PGDSF() if policy is None else policy
        if not isinstance(self.policy, Policy):
            raise TypeError(f"policy={policy!r}: give a policy object, like kr.PGDSF()")
        self.bytes_per_token, self.max_depth, self.max_nodes = bytes_per_token, max_depth, max_nodes
        self.cost: CostFunction = cost or _tokens
        self.backend: KVBackend = backend or SizesOnly()
        self.tiers = (Tier("gpu", parse_bytes(gpu)), Tier("host", 0 if host == 0 else parse_bytes(host)))
        self.now = 0
        self.num_nodes = 1
        self._created = 0
        self._free = NodeHeap()
        self._listeners: list[Listener] = []
        self._locked: dict[int, Match] = {}
        self.root = Node(SYSTEM_PROMPT, system_tokens, system_tokens * bytes_per_token, None, 0, 0.0)
        if self.root.num_bytes > self.gpu.capacity_bytes:
            raise ValueError(
                f"the system prompt's K/V take {self.root.num_bytes:,} bytes, gpu={gpu!r} holds "
                f"{self.gpu.capacity_bytes:,}: give the tree more room"
            )
        if system_tokens == 0:
            self._put(self.root, GPU, MARK)

    @property
    def gpu(self) -> Tier:
        """The first tier."""
        return self.tiers[GPU]

    @property
    def host(self) -> Tier:
        """The second tier."""
        return self.tiers[HOST]

    def subscribe(self, listener: Listener) -> None:
        """Have ``listener(node, has_kv)`` called whenever a node gains its first or loses its last copy."""
        self._listeners.append(listener)

    def unsubscribe(self, listener: Listener) -> None:
        """Call it no more. ValueError if it was not subscribed."""
        self._listeners.remove(listener)

    def nodes(self) -> Iterator[Node]:
        """All nodes, parents first."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    # -- tiers --------------------------------------------------------------------------------------------------------

    def _place(self, node: Node, index: int, make_payload: MakePayload | None) -> bool:
        """Put a computed document's K/V into GPU, else on host; False if neither has room for it."""
        parent = node.parent
        make = make_payload or (lambda _: MARK)
        if (parent is None or parent.in_gpu) and self._make_room(GPU, node.num_bytes):
            self._put(node, GPU, make(index))
        elif (parent is None or parent.has_kv) and self._make_room(HOST, node.num_bytes):
            self._put(node, HOST, self.backend.to_host(make(index)))
        else:
            return False
        return True

    def _make_room(self, tier: int, num_bytes: int) -> bool:
        """Evict the lowest priorities until ``num_bytes`` are free. If that cannot be, nothing changes and False."""
        held = self.tiers[tier]
        if not held.can_make_room(num_bytes):
            return False
        while held.used_bytes + num_bytes > held.capacity_bytes:
            victim = held.candidates.min()
            held.clock = max(held.clock, victim.priority[tier])
            held.evictions += 1
            if tier == GPU:
                self._swap_out(victim)
            else:
                self._take(victim, HOST)
        return True

    def _swap_out(self, node: Node) -> None:
        """Take a GPU leaf's K/V from GPU. They are copied to host only if they are not there yet (swap out once)."""
        if not node.in_host:
            if self._make_room(HOST, node.num_bytes):
                self._put(node, HOST, self.backend.to_host(node.kv[GPU]))
            else:  # it leaves the cache, and what stands on host behind it with it
                for below in reversed(list(self._with_kv_below(node))):
                    if below is not node:
                        self.host.clock = max(self.host.clock, below.priority[HOST])
                        self.host.evictions += 1
                        self._take(below, HOST)
        self._take(node, GPU)

    def _put(self, node: Node, tier: int, payload: Any) -> None:
        had_kv = node.has_kv
        node.kv[tier] = payload
        held = self.tiers[tier]
        held.used_bytes += node.num_bytes
        held.bytes_in += node.num_bytes
        if node.parent is not None:
            node.parent.gpu_children += tier == GPU
            node.parent.kv_children += not had_kv
            self._refresh(node.parent)
        node.priority[tier] = self.policy.priority(node, held.clock)
        self._refresh(node)
        if not had_kv:
            self._tell(node, True)

    def _take(self, node: Node, tier: int) -> None:
        payload, node.kv[tier] = node.kv[tier], None
        self.tiers[tier].used_bytes -= node.num_bytes
        lost = not node.has_kv
        if lost and not self.policy.persistent:
            node.frequency, node.history = 0, None
        if node.parent is not None:
            node.parent.gpu_children -= tier == GPU
            node.parent.kv_children -= lost
            self._refresh(node.parent)
        self._refresh(node)
        self.backend.drop(payload)
        if lost:
            self._tell(node, False)

    def _refresh(self, node: Node) -> None:
        """Bring what may be evicted up to date after a change of a node's tiers, children or pins."""
        movable = node.pins == 0 and node.parent is not None
        leaf = (node.gpu_children == 0, node.kv_children == 0)
        evictable = (movable and node.in_gpu, movable and node.in_host and not node.in_gpu)
        for tier in (GPU, HOST):
            held = self.tiers[tier]
            if evictable[tier] != node.evictable[tier]:
                node.evictable[tier] = evictable[tier]
                held.evictable_bytes += node.num_bytes if evictable[tier] else -node.num_bytes
            if evictable[tier] and leaf[tier]:
                if node not in held.candidates:
                    held.candidates.set(node, (node.priority[tier], node.last_access, node.number))
            else:
                held.candidates.remove(node)
        if movable and not node.has_kv and not node.children:
            if node not in self._free:
                self._free.set(node, free_key(node))
        else:
            self._free.remove(node)

    def _rank(self, node: Node, tier: int) -> None:
        held = self.tiers[tier]
        node.priority[tier] = self.policy.priority(node, held.clock)
        if node in held.candidates:
            held.candidates.set(node, (node.priority[tier], node.last_access, node.number))

    # -- nodes --------------------------------------------------------------------------------------------------------

    def _child(self, parent: Node | None, document: Document) -> Node:
        """The node of a document behind ``parent``, made if the tree does not know it."""
        if parent is None:
            return self.root
        node = parent.children.get(document.id)
        if node is None:
            self._created += 1
            size = document.num_tokens * self.bytes_per_token
            alone = self.cost(0, document.num_tokens)
            node = Node(document.id, document.num_tokens, size, parent, self._created, alone)
            parent.children[document.id] = node
            self.num_nodes += 1
            self._refresh(parent)
            self._refresh(node)
        return node

    def _forget(self) -> None:
        while self.max_nodes is not None and self.num_nodes > self.max_nodes and len(self._free):
            node = self._free.min()
            self._free.remove(node)
            assert node.parent is not None
            del node.parent.children[node.id]
            self.num_nodes -= 1
            self._refresh(node.parent)

    def _with_kv_below(self, node: Node) -> Iterator[Node]:
        """The node and all below it that have K/V, parents first."""
        stack = [node]
        while stack:
            node = stack.pop()
            if node.has_kv:
                yield node
                stack.extend(node.children.values())

    def _pin(self, node: Node, change: int) -> None:
        node.pins += change
        self._refresh(node)

    def _tell(self, node: Node, has_kv: bool) -> None:
        for listener in self._listeners:
            listener(node, has_kv)


def check_size(document: Document, node: Node | None) -> None:
    """Raise for a document without tokens, or of another size than the tree knows under its id."""
    if document.num_tokens < 1:
        raise ValueError(f"document {document.id!r} has {document.num_tokens} tokens: leave it out")
    if node is not None and node.num_tokens != document.num_tokens:
        raise ValueError(
            f"document {document.id!r} has {document.num_tokens} tokens in this request and {node.num_tokens} in the "
            "tree: one id for two contents; name documents by content"
        )
