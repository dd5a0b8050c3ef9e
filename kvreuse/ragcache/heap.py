"""A binary heap of tree nodes that finds any node again, so that priorities change in place in O(log n)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvreuse.ragcache.node import Node

Key = tuple[float, int, int]


class NodeHeap:
    """Min-heap of nodes by key (priority, last access, number): no stale entries, so nothing is ever scanned again.

    Numbers differ, so that entries never compare by node.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, int, Node]] = []  # flat: a tuple less per node to collect garbage in
        self._at: dict[Node, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, node: Node) -> bool:
        return node in self._at

    def key(self, node: Node) -> Key:
        """The key a node is ranked by."""
        return self._entries[self._at[node]][:3]

    def min(self) -> Node:
        """The node with the lowest key; it stays in the heap."""
        return self._entries[0][3]

    def set(self, node: Node, key: Key) -> None:
        """Add a node, or change its key."""
        at, entry = self._at.get(node), (*key, node)
        if at is None:
            at = len(self._entries)
            self._entries.append(entry)
            self._rise(at)
        else:
            rises = entry < self._entries[at]
            self._entries[at] = entry
            self._rise(at) if rises else self._sink(at)

    def remove(self, node: Node) -> None:
        """Take a node out; nothing happens if it is not in."""
        at = self._at.pop(node, None)
        if at is None:
            return
        last = self._entries.pop()
        if at < len(self._entries):
            rises = last < self._entries[at]
            self._entries[at] = last
            self._rise(at) if rises else self._sink(at)

    def nodes(self) -> list[Node]:
        """All nodes, in no order."""
        return list(self._at)

    def is_ordered(self) -> bool:
        """Whether every entry is where the heap thinks it is, and no entry is below a larger one. Looks at all."""
        entries = self._entries
        at_home = len(self._at) == len(entries) and all(
            self._at.get(entry[3]) == at for at, entry in enumerate(entries)
        )
        return at_home and all(entries[(at - 1) >> 1] <= entries[at] for at in range(1, len(entries)))

    def _rise(self, at: int) -> None:
        entries, places = self._entries, self._at
        entry = entries[at]
        while at > 0:
            above = (at - 1) >> 1
            if entries[above] <= entry:
                break
            entries[at] = entries[above]
            places[entries[at][3]] = at
            at = above
        entries[at] = entry
        places[entry[3]] = at

    def _sink(self, at: int) -> None:
        entries, places = self._entries, self._at
        entry, count = entries[at], len(entries)
        while (below := 2 * at + 1) < count:
            if below + 1 < count and entries[below + 1] < entries[below]:
                below += 1
            if entry <= entries[below]:
                break
            entries[at] = entries[below]
            places[entries[at][3]] = at
            at = below
        entries[at] = entry
        places[entry[3]] = at
