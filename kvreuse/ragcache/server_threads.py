"""The server's two threads: one searches, one runs the model and alone keeps the books."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from kvreuse.ragcache.bookkeeping import Books
from kvreuse.ragcache.collector import Collector
from kvreuse.ragcache.corpus import Retrieves
from kvreuse.ragcache.planning import Iteration
from kvreuse.ragcache.speculative import Documents
from kvreuse.ragcache.worker import Superseded, Worker


class ThreadKilled(RuntimeError):
    """The thread was told to die."""


class ModelThread(Worker):
    """Decide, compute, record: what others have to say waits in its inbox until an iteration is over.

    Garbage is collected behind every iteration and while there is nothing to do, if a ``collector`` is given.
    """

    name = "model"

    def __init__(
        self, books: Books, lock: threading.RLock, timeout_s: float, collector: Collector | None = None
    ) -> None:
        super().__init__(books, lock, timeout_s)
        self._collector = collector
        self.die = False
        self._inbox: deque[Callable[[], None]] = deque()
        self._in_model = threading.Lock()  # a thread that was given up may still be there

    def post(self, event: Callable[[], None]) -> None:
        """Have something done between iterations."""
        self._inbox.append(event)
        self.wake()

    def iterate(self, epoch: int) -> bool:
        """One prefill or decode step, then garbage."""
        worked = self._iterate(epoch)
        if self._collector is not None:
            self._collector.between()
        return worked

    def _iterate(self, epoch: int) -> bool:
        with self.lock:
            self.check(epoch)
            work = self._keep_books(self._decide)
            if work is None:
                return False
            self.busy_with = work.request_ids
        with self._in_model:
            if epoch != self.epoch:
                raise Superseded
            self.busy_since = self.books.now()
            outcome = work.compute()
        with self.lock:
            self.check(epoch)
            if self.die:
                self.die = False
                raise ThreadKilled("told to die: this iteration's work is lost")
            self._keep_books(lambda: work.record(outcome))
            self.busy_with, self.busy_since = [], None
            self.books.end_step()
        return True

    def recover(self, request_ids: list[int], error: BaseException) -> None:
        """Computed again, or continued from stored K/V."""
        self.books.lost_thread(request_ids, error)

    def _decide(self) -> Iteration | None:
        while self._inbox:
            self._inbox.popleft()()
        return self.books.plan()

    def _keep_books(self, entry: Callable[[], Iteration | None]) -> Iteration | None:
        """An error here is no failed computation but a fault of the program: the server stops."""
        try:
            return entry()
        except BaseException as error:
            self.stopping = True
            self.books.broken(error)
            if self._collector is not None:  # this thread ends, and with it what collects between iterations
                self._collector.stop()
            raise


class RetrievalThread(Worker):
    """Searches for one question after the other and posts every stage to the model's thread."""

    name = "retrieval"

    def __init__(
        self, books: Books, lock: threading.RLock, timeout_s: float, retriever: Retrieves, inbox: ModelThread
    ) -> None:
        super().__init__(books, lock, timeout_s)
        self._retriever, self._inbox = retriever, inbox
        self._questions: deque[tuple[int, str]] = deque()

    def put(self, request_id: int, question: str) -> None:
        """Queue a search."""
        self._questions.append((request_id, question))
        self.wake()

    def iterate(self, epoch: int) -> bool:
        """One search; every stage's documents are posted as they come."""
        with self.lock:
            self.check(epoch)
            if not self._questions:
                return False
            request_id, question = self._questions.popleft()
            self.busy_with, self.busy_since = [request_id], self.books.now()

        def on_stage(found: Sequence[int]) -> None:
            if found:
                self._post(epoch, self.books.stage, request_id, found)

        found = self._retriever.search(question, on_stage)
        if not found:
            raise LookupError(f"the search for {question!r} found no document")
        with self.lock:
            self._post(epoch, self.books.final, request_id, found)
            self.busy_with, self.busy_since = [], None
        return True

    def recover(self, request_ids: list[int], error: BaseException) -> None:
        """Search again."""
        for request_id in self.books.retry_or_fail(request_ids, error):
            self._questions.appendleft((request_id, self.books.jobs[request_id].question))

    def _post(self, epoch: int, event: Callable[[int, Documents], None], request_id: int, found: Sequence[int]) -> None:
        documents = tuple(self.books.corpus.document(number) for number in found)
        with self.lock:
            self.check(epoch)
            self._inbox.post(lambda: event(request_id, documents))
