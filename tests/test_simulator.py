"""The simulator: exact times by hand, the real server's books on a virtual clock, replays of the tree, conservation."""

from __future__ import annotations

import json
import math
import sys
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvreuse as kr
from kvreuse.ragcache import published
from kvreuse.ragcache.bookkeeping import Books
from kvreuse.ragcache.controller import Controller, Request
from kvreuse.ragcache.corpus import Corpus
from kvreuse.ragcache.cost_models import MeasuredCosts, StepTable
from kvreuse.ragcache.engine import Engine
from kvreuse.ragcache.kv import TreeCache
from kvreuse.ragcache.node import Document
from kvreuse.ragcache.profiler import CostProfiler
from kvreuse.ragcache.published import A10G_LLAMA2_7B, A10G_MISTRAL_7B, H800_LLAMA2_70B, H800_MIXTRAL_8X7B
from kvreuse.ragcache.serving_metrics import ServingMetrics
from kvreuse.ragcache.serving_types import ServedAnswer, ServerOptions
from kvreuse.ragcache.simulation_input import Requests
from kvreuse.ragcache.simulation_result import SimulationResult
from kvreuse.ragcache.simulator import Simulator
from kvreuse.ragcache.speculative import Speculator
from kvreuse.ragcache.systems import NO_REUSE, RAGCACHE, SGLANG_LIKE, SYSTEMS, VLLM_LIKE, System, with_policy
from tests.test_server import TEXTS, Letters
from tests.tiny import tiny_model

ARRAYS = ("arrived_s", "retrieved_s", "first_token_s", "finished_s", "prefill_s", "cached_tokens", "hit_documents")


@dataclass(frozen=True)
class Round:
    """Costs in eighths of a second, so that sums are exact: 1/8 s per new token, 1/2 s per step and so on."""

    search_stage_s: tuple[float, ...] = (1.0,)
    step: float = 0.5
    overhead: float = 0.0
    kept: float = 0.0
    to_gpu: float = 0.0
    to_host: float = 0.0
    contended_search: float = 1.0
    contention_s: float = 0.0
    name: str = "round numbers"
    bytes_per_token: int = 1

    def prefill_s(self, cached_tokens: int, new_tokens: int) -> float:
        return new_tokens / 8

    def prefill_overhead_s(self, num_rows: int) -> float:
        return self.overhead * (1 + num_rows)

    def step_s(self, num_rows: int, longest: int, total: int) -> float:
        return self.step

    def move_s(self, kept: int, to_gpu: int, to_host: int) -> float:
        return kept * self.kept + to_gpu * self.to_gpu + to_host * self.to_host


PLAIN = System("plain", kr.LRU(), window=0, speculate=False)


def run(
    arrivals: list[float], documents: list[list[int]], sizes: list[int], new: Any = 1, stages: Any = None, **server: Any
) -> SimulationResult:
    requests = Requests.from_lists(arrivals, documents, sizes, 2, new, stages)
    defaults: dict[str, Any] = {"costs": Round(), "gpu": 1000, "host": 1000, "system": PLAIN}
    return Simulator(**{**defaults, **server}).run(requests)


# -- by hand ----------------------------------------------------------------------------------------------------------


def test_one_request() -> None:
    """Search from 1 to 2, 12 tokens of prefill, two more tokens."""
    result = run([1.0], [[0]], [10], new=3)
    assert result.retrieved_s.tolist() == [2.0]
    assert result.first_token_s.tolist() == [3.5]
    assert result.finished_s.tolist() == [4.5]
    assert result.ttft_s.tolist() == [2.5]
    assert result.computed_tokens.tolist() == [12]
    assert result.prefill_s.tolist() == [1.5]
    assert result.tpot_s.tolist() == [0.5]
    assert result.throughput_per_s == 1 / 3.5
    assert (result.counts["prefills"], result.counts["decode_steps"], result.counts["decode_s"]) == (1, 2, 1.0)


def test_overheads_and_moved_bytes_take_time() -> None:
    """Overhead before the first token; keeping 10 bytes behind it, before the next step."""
    result = run([0.0], [[0]], [10], new=2, costs=Round(overhead=0.25, kept=0.125))
    assert result.first_token_s.tolist() == [1 + 0.25 + 1.5]
    assert result.finished_s.tolist() == [2.75 + 1.25 + 0.5]
    assert result.counts["moving_s"] == 1.25


