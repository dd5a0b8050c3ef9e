"""The server on a tiny model: every answer is full recompute's, whatever dies, hangs, or is lost on the way."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch

import kvreuse as kr
from kvreuse.ragcache.corpus import Corpus
from kvreuse.ragcache.kv import TensorBackend, TreeCache
from kvreuse.ragcache.server import RagServer
from kvreuse.ragcache.serving_types import ServedAnswer, ServerOptions
from tests.tiny import tiny_model

WAIT_S = 60  # for an answer that takes milliseconds


class Letters:
    """A tokenizer of one token a character."""

    eos_token_id = 2
    chat_template = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [3 + ord(c) % 120 for c in text]}

    def decode(self, ids: Sequence[int] | torch.Tensor, skip_special_tokens: bool = True) -> str:
        return " ".join(str(int(i)) for i in ids)


TEXTS = [f"document {letter}: " + letter * (5 + 3 * i) for i, letter in enumerate("abcdefgh")]


class Staged:
    """Two documents by the question's number; wrong lists first for some of them. ``hook`` runs before every stage."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.pause_s = pause_s
        self.hook: Callable[[str], None] = lambda question: None

    @staticmethod
    def final(question: str) -> list[int]:
        rng = random.Random(question)
        return [min(int(rng.expovariate(0.5)), 7), rng.randrange(4)]

    def search(self, question: str, on_stage: Callable[[Sequence[int]], None]) -> list[int]:
        rng = random.Random(question + "stages")
        for _ in range(rng.randint(0, 2)):
            self.hook(question)
            on_stage(self.final(question) if rng.random() < 0.5 else [rng.randrange(8), rng.randrange(8)])
            time.sleep(self.pause_s)
        self.hook(question)
        return self.final(question)


@pytest.fixture(scope="module")
def model() -> kr.ReuseModel:
    tiny = tiny_model(max_position_embeddings=512)
    return kr.ReuseModel(tiny.hf, Letters())


def serve(
    model: kr.ReuseModel, retriever: Staged | None = None, gpu: int = 200_000, host: int = 200_000, **options: Any
) -> RagServer:
    corpus = Corpus(model, TEXTS, system="Answer.")
    defaults: dict[str, Any] = {"max_new_tokens": 6, "max_batch": 3}
    cache = TreeCache(model, corpus.prefix, gpu, host)
    return RagServer(model, corpus, retriever or Staged(), cache, ServerOptions(**{**defaults, **options}))


def expected(model: kr.ReuseModel, server: RagServer, question: str, max_new_tokens: int = 6) -> list[int]:
    """Full recompute of the same prompt, decoded alone."""
    corpus = Corpus(model, TEXTS, system="Answer.")
    documents = [corpus.document(n) for n in Staged.final(question)]
    prompt = corpus.prompt(documents, corpus.question_ids(question))
    result = kr.FullRecompute().prefill(model, prompt, kr.KVStore())
    return model.generate(result, max_new_tokens).token_ids


def check(model: kr.ReuseModel, server: RagServer, futures: dict[str, Future[ServedAnswer]]) -> None:
    """Every request answered, once, as full recompute would; nothing is left behind."""
    answers = {question: future.result(WAIT_S) for question, future in futures.items()}
    for question, answer in answers.items():  # only now: nobody else may run the model while the server does
        assert answer.token_ids == expected(model, server, question), question
        assert answer.documents == Staged.final(question)
        assert answer.request.finished_s >= answer.request.first_token_s >= answer.request.retrieved_s  # type: ignore[operator]
    assert len(server.metrics.requests) == len({r.id for r in server.metrics.requests})
    server.close()
    books = server._books
    assert books.error is None
    assert not books.jobs
    assert not books.controller.open
    assert not books.controller.running
    assert not len(books.controller.queue)
    assert not books.engine.rows
    assert all(node.pins == 0 for node in server.tree.nodes())
    server.tree.check_integrity()


def questions(count: int) -> list[str]:
    return [f"question {i}?" for i in range(count)]


def test_answers_equal_full_recompute(model: kr.ReuseModel) -> None:
    with serve(model, Staged(0.002)) as server:
        check(model, server, {q: server.submit(q) for q in questions(40)})
    summary = server.metrics.summary()
    assert summary["answered"] == 40
    assert 0.3 < summary["token_hit_rate"] < 1
    assert 0.2 < summary["document_hit_rate"] < 1
    assert summary["ttft_mean_s"] > summary["retrieval_mean_s"] > 0
    assert summary["tpot_median_s"] > 0
    assert summary["scheduling_mean_s"] < summary["ttft_mean_s"]
    assert "failed" not in summary


