"""`RagServer`: questions in, answers out (RAGCache, figure 7 and section 6).

A thin shell of threads: what is decided is decided by the `Controller`, computed by the `Engine`, recorded by `Books`.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch

from kvreuse.ragcache.bookkeeping import Books
from kvreuse.ragcache.collector import Collector
from kvreuse.ragcache.controller import Controller
from kvreuse.ragcache.corpus import Corpus, Retrieves
from kvreuse.ragcache.engine import Engine, TimedBackend
from kvreuse.ragcache.kv import TreeCache
from kvreuse.ragcache.server_threads import ModelThread, RetrievalThread
from kvreuse.ragcache.serving_metrics import ServingMetrics
from kvreuse.ragcache.serving_types import ServedAnswer, ServerOptions
from kvreuse.ragcache.speculative import Speculator
from kvreuse.ragcache.worker import Watcher

if TYPE_CHECKING:
    from kvreuse.model import ReuseModel


class RagServer:
    """Answers questions over a corpus, reusing document K/V through a knowledge tree.

    Use as a context manager, or call `start` and `close`. Prefills run one by one: they use the whole machine, and
    batching long ones gains nothing. Sequences decode as one batch (`DecodeBatch`). A prefill goes before a decode
    step.

    Args:
        model: nobody else may run or change it while the server does.
        corpus: documents and prompts.
        retriever: staged search over the same documents.
        cache: the tree; one of default sizes if None. Give it a `CostProfiler` of this model.
        options: see `ServerOptions`.
    """

    def __init__(
        self,
        model: ReuseModel,
        corpus: Corpus,
        retriever: Retrieves,
        cache: TreeCache | None = None,
        options: ServerOptions | None = None,
    ) -> None:
        self.options = options or ServerOptions()
        self.cache = cache if cache is not None else TreeCache(model, corpus.prefix)
        if self.cache.model is not model or not torch.equal(self.cache.prefix, corpus.prefix):
            raise ValueError("cache was made for another model or another system prompt than model and corpus")
        engine = Engine(self.cache, self.options.max_batch)
        self.tree = self.cache.tree
        self._backend = self.tree.backend  # the tree's own, which it gets back when the server is closed
        self._timed_backend = self.tree.backend = TimedBackend(self._backend, engine.moving)
        speculator = Speculator(self.options.max_prefill_batch, self.options.speculate)
        controller = Controller(self.tree, speculator, self.options.window)
        self._corpus = corpus
        self._closed = False
        self._books = Books(corpus, controller, engine, self.options, self.now)
        self._lock = threading.RLock()  # held for all but computing and searching
        self._collector = Collector() if self.options.collect_between else None
        self._model_thread = ModelThread(self._books, self._lock, self.options.iteration_timeout_s, self._collector)
        self._retrieval_thread = RetrievalThread(
            self._books, self._lock, self.options.retrieval_timeout_s, retriever, self._model_thread
        )
        workers = (self._retrieval_thread, self._model_thread)
        self._watcher = Watcher(workers, self._lock, self.now, self._fail_late)

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> RagServer:
        """Start the threads. If one cannot be started, the others are stopped again."""
        self._check_open()
        try:
            if self._collector is not None:
                self._collector.start()
            for thread in (self._model_thread, self._retrieval_thread, self._watcher):
                thread.start()
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Stop the threads; requests that are not answered fail. The tree goes on without this server.

        What is closed stays closed; make another server, over the same cache if you like.
        """
        for thread in (self._watcher, self._retrieval_thread, self._model_thread):
            thread.stop()
        if self._collector is not None:
            self._collector.stop()
        with self._lock:
            for request_id in list(self._books.jobs):
                self._books.fail(request_id, RuntimeError("the server was closed before the request was answered"))
            if not self._closed:
                self._closed = True
                self._books.controller.queue.close()
                if self.tree.backend is self._timed_backend:  # not where a later server's stands over it
                    self.tree.backend = self._backend

    def __enter__(self) -> RagServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- use ----------------------------------------------------------------------------------------------------------

    def submit(self, question: str, max_new_tokens: int | None = None) -> Future[ServedAnswer]:
        """Hand in a question; the future gets its answer, or the error it failed with.

        Raises:
            ValueError: for an empty question or a number of tokens below 1.
            RuntimeError: the server is closed, or has stopped after a fault of its own.
        """
        limit = self.options.max_new_tokens if max_new_tokens is None else max_new_tokens
        if limit < 1:
            raise ValueError(f"max_new_tokens={limit}: ask for at least one token")
        ids = self._corpus.question_ids(question)
        with self._lock:
            self._check_open()
            request_id, future = self._books.submit(question, ids, limit)
        self._retrieval_thread.put(request_id, question)
        return future

    def answer(self, question: str, max_new_tokens: int | None = None) -> ServedAnswer:
        """`submit`, and wait."""
        return self.submit(question, max_new_tokens).result()

    @property
    def metrics(self) -> ServingMetrics:
        """What has been answered so far, and how."""
        return self._books.metrics

    @staticmethod
    def now() -> float:
        """The clock of all times in requests and metrics, in seconds."""
        return time.monotonic()

    # -- faults, to exercise recovery ---------------------------------------------------------------------------------

    def lose_gpu(self) -> None:
        """As if the GPU's memory were gone: behind the current iteration all K/V without a copy on host are."""
        self._model_thread.post(self._books.lose_gpu)

    def kill_model_thread(self) -> None:
        """Have the model's thread die in its next iteration, when its work is computed and not yet recorded."""
        self._model_thread.die = True

    # -- inside -------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the server is closed: make another one, over the same cache if you like")

    def _fail_late(self) -> None:
        """Requests past their deadline."""
        late = self.now() - self.options.deadline_s
        for request in list(self._books.controller.open.values()):
            if request.arrived_s < late:
                message = f"request {request.id} was not answered in {self.options.deadline_s} s"
                self._books.fail(request.id, TimeoutError(message))