def test_a_prefill_waits_for_the_running_step_and_goes_before_the_next() -> None:
    """A decodes from 2.5 on in steps of 0.5; what is found in the first step waits until 3.0."""
    result = run([0.0, 0.625], [[0], [1]], [10, 6], new=[5, 1], search_threads=None)
    assert result.retrieved_s.tolist() == [1.0, 2.5]
    assert result.first_token_s.tolist() == [2.5, 3.5]
    late = run([0.0, 1.625], [[0], [1]], [10, 6], new=[5, 1], search_threads=None)
    assert late.retrieved_s.tolist() == [1.0, 3.0]
    assert late.first_token_s.tolist() == [2.5, 4.0]
    assert late.finished_s.tolist() == [5.5, 4.0]  # four steps, and B's second in between


def test_a_search_and_an_iteration_slow_each_other() -> None:
    costs = Round(contended_search=2.0, contention_s=0.25)
    result = run([0.0, 1.5, 8.0], [[0]] * 3, [14], new=[1, 1, 1], costs=costs)
    # The first is found at 1, its 16 tokens take 2 s. In it the second's search starts at 1.5, takes 2 s, adds 0.25 s.
    assert result.retrieved_s.tolist() == [1.0, 3.5, 9.0]
    assert result.first_token_s.tolist() == [3.25, 3.75, 9.25]
    # A prefill that begins while a search runs which nothing was computed beside before.
    result = run([0.0, 0.5], [[0], [1]], [14, 14], costs=costs, search_threads=None)
    assert result.first_token_s.tolist() == [3.25, 5.25]
    assert result.retrieved_s.tolist()[0] == 1.0


def test_searches_queue_for_their_thread() -> None:
    ones = [[0], [0], [0]]
    assert run([0.0, 0.0, 0.0], ones, [2]).retrieved_s.tolist() == [1.0, 2.0, 3.0]
    assert run([0.0, 0.0, 0.0], ones, [2], search_threads=2).retrieved_s.tolist() == [1.0, 1.0, 2.0]
    everybody = run([0.0, 0.0, 0.0], ones, [2], search_threads=None)
    assert everybody.retrieved_s.tolist() == [1.0, 1.0, 1.0]
    assert everybody.first_token_s.tolist() == [1.5, 1.75, 2.0]  # the second and third find the document


def test_a_full_batch_decodes_before_the_next_prefill() -> None:
    result = run([0.0, 0.0], [[0], [1]], [6, 6], new=[3, 1], search_threads=None, max_batch=1)
    assert result.finished_s.tolist() == [3.0, 4.0]
    assert result.first_token_s.tolist() == [2.0, 4.0]


def test_hits_and_promotion() -> None:
    """The GPU has room for one document: the second is swapped out for the third's and comes back for the last."""
    costs = Round(to_gpu=0.25, to_host=0.5)
    result = run([0.0, 10.0, 30.0], [[0], [1], [0]], [8, 8], gpu=8, costs=costs)
    assert result.cached_tokens.tolist() == [0, 0, 8]
    assert result.hit_documents.tolist() == [0, 0, 1]
    # the last: search 1, document 1 to host 4, document 0 to GPU 2, question 0.25
    assert result.ttft_s.tolist() == [1 + 1.25, 1 + 1.25, 1 + 4 + 2 + 0.25]
    assert result.document_hit_rate == 1 / 3
    assert result.counts["gpu_evictions"] == 2