@pytest.mark.parametrize("speculate", [True, False])
def test_an_idle_model_starts_during_the_search(model: kr.ReuseModel, speculate: bool) -> None:
    futures = {}
    with serve(model, Staged(0.01), speculate=speculate) as server:
        for question in questions(15):
            futures[question] = server.submit(question)
            futures[question].result(WAIT_S)
        check(model, server, futures)
    stats, summary = server._books.controller.speculator.stats, server.metrics.summary()
    assert (summary["speculative_share"] > 0) == (stats.kept > 0) == (stats.cancelled > 0) == speculate


def test_small_tiers_evict_and_answers_stay_right(model: kr.ReuseModel) -> None:
    with serve(model, gpu=60_000, host=40_000, window=2) as server:
        check(model, server, {q: server.submit(q) for q in questions(30)})
        assert server.tree.gpu.evictions > 0
        assert server.tree.host.evictions > 0


def test_killed_model_thread_and_lost_gpu(model: kr.ReuseModel) -> None:
    """Again and again, while requests come in."""
    with serve(model, Staged(0.001), max_attempts=50, replicas=50_000, replicate_every=3) as server:
        futures = {}
        for number, question in enumerate(questions(60)):
            futures[question] = server.submit(question)
            if number % 7 == 3:
                server.kill_model_thread()
            if number % 10 == 5:
                server.lose_gpu()
            time.sleep(0.01)
        check(model, server, futures)
    counts = server.metrics.counts
    assert counts["model_thread_replaced"] >= 3
    assert counts["gpu_lost"] == 6
    assert counts["retried"] > 0
    assert counts["replicated_bytes"] > 0
    assert counts["failed"] == 0


def test_behind_its_first_token_a_request_goes_on_from_stored_kv(model: kr.ReuseModel) -> None:
    server = serve(model, max_new_tokens=40, speculate=False)
    engine, prefills, steps = server._books.engine, [], []
    real_prefill, real_step = engine.prefill, engine.step

    def prefill(*args: Any) -> Any:
        prefills.append(1)
        return real_prefill(*args)

    def step() -> torch.Tensor:
        steps.append(1)
        if len(steps) == 5:
            server.kill_model_thread()
        return real_step()

    engine.prefill, engine.step = prefill, step  # type: ignore[method-assign]
    with server:
        answer = server.submit("question 1?").result(WAIT_S)
        assert answer.token_ids == expected(model, server, "question 1?", 40)
    assert len(prefills) == 1
    assert len(steps) == 40  # 39 tokens behind the first, and the one that was lost
    assert server.metrics.counts["model_thread_replaced"] == 1


def test_before_its_first_token_a_request_is_computed_again(model: kr.ReuseModel) -> None:
    server = serve(model)
    engine, prefills = server._books.engine, []
    real = engine.prefill

    def prefill(*args: Any) -> Any:
        prefills.append(1)
        if len(prefills) == 1:
            raise MemoryError("no room for activations")
        return real(*args)

    engine.prefill = prefill  # type: ignore[method-assign]
    with server:
        check(model, server, {"question 1?": server.submit("question 1?")})
    assert server.metrics.counts["retried"] == 1


