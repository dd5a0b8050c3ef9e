"""Algorithm 2, and what the controller commits: driven by hand and at random, without a model, threads or a clock."""

from __future__ import annotations

import random

import pytest

from kvreuse.ragcache import Document, KnowledgeTree
from kvreuse.ragcache.controller import Controller, Request
from kvreuse.ragcache.speculative import Decision, Documents, Generation, Speculator, State

ROOT = 4


def docs(names: str) -> Documents:
    """Documents of one letter each, ten tokens long."""
    return tuple(Document(name, 10) for name in names)


def controller(gpu: int = 1000, host: int = 1000, **speculator: object) -> Controller:
    tree = KnowledgeTree(gpu, host, system_tokens=ROOT)
    return Controller(tree, Speculator(**speculator))  # type: ignore[arg-type]


def prefill(control: Controller, now: float = 1.0) -> Generation:
    """One prefill iteration."""
    work = control.next_prefill()
    assert work is not None
    control.prefilled(work[0], None, now)
    return work[0]


def frequencies(tree: KnowledgeTree) -> dict[tuple[object, ...], float]:
    return {n.path: n.frequency for n in tree.nodes() if n.frequency and n.parent is not None}


# -- algorithm 2 ------------------------------------------------------------------------------------------------------


def test_a_new_list_ends_the_old_generation_and_starts_another() -> None:
    speculator = Speculator(max_prefill_batch=2)
    first = speculator.stage(1, docs("ab"), pool_size=0)
    assert first.cancel is None
    assert first.start is not None
    assert first.start.documents == docs("ab")
    assert speculator.stage(1, docs("ab"), pool_size=1) == Decision()
    second = speculator.stage(1, docs("ac"), pool_size=0)
    assert second.cancel is first.start
    assert second.start is not None
    assert speculator.final(1, docs("ac")) == Decision()
    assert second.start.final
    assert (speculator.stats.started, speculator.stats.kept, speculator.stats.cancelled) == (2, 1, 1)


def test_the_order_of_the_list_matters() -> None:
    speculator = Speculator()
    started = speculator.stage(1, docs("ab"), pool_size=0).start
    decision = speculator.final(1, docs("ba"))
    assert decision.cancel is started
    assert decision.start is not None
    assert decision.start.final


def test_a_full_pool_is_tried_again_at_the_next_stage() -> None:
    speculator = Speculator(max_prefill_batch=2)
    assert speculator.stage(1, docs("ab"), pool_size=2) == Decision()
    assert speculator.stage(1, docs("ab"), pool_size=2) == Decision()
    assert speculator.stage(1, docs("ab"), pool_size=1).start is not None
    assert speculator.stats.deferred == 2


def test_a_list_that_comes_back_is_started_again() -> None:
    speculator = Speculator()
    first = speculator.stage(1, docs("a"), 0).start
    second = speculator.stage(1, docs("b"), 0).start
    third = speculator.stage(1, docs("a"), 0)
    assert third.cancel is second
    assert third.start is not first
    assert third.start is not None


def test_at_the_end_the_pool_may_be_full() -> None:
    speculator = Speculator(max_prefill_batch=1)
    assert speculator.stage(1, docs("a"), pool_size=5) == Decision()
    decision = speculator.final(1, docs("a"))
    assert decision.start is not None
    assert decision.start.final


def test_without_speculation_only_the_final_list_starts() -> None:
    speculator = Speculator(enabled=False)
    assert speculator.stage(1, docs("a"), 0) == Decision()
    assert speculator.final(1, docs("a")).start is not None


def test_searches_are_forgotten() -> None:
    speculator = Speculator()
    speculator.stage(1, docs("a"), 0)
    speculator.final(1, docs("a"))
    started = speculator.stage(2, docs("a"), 0).start
    assert speculator.abandon(2).cancel is started
    assert not speculator._searches


# -- what is committed ------------------------------------------------------------------------------------------------


def test_only_the_final_list_is_committed() -> None:
    control = controller()
    control.arrive(1, 5, now=0.0)
    control.stage(1, docs("ab"))
    wrong = prefill(control, now=1.0)
    assert control.tree.now == 0
    control.stage(1, docs("ac"))
    assert wrong.state is State.CANCELLED
    right = prefill(control, now=2.0)
    assert frequencies(control.tree) == {}
    assert control.final(1, docs("ac"), now=3.0) is None
    assert frequencies(control.tree) == {("a",): 1, ("a", "c"): 1}
    assert control.tree.match(docs("ab")).cached_documents == 1
    done = control.finished(right, 4, now=6.0)
    assert done is not None
    assert (done.first_token_s, done.finished_s, done.num_tokens, done.speculative) == (3.0, 6.0, 4, True)
    assert (done.cached_tokens, done.context_tokens, done.cached_documents) == (0, ROOT + 20, 0)
    assert not control.open
    assert not control.running