def test_right_and_wrong_speculation() -> None:
    """Stages end at 1, 2 and 3. Right from the first on: done at 2.5, known to be right at 3. Wrong: from 3 on."""
    costs = Round(search_stage_s=(1.0, 1.0, 1.0))
    right = run([0.0], [[0]], [10, 10], new=2, stages=[[[0], [0]]], costs=costs, system=RAGCACHE)
    assert (right.first_token_s.tolist(), right.finished_s.tolist()) == ([3.0], [3.0])
    assert right.speculative.tolist() == [True]
    assert (right.counts["speculations_kept"], right.counts["prefills"]) == (1, 1)
    wrong = run([0.0], [[0]], [10, 10], new=2, stages=[[[1], []]], costs=costs, system=RAGCACHE)
    assert (wrong.first_token_s.tolist(), wrong.finished_s.tolist()) == ([4.5], [5.0])
    assert wrong.speculative.tolist() == [False]
    assert (wrong.counts["speculations_cancelled"], wrong.counts["prefills"]) == (1, 2)
    assert wrong.counts["prefill_s"] == 3.0
    assert wrong.prefill_s.tolist() == [1.5]
    patient = run([0.0], [[0]], [10, 10], new=2, stages=[[[0], [0]]], costs=costs)
    assert patient.first_token_s.tolist() == [4.5]


def test_a_wrong_prefill_ends_behind_its_iteration() -> None:
    """It runs from 1 to 6; the search is done at 2 and starts the right one, which waits until 6."""
    costs = Round(search_stage_s=(1.0, 1.0))
    result = run([0.0], [[0]], [6, 38], new=9, stages=[[[1]]], costs=costs, system=RAGCACHE)
    assert result.first_token_s.tolist() == [7.0]
    assert result.counts["decode_steps"] == 8


def test_reordering_serves_what_is_cached_first() -> None:
    """While request 0 prefills, 1 (nothing cached) and 2 (its document cached by then) come to wait."""
    arrivals, documents, sizes = [0.0, 0.5, 0.625], [[0], [1], [0]], [30, 30]
    inorder = run(arrivals, documents, sizes, search_threads=None)
    assert inorder.first_token_s.tolist() == [5.0, 9.0, 9.25]
    reordered = run(arrivals, documents, sizes, search_threads=None, system=replace(PLAIN, window=32))
    assert reordered.first_token_s.tolist() == [5.0, 9.25, 5.25]


def test_arrivals_wait_while_too_many_are_open() -> None:
    result = run([0.0, 0.5, 1.5], [[0], [0], [0]], [6], max_open=1)
    assert result.arrived_s.tolist() == [0.0, 2.0, 3.25]  # 1.5 + 1.5 is past by then
    assert result.ttft_s.tolist() == [2.0, 1.25, 1.25]


# -- systems ----------------------------------------------------------------------------------------------------------


def test_blocks_are_cached_where_documents_are_not() -> None:
    """Documents of 10 and 9 tokens in blocks of 4: four full ones; another second document shares the first two."""
    blocks = replace(VLLM_LIKE, block_tokens=4)
    units, left = blocks.units((Document("a", 10), Document("b", 9)))
    assert [u.num_tokens for u in units] == [4, 4, 4, 4]
    assert left == 3
    assert blocks.units((Document("a", 10), Document("c", 9)))[0][:2] == units[:2]
    assert blocks.units((Document("a", 10), Document("c", 9)))[0][2] != units[2]
    lists = [[0, 1], [0, 2], [0, 1], [2]]
    result = run([0.0, 9.0, 18.0, 27.0], lists, [10, 9, 9], system=blocks, system_tokens=3)
    assert result.cached_tokens.tolist() == [0, 3 + 8, 3 + 16, 3]
    assert result.hit_documents.tolist() == [0, 1, 2, 0]
    assert result.computed_tokens.tolist() == [24, 13, 5, 11]
    assert result.ttft_s.tolist() == [1 + t / 8 for t in (24, 13, 5, 11)]
    assert run([0.0, 9.0], [[0, 1], [0, 1]], [10, 9], system=NO_REUSE, system_tokens=3).cached_tokens.tolist() == [0, 3]


def test_tails_of_blocks_go_first() -> None:
    blocks = replace(VLLM_LIKE, block_tokens=4)
    result = run([0.0, 9.0, 18.0], [[0], [1], [0]], [16, 8], system=blocks, gpu=20)
    assert result.cached_tokens.tolist() == [0, 0, 12]


