"""A thread that may die or hang, and the watcher that replaces it.

A thread cannot be killed from outside. One that hangs is given up: its epoch is over, a new thread takes its place, and
if it ever returns it finds so before it records anything.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from kvreuse.ragcache.bookkeeping import Books

log = logging.getLogger(__name__)


class Superseded(Exception):
    """Another thread has taken this one's place."""


class Worker(ABC):
    """A thread that iterates. ``busy_with``: requests of the running iteration; ``busy_since``: when it started.

    Args:
        books: the server's, used under ``lock``.
        timeout_s: how long an iteration may take.
    """

    name = "worker"

    def __init__(self, books: Books, lock: threading.RLock, timeout_s: float) -> None:
        self.books, self.lock, self.timeout_s = books, lock, timeout_s
        self.epoch = 0
        self.busy_with: list[int] = []
        self.busy_since: float | None = None
        self.error: BaseException | None = None
        self.stopping = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    @abstractmethod
    def iterate(self, epoch: int) -> bool:
        """One iteration; False if there was nothing to do."""

    @abstractmethod
    def recover(self, request_ids: list[int], error: BaseException) -> None:
        """Under the lock: put right what a lost iteration has left."""

    def start(self) -> None:
        """Start the thread of the current epoch."""
        self._thread = threading.Thread(target=self._main, args=(self.epoch,), name=self.name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread behind its current iteration."""
        self.stopping = True
        self._wake.set()
        thread = self._thread
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join(timeout=30)

    def wake(self) -> None:
        """There is something to do."""
        self._wake.set()

    def failure(self, now: float) -> BaseException | None:
        """What is wrong with its thread: dead, or its iteration overdue; None if nothing is."""
        if self.stopping or self._thread is None:
            return None
        if not self._thread.is_alive():
            return self.error or RuntimeError(f"the {self.name} thread died")
        if self.busy_since is not None and now - self.busy_since > self.timeout_s:
            return TimeoutError(f"a {self.name} iteration took longer than {self.timeout_s} s")
        return None

    def replace(self, error: BaseException) -> None:
        """Under the lock: a new epoch and a new thread; the lost iteration's requests are tried again, or failed."""
        self.books.metrics.counts[f"{self.name}_thread_replaced"] += 1
        log.warning("%s thread replaced: %r", self.name, error)
        self.epoch += 1
        lost, self.busy_with, self.busy_since, self.error = self.busy_with, [], None, None
        self.recover(lost, error)
        self.start()

    def check(self, epoch: int) -> None:
        """Raise in a thread whose time is over."""
        if epoch != self.epoch:
            raise Superseded

    def _main(self, epoch: int) -> None:
        try:
            while not self.stopping and epoch == self.epoch:
                self._wake.clear()
                if not self.iterate(epoch):
                    self._wake.wait(0.2)
        except Superseded:
            pass
        except BaseException as error:
            if epoch == self.epoch:
                self.error = error  # the watcher finds the thread dead, and why


class Watcher:
    """Replaces workers that died or hang, and calls ``also`` each time it looks. All under the lock."""

    def __init__(
        self,
        workers: Iterable[Worker],
        lock: threading.RLock,
        now: Callable[[], float],
        also: Callable[[], None],
        interval_s: float = 0.05,
    ) -> None:
        self._workers, self._lock, self._now, self._also = list(workers), lock, now, also
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main, name="watcher", daemon=True)

    def start(self) -> None:
        """Start to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    def _main(self) -> None:
        while not self._stop.wait(self._interval_s):
            with self._lock:
                for worker in self._workers:
                    error = worker.failure(self._now())
                    if error is not None:
                        worker.replace(error)
                self._also()