def test_a_generation_done_before_the_search_answers_at_its_end() -> None:
    control = controller()
    control.arrive(1, 5, now=0.0)
    control.stage(1, docs("a"))
    generation = prefill(control, now=1.0)
    assert control.finished(generation, 3, now=2.0) is None
    done = control.final(1, docs("a"), now=7.0)
    assert done is not None
    assert (done.first_token_s, done.finished_s, done.num_tokens) == (7.0, 7.0, 3)


def test_a_hit_is_counted_at_the_prefill() -> None:
    control = controller()
    for number in (1, 2):
        control.arrive(number, 5, now=0.0)
        control.final(number, docs("ab" if number == 1 else "ac"), now=1.0)
        generation = prefill(control, now=2.0)
        done = control.finished(generation, 1, now=3.0)
        assert done is not None
    assert (done.cached_documents, done.cached_tokens, done.speculative) == (1, ROOT + 10, False)


def test_lost_work_waits_again_and_counts_once() -> None:
    control = controller()
    control.arrive(1, 5, now=0.0)
    control.final(1, docs("ab"), now=1.0)
    generation = prefill(control, now=2.0)
    control.tree.lose_gpu()
    control.requeue(generation, extra_tokens=3)
    assert prefill(control, now=9.0) is generation
    done = control.finished(generation, 5, now=10.0)
    assert done is not None
    assert done.first_token_s == 2.0
    assert frequencies(control.tree) == {("a",): 1, ("a", "b"): 1}
    assert control.tree.match(docs("ab")).cached_documents == 2


def test_giving_up_leaves_nothing_behind() -> None:
    control = controller()
    for number, prefilled in ((1, False), (2, True)):
        control.arrive(number, 5, now=0.0)
        control.stage(number, docs("ab"))
        if prefilled:
            prefill(control)
        assert control.give_up(number) is not None
        assert control.give_up(number) is None
    control.arrive(3, 5, now=0.0)
    assert control.give_up(3) is not None
    assert not len(control.queue)
    assert not control.running
    assert not control._current
    assert all(n.pins == 0 for n in control.tree.nodes())


def test_late_results_of_a_search_are_ignored() -> None:
    control = controller()
    control.arrive(1, 5, now=0.0)
    control.final(1, docs("a"), now=1.0)
    assert control.stage(1, docs("b")) == Decision()
    assert control.final(1, docs("b"), now=2.0) is None
    assert control.stage(99, docs("b")) == Decision()
    with pytest.raises(ValueError, match="request 1 is open"):
        control.arrive(1, 5, now=0.0)


@pytest.mark.parametrize("seed", range(30))
def test_at_random_every_request_is_answered_once(seed: int) -> None:
    """Searches, prefills, decoding, lost GPUs and lost work in any order; small tiers, so that everything evicts."""
    rng = random.Random(seed)
    control = controller(gpu=ROOT + 40, host=60, max_prefill_batch=rng.randint(1, 3))
    final_lists: dict[int, Documents] = {}
    searching: dict[int, int] = {}
    running: list[Generation] = []
    answered: dict[int, Request] = {}

    def note(request: Request | None) -> None:
        if request is not None:
            assert request.id not in answered
            assert request.first_token_s is not None
            answered[request.id] = request

    now, total = 0.0, 60
    while len(answered) < total:
        now += 1.0
        choice = rng.random()
        if choice < 0.25 and len(final_lists) < total:
            number = len(final_lists)
            control.arrive(number, rng.randint(1, 9), now)
            final_lists[number] = docs("".join(rng.sample("abcdef", rng.randint(1, 3))))
            searching[number] = rng.randint(0, 3)
        elif choice < 0.6 and searching:
            number = rng.choice(list(searching))
            searching[number] -= 1
            if searching[number] < 0:
                del searching[number]
                note(control.final(number, final_lists[number], now))
            else:
                right = rng.random() < 0.5
                control.stage(number, final_lists[number] if right else docs("".join(rng.sample("abcdef", 2))))
        elif choice < 0.8 and len(control.queue):
            running.append(prefill(control, now))
        elif choice < 0.97 and running:
            generation = running.pop(rng.randrange(len(running)))
            note(control.finished(generation, 3, now))
        elif choice < 0.985 and running:
            generation = running.pop(rng.randrange(len(running)))
            if generation.live:
                control.requeue(generation, 2)
        elif choice >= 0.985:
            control.tree.lose_gpu()
        control.tree.check_integrity()
    assert answered.keys() == final_lists.keys()
    assert not control.open
    assert not control._current
    assert not control._committed
    assert all(n.pins == 0 for n in control.tree.nodes())
    seen = sum(n.frequency for n in control.tree.nodes() if n.depth == 1)
    assert seen == total
    stats = control.speculator.stats
    assert stats.started == stats.kept + stats.cancelled
    assert stats.started > 0