def test_systems_differ_as_they_say() -> None:
    assert set(SYSTEMS) == {"no reuse", "vLLM-like", "SGLang-like", "RAGCache"}
    assert [s.host for s in SYSTEMS.values()] == [False, False, False, True]
    assert Simulator(Round(), system=SGLANG_LIKE).new_tree().host.capacity_bytes == 0
    assert with_policy(kr.LFU()).name == "LFU"
    with pytest.raises(ValueError, match="block_tokens=0"):
        System("x", block_tokens=0)
    with pytest.raises(ValueError, match="speculate=True"):
        System("x", block_tokens=16)


# -- against the tree, the server's books, and step by step -----------------------------------------------------------


def workload(seed: int, count: int, rate: float = 1.0, num_stages: int = 3) -> Requests:
    """Skewed top-2 requests over 12 documents; half of the early lists are wrong."""
    rng = np.random.default_rng(seed)
    documents = np.minimum(rng.geometric(0.25, (count, 2)) - 1, 11).astype(np.int32)
    stages = np.repeat(documents[:, None], num_stages - 1, axis=1)
    wrong = rng.random(stages.shape[:2]) < 0.5
    stages[wrong] = rng.integers(0, 12, (int(wrong.sum()), 2))
    stages[rng.random(stages.shape[:2]) < 0.1] = -1
    arrivals = np.cumsum(rng.exponential(1 / rate, count))
    sizes, answers = rng.integers(3, 20, 12), rng.integers(1, 12, count)
    return Requests(arrivals, documents, sizes, rng.integers(1, 6, count), answers, stages)


def server(system: System = RAGCACHE, **settings: Any) -> Simulator:
    costs = Round((0.31, 0.17, 0.23), step=0.113, overhead=0.017, kept=1e-3, to_gpu=3e-3, to_host=7e-3)
    return Simulator(costs, **{"gpu": 70, "host": 60, "system_tokens": 5, **settings}, system=system)


@pytest.mark.parametrize("policy", [kr.PGDSF(), kr.GDSF(), kr.LRU(), kr.LFU()], ids=lambda p: type(p).__name__)
def test_one_at_a_time_hits_are_a_replay_of_the_tree(policy: kr.Policy) -> None:
    requests = workload(3, 200, rate=0.001)
    simulator = server(replace(with_policy(policy), speculate=False))  # a wrong guess promotes what it matches
    tree, replay = simulator.new_tree(), simulator.new_tree()
    result = simulator.run(requests, tree)
    matches = []
    for row, question in zip(requests.documents.tolist(), requests.question_tokens.tolist(), strict=True):
        documents = [Document(i, int(requests.document_tokens[i])) for i in row]
        matches.append(replay.serve(documents, question))
    assert result.cached_tokens.tolist() == [m.cached_tokens for m in matches]
    assert result.hit_documents.tolist() == [m.cached_documents for m in matches]
    assert [t.evictions for t in tree.tiers] == [t.evictions for t in replay.tiers]
    assert 0.2 < result.document_hit_rate < 0.9


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=lambda s: s.name)
@pytest.mark.parametrize("rate", [0.2, 2.0])
def test_every_request_is_answered_once_and_nothing_is_left(system: System, rate: float) -> None:
    requests = workload(5, 300, rate)
    simulator = server(system if system.block_tokens is None else replace(system, block_tokens=4))
    tree = simulator.new_tree()
    result = simulator.run(requests, tree)
    tree.check_integrity()
    assert all(node.pins == 0 for node in tree.nodes())
    assert result.num_answered == 300
    for earlier, later in (
        ("arrived_s", "retrieved_s"),
        ("retrieved_s", "first_token_s"),
        ("first_token_s", "finished_s"),
    ):
        assert (getattr(result, earlier) <= getattr(result, later)).all()
    assert (result.computed_tokens >= requests.question_tokens).all()
    assert (result.counts["speculations_cancelled"] > 0) == system.speculate
    assert result.summary()["answered"] == 300
    with pytest.raises(ValueError, match="answered twice"):
        result.record(kr.ragcache.Request(7, 1, 0.0), 0.0)  # type: ignore[attr-defined]


