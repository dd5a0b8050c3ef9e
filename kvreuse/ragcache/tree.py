"""`KnowledgeTree`: exact K/V of document sequences over GPU and host memory (RAGCache, 5.1 and algorithm 1)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

from kvreuse.ragcache.integrity import check_integrity
from kvreuse.ragcache.node import GPU, HOST, Document, Match, Node, free_key
from kvreuse.ragcache.segments import MakePayload, Segments, check_size
from kvreuse.store.tiers import parse_bytes


class KnowledgeTree(Segments):
    """A prefix tree of documents under a system prompt; every node's K/V are in GPU memory, on host, both or neither.

    In GPU needs the parent in GPU; K/V in any tier need the parent's in some tier. Nodes without K/V ("free") keep
    their frequency and costs. Evictions leave GPU for host once: the host copy stays, and counts, until it is evicted
    itself. Works with sizes alone (no ``backend``): then a payload is a mark.

    Args:
        gpu, host: capacities, like "2GiB" or a number of bytes; 0 for no host tier. Without a GPU the first is a byte
            budget in main memory.
        bytes_per_token: size of one token's K/V.
        policy: ranks nodes within a tier.
        cost: T(alpha, beta), seconds to prefill beta tokens behind alpha cached ones; default: beta.
        system_tokens: size of the system prompt, the root. It never leaves GPU; with 0 tokens it is there at once.
        max_depth: keep no document behind this many (the paper caches top-3 prefixes of top-5 requests).
        max_nodes: forget least recently retrieved free leaves beyond this many nodes, so that memory stays flat.
        backend: moves K/V between tiers.

    Time is logical. Not thread-safe: use it from one thread, or under one lock of yours.
    """

    # -- reading: changes nothing -----------------------------------------------------------------------------------

    def path_of(self, documents: Sequence[Document]) -> tuple[Document, ...]:
        """System prompt and documents, cut to ``max_depth``."""
        return (Document(self.root.id, self.root.num_tokens), *documents[: self.max_depth])

    def match(self, documents: Sequence[Document]) -> Match:
        """The longest prefix of ``documents`` whose K/V are in any tier. O(documents).

        Raises:
            ValueError: for a document without tokens, or of another size than the tree knows under its id.
        """
        path = self.path_of(documents)
        nodes: list[Node] = []
        node: Node | None = None
        for index, document in enumerate(path):
            if index == 0:
                node = self.root
            else:
                node = None if node is None else node.children.get(document.id)
                check_size(document, node)  # of free nodes too, and of all: nothing is found out halfway through
            if node is not None and node.has_kv:
                nodes.append(node)
        return self._handle(path, nodes, documents)

    def cached_tokens(self, documents: Sequence[Document]) -> int:
        """Tokens `match` would find, without making a handle."""
        node = self.root
        if not node.has_kv:
            return 0
        total = node.num_tokens
        for document in documents[: self.max_depth]:
            child = node.children.get(document.id)
            if child is None or not child.has_kv:
                break
            total += child.num_tokens
            node = child
        return total

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless every invariant holds. For tests: it looks at all nodes."""
        check_integrity(self)

    # -- a request's way: lock, promote, insert, update, release ------------------------------------------------------

    def lock(self, match: Match) -> Match:
        """Pin a match's nodes: they stay in the tiers they are in until `release`. Returns the match.

        Raises:
            ValueError: if it is locked already, or a node has lost its K/V since; match again.
        """
        if id(match) in self._locked:
            raise ValueError(f"{match!r} is locked already")
        if not self.is_live(match):
            raise ValueError(f"{match!r} is out of date: match again")
        self._locked[id(match)] = match
        for node in match.nodes:
            self._pin(node, 1)
        return match

    def acquire(self, documents: Sequence[Document]) -> Match:
        """Match and lock."""
        return self.lock(self.match(documents))

    def release(self, match: Match) -> None:
        """Unpin a locked match's nodes. ValueError if it is not locked."""
        self._check_locked(match)
        del self._locked[id(match)]
        for node in match.nodes:
            self._pin(node, -1)

    def is_live(self, match: Match) -> bool:
        """Whether all nodes the handle holds still have K/V (a lost GPU takes them even from locked ones)."""
        return all(node.has_kv for node in match.nodes)

    def promote(self, match: Match) -> int:
        """Copy the locked match's host nodes to GPU, top down, as far as room can be made. Returns bytes copied.

        Nodes behind the first that does not fit stay on host, and can be read there (`Node.payload`).
        """
        self._check_locked(match)
        copied = 0
        for node in match.nodes:
            if node.in_gpu:
                continue
            if not node.in_host or not self._make_room(GPU, node.num_bytes):
                break
            self._put(node, GPU, self.backend.to_gpu(node.kv[HOST]))
            copied += node.num_bytes
        return copied

    def insert(self, match: Match, make_payload: MakePayload | None = None) -> Match:
        """Keep the K/V that a request has computed, top down, evicting as the policy ranks (algorithm 1).

        A document for which GPU cannot make room bypasses it and goes to host; where neither tier can, it and all
        behind it are not kept. One that another request has inserted in the meantime is kept as it is.

        Args:
            match: a locked handle.
            make_payload: called with the index in ``match.path`` of every document that is kept; not needed without a
                backend.

        Returns:
            The handle to go on with: locked, it holds the inserted nodes too. The one given is used up.
        """
        self._check_locked(match)
        held = list(match.nodes)
        parent: Node | None = None
        for index, document in enumerate(match.path):
            if index < len(match.nodes):
                parent = match.nodes[index]
                continue
            node = self._child(parent, document)
            if not node.has_kv and not self._place(node, index, make_payload):
                break
            self._pin(node, 1)
            held.append(node)
            parent = node
        self._forget()
        longer = replace(match, nodes=tuple(held))
        del self._locked[id(match)]
        self._locked[id(longer)] = longer
        return longer

    def update(self, match: Match, question_tokens: int) -> None:
        """Commit a retrieval: frequencies, costs of what was not cached, priorities in both tiers (algorithm 1).

        Call it once per request, for the final documents only, after `insert`: evict, insert, then rank.
        """
        if question_tokens < 0:
            raise ValueError(f"question_tokens={question_tokens}: give 0 or more")
        self.now += 1
        beta = match.new_tokens + question_tokens
        per_token = self.cost(match.cached_tokens, beta) / beta if beta else 0.0
        node: Node | None = None
        for index, document in enumerate(match.path):
            node = self._child(node, document)
            self.policy.touch(node, self.now)
            if index >= match.num_cached:
                node.total_cost += per_token
                node.num_computed += 1
            for tier in (GPU, HOST):
                if node.kv[tier] is not None:
                    self._rank(node, tier)
            if node in self._free:
                self._free.set(node, free_key(node))
        self._forget()

    def serve(self, documents: Sequence[Document], question_tokens: int) -> Match:
        """One request from match to release, without K/V: what simulators and tests replay. Returns the first match."""
        match = self.acquire(documents)
        self.promote(match)
        held = self.insert(match)
        self.update(held, question_tokens)
        self.release(held)
        return match

    # -- fault tolerance (section 6) ----------------------------------------------------------------------------------

    def replicate(self, max_bytes: str | int) -> int:
        """Copy the most often retrieved upper nodes to host, without taking them from GPU. Returns bytes copied.

        Top down by frequency until replicas (old ones included) take ``max_bytes``; host evicts to make room.
        """
        left, copied = parse_bytes(max_bytes), 0
        queue = [(-self.root.frequency, 0, self.root)]
        while queue:
            node = heapq.heappop(queue)[2]
            if not node.in_gpu or node.num_bytes > left:
                continue
            if not node.in_host and node.num_bytes:
                if not self._make_room(HOST, node.num_bytes):
                    continue
                self._put(node, HOST, self.backend.to_host(node.kv[GPU]))
                copied += node.num_bytes
            left -= node.num_bytes
            for child in node.children.values():
                heapq.heappush(queue, (-child.frequency, child.number, child))
        return copied

    def lose_gpu(self) -> int:
        """All K/V in GPU memory are gone. Nodes with a host copy and an unbroken path of them survive, on host.

        Returns the number of nodes that lost their K/V. Handles stay valid as handles; see `is_live`.
        """
        with_kv = list(self._with_kv_below(self.root))
        survives: set[Node] = set()
        for node in with_kv:
            if (node.in_host or node.num_bytes == 0) and (node.parent is None or node.parent in survives):
                survives.add(node)
        for node in reversed(with_kv):
            if node.num_bytes == 0:
                continue  # an empty system prompt has nothing to lose
            for tier in (GPU, HOST):
                if node.kv[tier] is not None and (tier == GPU or node not in survives):
                    self._take(node, tier)
        return sum(not node.has_kv for node in with_kv)

    def clear(self) -> None:
        """Drop all K/V, those of locked handles too; frequencies and costs stay."""
        for node in reversed(list(self._with_kv_below(self.root))):
            for tier in (GPU, HOST):
                if node.kv[tier] is not None and node.num_bytes:
                    self._take(node, tier)

    def _handle(self, path: tuple[Document, ...], nodes: list[Node], documents: Sequence[Document]) -> Match:
        held = tuple(nodes)
        in_gpu = sum(node.num_tokens for node in held if node.in_gpu)
        on_host = sum(node.num_tokens for node in held if not node.in_gpu)
        total = self.root.num_tokens + sum(document.num_tokens for document in documents)
        return Match(path, held, len(held), in_gpu, on_host, total - in_gpu - on_host)

    def _check_locked(self, match: Match) -> None:
        if self._locked.get(id(match)) is not match:
            raise ValueError(f"{match!r} is not locked: lock it, or go on with the handle that insert returned")
