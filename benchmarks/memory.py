"""This process's memory over time: what is in RAM, and what of it the program holds."""

from __future__ import annotations

import ctypes
import os
import statistics
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np


class _Info(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [*((name, ctypes.c_size_t) for name in _names)]


def resident_mib() -> float:
    """Memory of this process that is in RAM, MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def held_mib() -> float:
    """What the program has of glibc's malloc (tensors, mostly), MiB; NaN with another C library.

    The rest of the resident memory is Python's small objects, code, and what is free inside the heaps but not given
    back: a leak shows here, fragmentation does not.
    """
    try:
        mallinfo = ctypes.CDLL("libc.so.6").mallinfo2
    except (OSError, AttributeError):
        return float("nan")
    mallinfo.restype = _Info
    info = mallinfo()
    return float(info.uordblks + info.hblkhd) / 2**20


def trim() -> None:
    """Have glibc give back what is free, wherever it lies; nothing with another C library."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


class Sample(NamedTuple):
    """Seconds since the start, and MiB."""

    at_s: float
    resident: float
    held: float


class MemorySampler(threading.Thread):
    """Samples every few seconds, until `stop`."""

    def __init__(self, interval_s: float = 2.0) -> None:
        super().__init__(daemon=True)
        self.samples: list[Sample] = []
        self._interval_s, self._done = interval_s, threading.Event()
        self._since = time.monotonic()

    def run(self) -> None:
        """Until `stop`."""
        while not self._done.wait(self._interval_s):
            self.samples.append(Sample(time.monotonic() - self._since, resident_mib(), held_mib()))

    def stop(self) -> None:
        """End sampling."""
        self._done.set()
        self.join()

    def summary(self) -> dict[str, object]:
        """Means by quarter of the time, and the slopes of the second half, MiB per minute."""
        size = max(1, len(self.samples) // 4)
        quarters = [part for i in range(4) if (part := self.samples[i * size : (i + 1) * size])]
        late = np.array(self.samples[len(self.samples) // 2 :])
        out: dict[str, object] = {}
        for column, name in ((1, "resident"), (2, "held")):
            out[f"{name}_mib_by_quarter"] = [round(statistics.fmean(s[column] for s in q), 1) for q in quarters]
            if len(late) > 1:
                out[f"{name}_mib_per_minute_late"] = round(60 * float(np.polyfit(late[:, 0], late[:, column], 1)[0]), 3)
        return out
