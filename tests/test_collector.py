"""Garbage is collected between iterations and at no other time, and afterwards as before."""

from __future__ import annotations

import gc
import weakref

from kvreuse import ReuseModel
from kvreuse.ragcache.collector import YOUNG, Collector
from tests.test_server import Letters, check, questions, serve
from tests.tiny import tiny_model


class Circle:
    """Refers to itself: only the collector frees it."""

    def __init__(self) -> None:
        self.self = self


def test_collects_only_when_told_and_only_if_it_is_worth_it() -> None:
    collector = Collector()
    collector.start()
    try:
        seen = weakref.ref(Circle())
        collector.between()
        assert seen() is not None, "a few objects are no reason"
        many = [[] for _ in range(2 * YOUNG)]
        assert seen() is not None
        collector.between()
        assert seen() is None
        assert len(many) == 2 * YOUNG
    finally:
        collector.stop()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_leaves_a_collector_that_was_off_off() -> None:
    gc.disable()
    try:
        collector = Collector()
        collector.start()
        collector.stop()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_server_answers_the_same_and_restores_the_collector() -> None:
    model = ReuseModel(tiny_model(max_position_embeddings=512).hf, Letters())
    server = serve(model, collect_between=True).start()
    assert not gc.isenabled()
    check(model, server, {q: server.submit(q) for q in questions(12)})
    assert gc.isenabled()