def test_a_hanging_iteration_is_given_up(model: kr.ReuseModel) -> None:
    server = serve(model, iteration_timeout_s=0.2)
    engine, release, calls = server._books.engine, threading.Event(), []
    real = engine.prefill

    def prefill(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            release.wait(WAIT_S)  # the second thread waits for it: two must not run one model
        return real(*args)

    engine.prefill = prefill  # type: ignore[method-assign]
    with server:
        futures = {q: server.submit(q) for q in questions(3)}
        time.sleep(0.5)
        release.set()
        check(model, server, futures)
    assert server.metrics.counts["model_thread_replaced"] >= 1


def test_failing_and_hanging_searches_are_done_again(model: kr.ReuseModel) -> None:
    retriever = Staged()
    seen: list[str] = []
    release = threading.Event()

    def hook(question: str) -> None:
        seen.append(question)
        if question == "question 2?" and seen.count(question) == 1:
            raise OSError("the index is away")
        if question == "question 3?" and seen.count(question) == 1:
            release.wait(WAIT_S)

    retriever.hook = hook
    with serve(model, retriever, retrieval_timeout_s=0.2) as server:
        check(model, server, {q: server.submit(q) for q in questions(6)})
    release.set()
    assert server.metrics.counts["retrieval_thread_replaced"] == 2


def test_what_fails_always_is_answered_with_its_error(model: kr.ReuseModel) -> None:
    retriever = Staged()

    def hook(question: str) -> None:
        if question == "question 0?":
            raise OSError("the index is away")

    retriever.hook = hook
    with serve(model, retriever, max_attempts=2) as server:
        futures = {q: server.submit(q) for q in questions(4)}
        with pytest.raises(OSError, match="index is away"):
            futures.pop("question 0?").result(WAIT_S)
        long = server.submit("why " * 200)
        with pytest.raises(kr.PromptTooLongError, match="takes 512"):
            long.result(WAIT_S)
        check(model, server, futures)
    assert server.metrics.counts["failed"] == 2


def test_deadline(model: kr.ReuseModel) -> None:
    retriever, release = Staged(), threading.Event()
    retriever.hook = lambda question: release.wait(WAIT_S) and None
    with serve(model, retriever, deadline_s=0.2) as server:
        with pytest.raises(TimeoutError, match="request 0 was not answered in 0.2 s"):
            server.submit("question 0?").result(WAIT_S)
        release.set()
    server.tree.check_integrity()


def test_a_closed_server_fails_what_is_open(model: kr.ReuseModel) -> None:
    retriever, release = Staged(), threading.Event()
    retriever.hook = lambda question: release.wait(WAIT_S) and None
    server = serve(model, retriever).start()
    future = server.submit("question 0?")
    threading.Timer(0.2, release.set).start()
    server.close()
    with pytest.raises(RuntimeError, match="closed before"):
        future.result(WAIT_S)


def test_a_closed_server_leaves_its_tree_alone(model: kr.ReuseModel) -> None:
    server = serve(model)
    tree, backend = server.tree, server._books.controller.tree.backend
    with server:
        server.answer("question 0?")
    server.close()  # a second time
    assert not tree._listeners
    assert tree.backend is not backend
    for use in (lambda: server.submit("question 1?"), server.start):
        with pytest.raises(RuntimeError, match="server is closed"):
            use()
    corpus = Corpus(model, TEXTS, system="Answer.")
    with RagServer(model, corpus, Staged(), server.cache, ServerOptions(max_new_tokens=6)) as second:
        assert len(tree._listeners) == 1
        assert second.answer("question 0?").request.cached_documents == 2
        check(model, second, {"question 1?": second.submit("question 1?")})
    assert isinstance(tree.backend, TensorBackend)


def test_replicas_are_renewed_by_answers_however_they_fall(model: kr.ReuseModel) -> None:
    """Two requests that are prefilled before either is answered, then one more; its books alone, without threads."""
    server, calls = serve(model, replicas=50_000, replicate_every=2), []
    real, books = server.tree.replicate, server._books
    server.tree.replicate = lambda size: calls.append(size) or real(size)  # type: ignore[func-returns-value, method-assign]
    for group in (questions(2), ["question 9?"]):
        for question in group:
            request_id, _ = books.submit(question, books.corpus.question_ids(question), 6)
            books.final(request_id, tuple(books.corpus.document(n) for n in Staged.final(question)))
        while (work := books.plan()) is not None:
            work.record(work.compute())
    assert len(server.metrics.requests) == 3
    assert calls == [50_000]


def test_a_fault_of_the_books_stops_the_server(model: kr.ReuseModel) -> None:
    server = serve(model)
    server._books.controller.final = lambda *_: 1 / 0  # type: ignore[assignment, method-assign]
    with server:
        with pytest.raises(ZeroDivisionError):
            server.submit("question 0?").result(WAIT_S)
        with pytest.raises(RuntimeError, match="error of its own"):
            server.submit("question 1?")


def test_no_thread_is_left(model: kr.ReuseModel) -> None:
    before = threading.active_count()
    with serve(model) as server:
        server.answer("question 0?")
    assert threading.active_count() == before


def test_bad_input(model: kr.ReuseModel) -> None:
    server = serve(model)
    with pytest.raises(ValueError, match="question is empty"):
        server.submit(" ")
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        server.submit("why?", max_new_tokens=0)
    with pytest.raises(ValueError, match="max_batch=0"):
        ServerOptions(max_batch=0)
    with pytest.raises(ValueError, match="deadline_s=0"):
        ServerOptions(deadline_s=0)
    with pytest.raises(ValueError, match="another system prompt"):
        RagServer(model, Corpus(model, TEXTS, system="Other."), Staged(), server.cache)
    with pytest.raises(ValueError, match="document 1 is empty"):
        Corpus(model, ["a", " "])
    with pytest.raises(ValueError, match="no place for the"):
        Corpus(model, ["a"], instruction="Question:")
