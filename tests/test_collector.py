"""Garbage is collected between iterations and at no other time, and afterwards as before."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable

import pytest

from kvreuse import ReuseModel
from kvreuse.ragcache.collector import YOUNG, Collector
from kvreuse.ragcache.server import RagServer
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


def test_starting_and_stopping_twice_is_once() -> None:
    collector, frozen = Collector(), gc.get_freeze_count()
    collector.stop()
    collector.start()
    collector.start()
    assert not gc.isenabled()
    collector.stop()
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, frozen)
    gc.disable()
    gc.freeze()  # somebody else's
    try:
        collector.stop()
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.enable()


def a_server() -> RagServer:
    return serve(ReuseModel(tiny_model(max_position_embeddings=512).hf, Letters()), collect_between=True)


def test_closing_twice_or_without_a_start_touches_nothing() -> None:
    server = a_server()
    gc.freeze()  # somebody else's
    try:
        frozen = gc.get_freeze_count()
        server.close()
        assert 0 < frozen - 100 < gc.get_freeze_count() <= frozen  # what close() lets go of leaves the count
    finally:
        gc.unfreeze()
    server, before = a_server(), gc.get_freeze_count()
    server.start()
    assert gc.get_freeze_count() > before
    server.close()
    assert gc.get_freeze_count() == before
    gc.disable()  # somebody else's
    try:
        server.close()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_thread_that_cannot_be_started_leaves_the_collector_on(monkeypatch: pytest.MonkeyPatch) -> None:
    server, frozen = a_server(), gc.get_freeze_count()
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "retrieval":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        server.start()
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, frozen)
    model_thread = server._model_thread._thread
    assert model_thread is not None
    assert not model_thread.is_alive()


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until, "waited 30 s"
        time.sleep(0.01)


def test_an_idle_server_collects_too() -> None:
    with a_server():
        seen = weakref.ref(Circle())
        many = [[] for _ in range(2 * YOUNG)]
        wait_for(lambda: seen() is None)
        assert len(many) == 2 * YOUNG


def test_broken_books_give_the_collector_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that collects between iterations has ended: Python must do so again."""

    def fail() -> None:
        raise KeyError("a fault")

    with a_server() as server:
        monkeypatch.setattr(server._books, "plan", fail)
        wait_for(lambda: server._books.error is not None and gc.isenabled())
        assert gc.get_freeze_count() == 0


def test_a_server_answers_the_same_and_restores_the_collector() -> None:
    model = ReuseModel(tiny_model(max_position_embeddings=512).hf, Letters())
    server = serve(model, collect_between=True).start()
    assert not gc.isenabled()
    check(model, server, {q: server.submit(q) for q in questions(12)})
    assert gc.isenabled()
