"""The knowledge tree's rules once more, by brute force: a flat dict of paths, and everything rescanned every time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

GPU, HOST = "gpu", "host"
Path = tuple[int, ...]


@dataclass
class Record:
    """One node."""

    tokens: int
    number: int
    tiers: set[str] = field(default_factory=set)
    times: list[int] = field(default_factory=list)  # requests that count for the frequency
    costs: list[float] = field(default_factory=list)
    last: int = 0
    frequency: float = 0
    priority: dict[str, float] = field(default_factory=lambda: {GPU: 0.0, HOST: 0.0})

    @property
    def mean_cost(self) -> float:
        return sum(self.costs) / len(self.costs) if self.costs else 0.0


@dataclass
class Request:
    """An open request: its path, how many of its nodes it found, how many it holds."""

    path: list[tuple[Any, int]]
    cached: int
    held: int
    alpha: int
    beta: int


class BruteTree:
    def __init__(
        self,
        gpu: int,
        host: int,
        rank: Callable[[Record, float], float],
        count: Callable[[Record, int], float],
        cost: Callable[[int, int], float],
        persistent: bool,
        system_tokens: int,
        max_depth: int | None,
        max_nodes: int | None,
    ) -> None:
        self.capacity = {GPU: gpu, HOST: host}
        self.clock = {GPU: 0.0, HOST: 0.0}
        self.copied_in = {GPU: 0, HOST: 0}
        self.rank, self.count, self.cost, self.persistent = rank, count, cost, persistent
        self.max_depth, self.max_nodes = max_depth, max_nodes
        self.nodes: dict[Path, Record] = {(): Record(system_tokens, 0)}
        self.open: list[Request] = []
        self.now = self.made = 0
        if system_tokens == 0:
            self.nodes[()].tiers.add(GPU)

    # -- what the rules say -------------------------------------------------------------------------------------------

    def used(self, tier: str) -> int:
        return sum(n.tokens for n in self.nodes.values() if tier in n.tiers)

    def children(self, path: Path) -> list[Path]:
        return [p for p in self.nodes if len(p) == len(path) + 1 and p[: len(path)] == path]

    def pinned(self, path: Path) -> bool:
        return any([d for d, _ in r.path[1 : len(path) + 1]] == list(path) and r.held > len(path) for r in self.open)

    def evictable(self, tier: str) -> list[Path]:
        inside = (p for p, n in self.nodes.items() if tier in n.tiers and (tier == GPU or GPU not in n.tiers))
        return [p for p in inside if p and not self.pinned(p)]

    def leaves(self, tier: str) -> list[Path]:
        def is_leaf(path: Path) -> bool:
            below = [self.nodes[p].tiers for p in self.children(path)]
            return not any(GPU in tiers if tier == GPU else tiers for tiers in below)

        return [p for p in self.evictable(tier) if is_leaf(p)]

    def make_room(self, tier: str, tokens: int) -> bool:
        stays = self.used(tier) - sum(self.nodes[p].tokens for p in self.evictable(tier))
        if stays + tokens > self.capacity[tier]:
            return False
        while self.used(tier) + tokens > self.capacity[tier]:

            def order(path: Path) -> tuple[float, int, int]:
                node = self.nodes[path]
                return node.priority[tier], node.last, node.number

            victim = min(self.leaves(tier), key=order)
            self.clock[tier] = max(self.clock[tier], self.nodes[victim].priority[tier])
            if tier == GPU and HOST not in self.nodes[victim].tiers:
                if self.make_room(HOST, self.nodes[victim].tokens):
                    self.enter(victim, HOST)
                else:
                    for path in list(self.nodes):
                        if path[: len(victim)] == victim and path != victim and self.nodes[path].tiers:
                            self.clock[HOST] = max(self.clock[HOST], self.nodes[path].priority[HOST])
                            self.leave(path, HOST)
            self.leave(victim, tier)
        return True

    def enter(self, path: Path, tier: str) -> None:
        node = self.nodes[path]
        node.tiers.add(tier)
        self.copied_in[tier] += node.tokens
        node.priority[tier] = self.rank(node, self.clock[tier])

    def leave(self, path: Path, tier: str) -> None:
        node = self.nodes[path]
        node.tiers.remove(tier)
        if not node.tiers and not self.persistent:
            node.frequency, node.times = 0, []

    def node(self, request: Request, index: int) -> tuple[Path, Record]:
        path = tuple(d for d, _ in request.path[1 : index + 1])
        if path not in self.nodes:
            self.made += 1
            self.nodes[path] = Record(request.path[index][1], self.made)
        return path, self.nodes[path]

    def forget(self) -> None:
        while self.max_nodes is not None and len(self.nodes) > self.max_nodes:
            free = [
                p for p, n in self.nodes.items() if p and not n.tiers and not self.children(p) and not self.pinned(p)
            ]
            if not free:
                return
            del self.nodes[min(free, key=lambda p: (self.nodes[p].last, self.nodes[p].number))]

    # -- a request's way ----------------------------------------------------------------------------------------------

    def acquire(self, documents: list[tuple[int, int]]) -> Request:
        path = [("root", self.nodes[()].tokens), *documents[: self.max_depth]]
        cached = 0
        while cached < len(path):
            node = self.nodes.get(tuple(d for d, _ in path[1 : cached + 1]))
            if node is None or not node.tiers:
                break
            cached += 1
        alpha = sum(tokens for _, tokens in path[:cached])
        beta = self.nodes[()].tokens + sum(tokens for _, tokens in documents) - alpha
        request = Request(path, cached, cached, alpha, beta)
        self.open.append(request)
        return request

    def promote(self, request: Request) -> int:
        copied = 0
        for index in range(request.held):
            path, node = self.node(request, index)
            if GPU in node.tiers:
                continue
            if not node.tiers or (path and GPU not in self.nodes[path[:-1]].tiers):
                break
            if not self.make_room(GPU, node.tokens):
                break
            self.enter(path, GPU)
            copied += node.tokens
        return copied

    def insert(self, request: Request) -> None:
        while request.held < len(request.path):
            path, node = self.node(request, request.held)
            above = self.nodes[path[:-1]].tiers if path else {GPU}
            if not node.tiers:
                if GPU in above and self.make_room(GPU, node.tokens):
                    self.enter(path, GPU)
                elif above and self.make_room(HOST, node.tokens):
                    self.enter(path, HOST)
                else:
                    break
            request.held += 1
        self.forget()

    def update(self, request: Request, question: int) -> None:
        self.now += 1
        beta = request.beta + question
        for index in range(len(request.path)):
            _, node = self.node(request, index)
            node.times.append(self.now)
            node.frequency = self.count(node, self.now)
            node.last = self.now
            if index >= request.cached:
                node.costs.append(self.cost(request.alpha, beta) / beta)
            for tier in node.tiers:
                node.priority[tier] = self.rank(node, self.clock[tier])
        self.forget()

    def release(self, request: Request) -> None:
        self.open = [r for r in self.open if r is not request]

    # -- faults -------------------------------------------------------------------------------------------------------

    def replicate(self, tokens: int) -> int:
        copied, frontier = 0, [()]
        while frontier:
            path = min(frontier, key=lambda p: (-self.nodes[p].frequency, self.nodes[p].number))
            frontier.remove(path)
            node = self.nodes[path]
            if GPU not in node.tiers or node.tokens > tokens:
                continue
            if HOST not in node.tiers and node.tokens:
                if not self.make_room(HOST, node.tokens):
                    continue
                self.enter(path, HOST)
                copied += node.tokens
            tokens -= node.tokens
            frontier += self.children(path)
        return copied

    def lose_gpu(self) -> int:
        had = [p for p, n in self.nodes.items() if n.tiers]
        kept: set[Path] = set()
        for path in sorted(had, key=len):
            node = self.nodes[path]
            if (HOST in node.tiers or not node.tokens) and (not path or path[:-1] in kept):
                kept.add(path)
        for path in had:
            for tier in list(self.nodes[path].tiers):
                if self.nodes[path].tokens and (tier == GPU or path not in kept):
                    self.leave(path, tier)
        return sum(not self.nodes[p].tiers for p in had)