def test_two_runs_on_one_tree() -> None:
    """The second finds what the first has left, counts its own evictions, and nobody listens to the tree behind it."""
    requests, simulator = workload(5, 100), server()
    tree = simulator.new_tree()
    one = simulator.run(requests, tree)
    assert tree._listeners == []
    two = simulator.run(requests, tree)
    assert tree._listeners == []
    for tier in tree.tiers:
        for name in ("evictions", "bytes_in"):
            assert one.counts[f"{tier.name}_{name}"] > 0
            total = one.counts[f"{tier.name}_{name}"] + two.counts[f"{tier.name}_{name}"]
            assert getattr(tier, name) == total
    assert one.cached_tokens[0] == 0
    assert two.cached_tokens[0] >= 5
    tree.check_integrity()


def test_a_tree_of_another_server_is_refused() -> None:
    with pytest.raises(ValueError, match="tree has system_tokens=5, this server 6"):
        server(system_tokens=6).run(workload(1, 3), server().new_tree())
    costs = Round((1.0, 1.0, 1.0), bytes_per_token=2)
    with pytest.raises(ValueError, match="tree has bytes_per_token=1, this server 2"):
        Simulator(costs, 100, system_tokens=5).run(workload(1, 3), server().new_tree())


def test_a_summary_is_the_servers() -> None:
    """Same names, same definitions: of the same requests they are the same numbers."""
    result, metrics = server().run(workload(5, 150)), ServingMetrics()
    for number in range(150):
        times = (result.arrived_s, result.retrieved_s, result.first_token_s, result.finished_s)
        arrived, retrieved, first, finished = (float(t[number]) for t in times)
        tokens = int(result.requests.new_tokens[number])
        metrics.answered(
            Request(number, 1, arrived, None, retrieved, first, finished, num_tokens=tokens), server().new_tree()
        )
    ours, theirs = result.summary(), metrics.summary()
    names = [name for name in theirs if name.startswith(("ttft", "tpot", "retrieval", "throughput"))]
    assert len(names) == 3 * 5 - 2
    assert {name: ours[name] for name in names} == pytest.approx({name: theirs[name] for name in names})
    with pytest.raises(RuntimeError, match="called before"):
        result.finished({}, 5)


def test_requests_from_objects() -> None:
    a, b = Document("a", 3), Document("b", 4)
    asked = [
        SimpleNamespace(arrival_s=0.0, documents=(b,), question_tokens=2, output_tokens=1, stages=((a, b), (b,))),
        SimpleNamespace(arrival_s=1.0, documents=(), question_tokens=3, output_tokens=4, stages=()),
    ]
    requests = Requests.of(asked)
    assert requests.documents.tolist() == [[0, -1], [-1, -1]]
    assert requests.document_tokens.tolist() == [4, 3]
    assert requests.shown(2).tolist() == [[[1, 0]], [[-1, -1]]]  # type: ignore[union-attr]
    result = Simulator(Round((1.0, 1.0)), 100, system_tokens=8).run(requests)
    assert result.computed_tokens.tolist() == [8 + 4 + 2, 3]
    assert result.speculative.tolist() == [False, False]
    assert result.document_hit_rate == 0


def same(one: SimulationResult, other: SimulationResult) -> bool:
    return one.counts == other.counts and all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in ARRAYS
    )


def test_parts_with_idle_time_between_them_are_the_whole() -> None:
    requests = workload(4, 90)
    parts = np.arange(90) // 30
    whole = replace(requests, arrival_s=requests.arrival_s + 1024.0 * parts)
    simulator, tree = server(), server().new_tree()
    results = [simulator.run(whole.some(parts == part), tree) for part in range(3)]
    at_once = simulator.run(whole)
    for name in ARRAYS:
        apart = np.concatenate([getattr(result, name) for result in results])
        np.testing.assert_allclose(apart, getattr(at_once, name), rtol=1e-12)
    assert at_once.finished_s[29] < whole.arrival_s[30]


def test_equal_inputs_give_equal_results() -> None:
    assert same(server().run(workload(1, 200)), server().run(workload(1, 200)))
    assert not same(server().run(workload(1, 200)), server().run(workload(2, 200)))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rate=st.sampled_from([0.1, 0.5, 2.0]),
    system=st.sampled_from(sorted(SYSTEMS)),
    threads=st.sampled_from([1, 2, None]),
    max_batch=st.integers(1, 4),
    max_open=st.sampled_from([None, 1, 5]),
)
def test_running_ahead_equals_every_step_as_an_event(
    seed: int, rate: float, system: str, threads: int | None, max_batch: int, max_open: int | None
) -> None:
    simulator = server(SYSTEMS[system], search_threads=threads, max_batch=max_batch, max_open=max_open)
    requests = workload(seed, 40, rate)
    assert same(simulator.run(requests), replace(simulator, stepwise=True).run(requests))


