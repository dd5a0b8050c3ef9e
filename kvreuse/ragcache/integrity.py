"""Every invariant of the knowledge tree, checked against the nodes themselves. For tests; it looks at all nodes."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from kvreuse.errors import IntegrityError
from kvreuse.ragcache.heap import Key, NodeHeap
from kvreuse.ragcache.node import GPU, HOST, Node, free_key

if TYPE_CHECKING:
    from kvreuse.ragcache.segments import Segments


def _require(holds: bool, *what: object) -> None:
    if not holds:  # only now is anything written out: these checks run thousands of times
        raise IntegrityError(" ".join(part if isinstance(part, str) else repr(part) for part in what))


def check_integrity(tree: Segments) -> None:
    """Raise `IntegrityError` naming the first invariant that does not hold."""
    nodes = list(tree.nodes())
    _check_structure(tree, nodes)
    _check_hierarchy(nodes)
    _check_pins(tree, nodes)
    for tier in (GPU, HOST):
        _check_tier(tree, tier, nodes)
    free = [n for n in nodes if n.parent is not None and not n.has_kv and not n.children and n.pins == 0]
    _check_heap("free leaves", tree._free, {n: free_key(n) for n in free})


def _check_structure(tree: Segments, nodes: list[Node]) -> None:
    _require(len(nodes) == tree.num_nodes, "num_nodes is", tree.num_nodes, ", the tree has", len(nodes))
    _require(len({n.number for n in nodes}) == len(nodes), "two nodes share a number")
    _require(tree.root.parent is None and tree.root.depth == 0, "the root has a parent")
    for node in nodes:
        size = node.num_tokens * tree.bytes_per_token
        _require(node.num_bytes == size, node, "counts", node.num_bytes, "bytes, its tokens take", size)
        for key, child in node.children.items():
            _require(child.id == key, child, "is filed under", key)
            _require(child.parent is node and child.depth == node.depth + 1, child, "does not know its parent")
        too_deep = tree.max_depth is not None and node.depth > tree.max_depth
        _require(not too_deep, node, "is deeper than max_depth=", tree.max_depth)
        for payload in node.kv:
            counted = None if payload is None or node.num_bytes == 0 else tree.backend.num_bytes(payload)
            _require(counted in (None, size), node, "holds a payload of", counted, "bytes, not", size)


def _check_hierarchy(nodes: list[Node]) -> None:
    for node in nodes:
        if node.parent is not None:
            _require(node.parent.in_gpu or not node.in_gpu, node, "is in GPU, its parent is not")
            _require(node.parent.has_kv or not node.has_kv, node, "has K/V, its parent has none")
        in_gpu = sum(child.in_gpu for child in node.children.values())
        with_kv = sum(child.has_kv for child in node.children.values())
        _require(node.gpu_children == in_gpu, node, "counts", node.gpu_children, "children in GPU, not", in_gpu)
        _require(node.kv_children == with_kv, node, "counts", node.kv_children, "children with K/V, not", with_kv)
        _require(node.frequency >= 0 and node.num_computed >= 0 <= node.total_cost, node, ": negative statistics")


def _check_pins(tree: Segments, nodes: list[Node]) -> None:
    held: Counter[Node] = Counter()
    for match in tree._locked.values():
        held.update(match.nodes)
        above: Node | None = None
        for node in match.nodes:
            _require(node.parent is above, match, "holds", node, "without what stands before it")
            above = node
    known = set(nodes)
    _require(all(node in known for node in held), "a locked handle holds a node that is not in the tree")
    for node in nodes:
        _require(
            node.pins == held[node], node, "counts", node.pins, "pins, locked handles hold it", held[node], "times"
        )


def _check_tier(tree: Segments, tier: int, nodes: list[Node]) -> None:
    held = tree.tiers[tier]
    used = sum(node.num_bytes for node in nodes if node.kv[tier] is not None)
    _require(held.used_bytes == used, held.name, "counts", held.used_bytes, "bytes, its nodes take", used)
    _require(used <= held.capacity_bytes, held.name, "holds", used, "bytes, more than", held.capacity_bytes)
    _require(held.clock >= 0 and math.isfinite(held.clock), "the clock of", held.name, "shows", held.clock)
    candidates: dict[Node, Key] = {}
    evictable = 0
    for node in nodes:
        inside = node.in_gpu if tier == GPU else node.in_host and not node.in_gpu
        may_leave = inside and node.pins == 0 and node.parent is not None
        evictable += node.num_bytes * may_leave
        _require(node.evictable[tier] == may_leave, node, "is marked evictable=", may_leave, "wrongly in", held.name)
        _require(math.isfinite(node.priority[tier]), node, "has priority", node.priority[tier])
        children = node.children.values()
        if may_leave and not any(c.in_gpu if tier == GPU else c.has_kv for c in children):
            candidates[node] = (node.priority[tier], node.last_access, node.number)
    _require(held.evictable_bytes == evictable, held.name, ":", held.evictable_bytes, "evictable, not", evictable)
    _check_heap(f"candidates of {held.name}", held.candidates, candidates)


def _check_heap(name: str, heap: NodeHeap, expected: dict[Node, Key]) -> None:
    found = {node: heap.key(node) for node in heap.nodes()}
    _require(found == expected, name, ": the heap has", found, ", it should have", expected)
    _require(heap.is_ordered(), name, ": the heap is out of order")
