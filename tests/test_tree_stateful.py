"""The knowledge tree against a brute-force model, step by step, under every policy."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import kvreuse as kr
from kvreuse.ragcache.node import GPU, HOST
from tests import brute_tree
from tests.brute_tree import BruteTree, Record

SIZES = {0: 3, 1: 5, 2: 2, 3: 9, 4: 4}  # tokens of the documents there are
WINDOW = 6
STEPS = Counter[str]()


def cost(alpha: int, beta: int) -> float:
    """Grows with both, not in proportion to either."""
    return 3 + beta + alpha * beta / 16


def alone(node: Record) -> float:
    return cost(0, node.tokens)


@dataclass(frozen=True)
class Case:
    """A policy, and what the brute-force model ranks and counts by."""

    policy: kr.Policy
    rank: Any
    count: Any = lambda node, now: node.frequency + 1


def _in_window(node: Record, now: int) -> int:
    return sum(time > now - WINDOW for time in node.times)


def _halved(node: Record, now: int) -> float:
    return sum(0.5 ** (now // WINDOW - time // WINDOW) for time in node.times)


SLIDING, HALVING = kr.SlidingWindow(WINDOW), kr.HalvingWindow(WINDOW)
CASES = {
    "pgdsf": Case(kr.PGDSF(), lambda n, clock: clock + n.frequency * n.mean_cost),
    "pgdsf-sliding": Case(kr.PGDSF(window=SLIDING), lambda n, clock: clock + n.frequency * n.mean_cost, _in_window),
    "pgdsf-halving": Case(kr.PGDSF(window=HALVING), lambda n, clock: clock + n.frequency * n.mean_cost, _halved),
    "gdsf": Case(kr.GDSF(), lambda n, clock: clock + n.frequency * alone(n) / max(1, n.tokens)),
    "gdsf-constant": Case(
        kr.GDSF(cost="constant", persistent=False), lambda n, clock: clock + n.frequency * 1.0 / max(1, n.tokens)
    ),
    "gdsf-tokens": Case(kr.GDSF(cost="tokens"), lambda n, clock: clock + n.frequency),
    "lru": Case(kr.LRU(), lambda n, clock: n.last),
    "lfu": Case(kr.LFU(), lambda n, clock: n.frequency),
    "lfu-forgetful": Case(kr.LFU(persistent=False), lambda n, clock: n.frequency),
    "lfu-sliding": Case(kr.LFU(window=SLIDING, persistent=False), lambda n, clock: n.frequency, _in_window),
}
documents = st.lists(st.sampled_from(sorted(SIZES)), min_size=0, max_size=4)


class TreeMachine(RuleBasedStateMachine):
    """Requests open, overlap, are served or dropped; the GPU fails now and then."""

    name: str

    @initialize(
        gpu=st.integers(8, 30),
        host=st.integers(0, 40),
        system=st.integers(0, 4),
        max_depth=st.sampled_from([None, 2]),
        max_nodes=st.sampled_from([None, 12]),
    )
    def start(self, gpu: int, host: int, system: int, max_depth: int | None, max_nodes: int | None) -> None:
        case = CASES[self.name]
        limits = {"system_tokens": system, "max_depth": max_depth, "max_nodes": max_nodes}
        self.tree = kr.KnowledgeTree(gpu, host, policy=case.policy, cost=cost, **limits)
        self.brute = BruteTree(gpu, host, case.rank, case.count, cost, case.policy.persistent, **limits)
        self.requests: list[tuple[kr.Match, Any]] = []
        self.told: dict[tuple[Any, ...], bool] = {}
        self.tree.subscribe(lambda node, has_kv: self.told.__setitem__(node.path, has_kv))
        self.had = self._with_kv()

    def _with_kv(self) -> set[tuple[Any, ...]]:
        return {node.path for node in self.tree.nodes() if node.has_kv}

    @rule(ids=documents)
    def acquire(self, ids: list[int]) -> None:
        wanted = [kr.Document(i, SIZES[i]) for i in ids]
        match, request = self.tree.acquire(wanted), self.brute.acquire([(i, SIZES[i]) for i in ids])
        assert (match.num_cached, match.cached_tokens, match.new_tokens) == (
            request.cached,
            request.alpha,
            request.beta,
        )
        assert self.tree.cached_tokens(wanted) == request.alpha
        self.requests.append((match, request))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), question=st.integers(1, 4))
    def go_on(self, data: st.DataObject, question: int) -> None:
        at = data.draw(st.integers(0, len(self.requests) - 1))
        match, request = self.requests[at]
        action = data.draw(st.sampled_from(["promote", "insert", "update", "release", "release"]))
        if action == "promote":
            assert self.tree.promote(match) == self.brute.promote(request)
        elif action == "insert":
            self.requests[at] = self.tree.insert(match), request
            self.brute.insert(request)
        elif action == "update":
            self.tree.update(match, question)
            self.brute.update(request, question)
        else:
            self.tree.release(match)
            self.brute.release(request)
            self.requests.pop(at)

    @rule(ids=documents, question=st.integers(1, 4))
    def serve(self, ids: list[int], question: int) -> None:
        self.tree.serve([kr.Document(i, SIZES[i]) for i in ids], question)
        request = self.brute.acquire([(i, SIZES[i]) for i in ids])
        self.brute.promote(request)
        self.brute.insert(request)
        self.brute.update(request, question)
        self.brute.release(request)

    @rule(fails=st.booleans(), tokens=st.integers(1, 20))
    def fault(self, fails: bool, tokens: int) -> None:
        if fails:
            assert self.tree.lose_gpu() == self.brute.lose_gpu()
        else:
            assert self.tree.replicate(tokens) == self.brute.replicate(tokens)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "tree"):
            return
        STEPS[self.name] += 1
        tree, brute = self.tree, self.brute
        tree.check_integrity()
        nodes = {node.path: node for node in tree.nodes()}
        assert nodes.keys() == brute.nodes.keys()
        assert (tree.gpu.clock, tree.host.clock) == (brute.clock[brute_tree.GPU], brute.clock[brute_tree.HOST])
        copied = brute.copied_in  # equal: nothing is swapped out twice
        assert (tree.gpu.bytes_in, tree.host.bytes_in) == (copied[brute_tree.GPU], copied[brute_tree.HOST])
        for path, node in nodes.items():
            record = brute.nodes[path]
            assert (node.in_gpu, node.in_host) == (brute_tree.GPU in record.tiers, brute_tree.HOST in record.tiers)
            assert math.isclose(node.frequency, record.frequency, rel_tol=1e-12)
            assert node.mean_cost == record.mean_cost
            assert (node.pins > 0) == brute.pinned(path)
            if node.in_gpu and path:
                assert node.priority[GPU] == record.priority[brute_tree.GPU]
            if node.in_host and path:  # the root is never ranked
                assert node.priority[HOST] == record.priority[brute_tree.HOST]
        now = {path for path, node in nodes.items() if node.has_kv}
        assert {path for path, has_kv in self.told.items() if has_kv} - now == set()
        assert all(self.told.get(path) is True for path in now - self.had)
        assert all(self.told.get(path) is False for path in self.had - now)
        self.had = now
        self.told.clear()


@pytest.mark.parametrize("name", CASES)
def test_tree_equals_the_brute_force_model(name: str) -> None:
    machine = type(f"{name} machine", (TreeMachine,), {"name": name})
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=45, stateful_step_count=60, deadline=None, derandomize=True, suppress_health_check=checks
        ),
    )


def test_the_machine_took_enough_steps() -> None:
    """Fewer would mean that Hypothesis gave up early. Runs behind the tests above (same file, same process)."""
    if len(STEPS) < len(CASES):
        pytest.skip("only some of the policies were run")
    assert sum(STEPS.values()) >= 20_000, STEPS