@pytest.mark.parametrize("speculate", [False, True])
def test_the_real_servers_books_decide_the_same_at_the_same_times(speculate: bool) -> None:
    """A tiny model's server, its clock turned by the cost model: every time and every hit is the simulator's."""
    tokenizer = Letters()
    tokenizer.eos_token_id = -1  # answers of a given length
    model = kr.ReuseModel(tiny_model(max_position_embeddings=512, eos_token_id=-1).hf, tokenizer)
    corpus, clock = Corpus(model, TEXTS, system="Answer."), [0.0]
    costs = Round(search_stage_s=(0.7, 0.3), step=0.113)
    cache = TreeCache(model, corpus.prefix, 40_000, 30_000, cost=costs.prefill_s)
    documents, question = [corpus.document(i) for i in range(len(TEXTS))], corpus.question_ids("why?")
    rng, count = np.random.default_rng(0), 40
    lists = rng.integers(0, 6, (count, 2)).tolist()
    early = [found if rng.random() < 0.5 else [1, 0] for found in lists]
    arrivals, answers = np.cumsum(rng.exponential(3.0, count)).tolist(), rng.integers(1, 6, count).tolist()
    engine, options = Engine(cache, 2), ServerOptions(window=4)
    speculator = Speculator(enabled=speculate)
    books = Books(corpus, Controller(cache.tree, speculator, 4), engine, options, lambda: clock[0])
    alphas: list[tuple[int, int]] = []
    prepare = engine.prepare

    def spy(sequence: Any, match: Any) -> Any:
        alphas.append((match.cached_tokens, sequence.prompt.num_tokens - match.cached_tokens))
        return prepare(sequence, match)

    engine.prepare = spy  # type: ignore[method-assign]
    events, free = [(at, number, 0) for number, at in enumerate(arrivals)], 0.0
    for number, at in enumerate(arrivals):
        stage = max(at, free) + 0.7
        free = stage + 0.3
        events += [(stage, number, 1), (free, number, 2)]
    events.sort()
    futures: list[Future[ServedAnswer]] = []
    while events or books.jobs:
        while events and events[0][0] <= clock[0]:
            at, number, kind = events.pop(0)
            if kind == 0:
                now, clock[0] = clock[0], at
                futures.append(books.submit("why?", question, answers[number])[1])
                clock[0] = now
            else:
                found = tuple(documents[i] for i in (early if kind == 1 else lists)[number])
                (books.stage if kind == 1 else books.final)(number, found)
        work = books.plan()
        if work is None:
            clock[0] = max(clock[0], events[0][0])
            continue
        clock[0] += costs.step if work.is_step else costs.prefill_s(*alphas[-1])
        work.record(work.compute())
    real = [future.result(0).request for future in futures]
    sizes = [document.num_tokens for document in documents]
    requests = Requests.from_lists(arrivals, lists, sizes, question.numel(), answers, [[e] for e in early])
    simulator = Simulator(
        replace(costs, bytes_per_token=cache.tree.bytes_per_token),
        40_000,
        30_000,
        replace(RAGCACHE, window=4, speculate=speculate),
        corpus.prefix.numel(),
        max_batch=2,
    )
    result = simulator.run(requests)
    assert result.cached_tokens.tolist() == [r.cached_tokens for r in real]
    assert result.hit_documents.tolist() == [r.cached_documents for r in real]
    assert result.context_tokens.tolist() == [r.context_tokens for r in real]
    assert result.speculative.tolist() == [r.speculative for r in real]
    assert result.retrieved_s == pytest.approx([r.retrieved_s for r in real], abs=1e-9)
    assert result.first_token_s == pytest.approx([r.first_token_s for r in real], abs=1e-9)
    assert result.finished_s == pytest.approx([r.finished_s for r in real], abs=1e-9)
    assert 0 < result.document_hit_rate < 1
    assert cache.tree.host.evictions > 0
    assert (speculator.stats.kept > 0) == (speculator.stats.cancelled > 0) == speculate


