"""Write-back: entries wait in memory while one background thread writes them to disk."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from kvreuse.store.codec import PackedKV

_Write = Callable[[], object]


class BackgroundWriter:
    """Writes entries in order. `submit` waits while more than ``limit_bytes`` are pending, so memory stays bounded."""

    def __init__(self, limit_bytes: int = 1 << 30) -> None:
        self._limit_bytes, self._num_bytes = limit_bytes, 0
        self._pending: OrderedDict[str, tuple[PackedKV, _Write]] = OrderedDict()
        self._changed = threading.Condition()
        self._writing: str | None = None
        self._thread: threading.Thread | None = None

    def submit(self, key: str, entry: PackedKV, write: _Write) -> None:
        """Have ``write()`` called later; until then `get` has the entry. A newer entry of a key replaces it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pending or self._num_bytes + entry.num_bytes <= self._limit_bytes)
            self._drop(key)
            self._pending[key] = entry, write
            self._num_bytes += entry.num_bytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvreuse-writer", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def get(self, key: str) -> PackedKV | None:
        """An entry that is not on disk yet."""
        with self._changed:
            return self._pending[key][0] if key in self._pending else None

    def keys(self) -> set[str]:
        """What is not on disk yet."""
        with self._changed:
            return set(self._pending)

    def cancel(self, key: str) -> bool:
        """Forget a pending entry; waits if it is being written just now. False if there was none."""
        with self._changed:
            self._changed.wait_for(lambda: self._writing != key)
            return self._drop(key)

    def flush(self) -> None:
        """Wait until everything is written; the thread ends."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pending)
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _drop(self, key: str) -> bool:
        entry = self._pending.pop(key, None)
        if entry is not None:
            self._num_bytes -= entry[0].num_bytes
        return entry is not None

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._pending:
                    self._thread = None
                    return
                key, (entry, write) = next(iter(self._pending.items()))
                self._writing = key
            try:
                write()
            finally:
                with self._changed:
                    self._writing = None
                    if key in self._pending and self._pending[key][0] is entry:
                        self._drop(key)
                    self._changed.notify_all()
