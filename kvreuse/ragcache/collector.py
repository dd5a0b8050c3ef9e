"""Python's garbage collector between iterations, so that no scheduling step waits for it."""

from __future__ import annotations

import gc

YOUNG = 20_000  # objects that have come and not gone; Python's own rule is 700, in the middle of whatever runs
FULL = 100  # a full collection behind so many of young objects


class Collector:
    """Collects when it is told to, until `stop`; for the whole process.

    A full collection looks at every object there is: a tenth of a second and more with a large tree, in whatever step
    happens to make one object too many. From `start` on, what is there (libraries, model, corpus) is never looked at
    again, and collections run in `between` only. Memory of objects that do not refer to each other in a circle, such
    as K/V, is freed at once with or without a collector.
    """

    def __init__(self) -> None:
        self._was_enabled = False
        self._running = False
        self._rounds = 0

    def start(self) -> None:
        """Collect once, set aside what is left, and switch automatic collection off. Nothing if that is so already."""
        if self._running:
            return
        self._running = True
        self._was_enabled = gc.isenabled()
        gc.collect()
        gc.freeze()
        gc.disable()

    def between(self) -> None:
        """Collect if enough has come together; nothing unless started."""
        if not self._running or gc.get_count()[0] < YOUNG:
            return
        self._rounds += 1
        gc.collect(2 if self._rounds % FULL == 0 else 1)

    def stop(self) -> None:
        """As it was before `start`; nothing if it was not started, or is stopped."""
        if not self._running:
            return
        self._running = False
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()