# -- files and bad input ----------------------------------------------------------------------------------------------

MEASURED = MeasuredCosts(
    prefill=CostProfiler((0, 10), (1, 5), ((0.1, 0.5), (0.2, 0.6)), {"device": "cpu"}),
    step=StepTable((1, 3), (10, 20), ((1.0, 2.0), (3.0, 4.0))),
    prefill_overheads_s=(0.1, 0.2),
    step_overhead_s=0.5,
    search_stage_s=(0.3, 0.1),
    keep_s_per_byte=1e-3,
    to_gpu_s_per_byte=2e-3,
    to_host_s_per_byte=4e-3,
    bytes_per_token=8,
    conditions={"device": "cpu", "threads": "1"},
)


def test_measured_costs_are_looked_up_saved_and_loaded(tmp_path: Path) -> None:
    assert MEASURED.prefill_s(5, 3) == pytest.approx(0.35)
    assert [MEASURED.prefill_overhead_s(n) for n in (0, 1, 5)] == [0.1, 0.2, 0.2]
    assert MEASURED.step_s(2, 15, 99) == 0.5 + 2.5
    assert MEASURED.move_s(1, 10, 100) == pytest.approx(0.421)
    assert MEASURED.name == "measured on cpu, threads: 1"
    path = tmp_path / "costs.json"
    MEASURED.save(path)
    assert MeasuredCosts.load(path) == MEASURED
    twice = replace(
        MEASURED, step_overhead_s=1.5, search_stage_s=(0.6, 0.2), prefill=CostProfiler((0,), (1,), ((1.0,),))
    )
    with pytest.raises(ValueError, match="2 profiles over 2 different grids"):
        MeasuredCosts.mean([MEASURED, twice])
    mean = MeasuredCosts.mean([MEASURED, replace(twice, prefill=MEASURED.prefill)])
    assert (mean.step_overhead_s, mean.bytes_per_token) == (1.0, 8)
    assert mean.search_stage_s == pytest.approx((0.45, 0.15))
    assert replace(mean, step_overhead_s=0.5, search_stage_s=(0.3, 0.1)) == MEASURED
    path.write_text(json.dumps({**MEASURED.record(), "format": "other"}))
    with pytest.raises(ValueError, match=r"costs\.json.*format is 'other'.*measure them again"):
        MeasuredCosts.load(path)
    with pytest.raises(ValueError, match="must not be negative"):
        replace(MEASURED, step_overhead_s=-1.0)
    with pytest.raises(ValueError, match="not a grid of 1 x 2"):
        StepTable((1,), (1, 2), ((1.0,),))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": [6, 3]}, r"11 cached tokens, .*up to 10: .*measure_costs\(..., cached_tokens=\) with 11"),
        ({"question": 7}, "17 new tokens in a prefill, .*up to 16: .*new_tokens="),
        ({"new": 5}, "20 tokens in a decoding sequence, .*up to 19: .*lengths="),
        ({"max_batch": 4}, "4 sequences that decode together, .*up to 3: .*max_batch="),
        ({"stages": [[[0, 1]]] * 4, "sizes": [1, 7], "documents": [[0]] * 4, "system": RAGCACHE}, None),
        (
            {"stages": [[[0, 1]]] * 4, "sizes": [1, 8], "documents": [[0]] * 4, "system": RAGCACHE},
            "11 cached tokens",  # in a list that was shown only
        ),
        ({"new": 1, "max_batch": 4}, None),  # nothing decodes
        ({"question": 5, "system": NO_REUSE, "sizes": [6, 3]}, None),
    ],
)
def test_measured_costs_refuse_what_was_not_measured(change: dict[str, Any], message: str | None) -> None:
    """A simulated clock must not charge a long prefill as the longest that was measured."""
    costs = replace(
        MEASURED,
        prefill=CostProfiler((0, 10), (1, 16), ((0.1, 0.5), (0.2, 0.6))),
        step=StepTable((1, 3), (10, 19), ((1.0, 2.0), (3.0, 4.0))),
    )
    asked = {"documents": [[0, 1]] * 4, "sizes": [5, 3], "question": 6, "new": 4, "stages": None, **change}
    lists = (asked.pop(name) for name in ("documents", "sizes", "question", "new", "stages"))
    requests = Requests.from_lists([0.0] * 4, *lists)
    simulator = Simulator(costs, system_tokens=2, **{"system": PLAIN, "max_batch": 3, **asked})
    if message is None:
        assert simulator.run(requests).num_answered == 4
        return
    with pytest.raises(ValueError, match=message):
        simulator.run(requests)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"bytes_per_token": 4}, "bytes_per_token, "),
        ({"prefill_overheads_s": (0.1,)}, "number of prefill_overheads_s"),
        ({"search_stage_s": (0.1,)}, "number of search_stage_s"),
        ({"conditions": {"device": "other", "threads": "1"}}, r"conditions\['device'\]"),
        ({"conditions": {"device": "cpu", "threads": "2"}}, r"conditions\['threads'\]"),
        ({"conditions": {"device": "cpu", "threads": "1", "model": "x"}}, r"conditions\['model'\]"),
    ],
)
def test_profiles_of_different_things_have_no_mean(change: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"differ in {name}.*no mean"):
        MeasuredCosts.mean([MEASURED, replace(MEASURED, **change)])


def test_without_simpy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "simpy", None)
    with pytest.raises(ImportError, match="pip install simpy"):
        run([0.0], [[0]], [4])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arrivals": [2.0, 1.0]}, "arrival_s falls"),
        ({"arrivals": [math.nan, 1.0]}, "arrival_s: give at least one time"),
        ({"documents": [[0], [2]]}, "documents: a document's number is from 0 to 1"),
        ({"documents": [[0]]}, "for each of 2 requests"),
        ({"sizes": [0, 3]}, "document_tokens"),
        ({"new": 0}, "new_tokens: give 1 or more"),
        ({"stages": [[[0]], [[0]]], "system": RAGCACHE}, "a search of 1 stages shows 0 before its last"),
        ({"max_batch": 0}, "max_batch=0"),
    ],
)
def test_bad_input(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"arrivals": [0.0, 1.0], "documents": [[0], [1]], "sizes": [4, 4]}
    with pytest.raises(ValueError, match=message):
        run(**{**good, **change})


# -- published hardware -----------------------------------------------------------------------------------------------


def test_published_scale_gives_back_what_the_text_says() -> None:
    """One second for 4,000 tokens, 11.5 times faster with the prefix cached, 3.9 times with its transfer; K/V 4 : 1."""
    full, hit = A10G_LLAMA2_7B.prefill_s(0, 4000), A10G_LLAMA2_7B.prefill_s(3900, 100)
    assert full == pytest.approx(1.0)
    assert full / hit == pytest.approx(11.5)
    transfer = A10G_LLAMA2_7B.move_s(0, 3900 * A10G_LLAMA2_7B.bytes_per_token, 0)
    assert full / (hit + transfer) == pytest.approx(3.9)
    assert A10G_LLAMA2_7B.bytes_per_token == 4 * A10G_MISTRAL_7B.bytes_per_token == 2**19
    assert 10e9 < published.A10G.swap_bytes_per_s < 32e9
    assert A10G_LLAMA2_7B.move_s(10**9, 0, 0) == 0


@pytest.mark.parametrize("costs", [A10G_LLAMA2_7B, A10G_MISTRAL_7B, H800_MIXTRAL_8X7B, H800_LLAMA2_70B])
def test_published_costs_are_labelled_and_grow(costs: published.PublishedCosts) -> None:
    assert costs.name.endswith("published-hardware scale")
    assert 0 < costs.prefill_s(0, 100) <= costs.prefill_s(1000, 100) < costs.prefill_s(1000, 2000)
    assert 0 < costs.step_s(1, 1000, 1000) < costs.step_s(4, 1000, 4000) < costs.prefill_s(0, 4000)
    assert costs.cache_bytes > 5e9
    assert costs.model.weight_bytes(10**6) == pytest.approx(2 * costs.model.parameters)
    assert costs.model.weight_bytes(1) == pytest.approx(2 * costs.model.active_parameters)
