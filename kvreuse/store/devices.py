"""Storage devices: a folder, what it may hold, what it costs, and a brake that makes it stand for a slower one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvreuse.store.tiers import parse_bytes


@dataclass(frozen=True)
class StorageDevice:
    """A folder on a disk that keeps chunk K/V.

    Args:
        folder: made if it is not there. Several processes may share it.
        capacity: most bytes kept there, like "50GiB".
        name: for labels and for `KVStore.put(device=...)`; the folder by default.
        price_per_gb_month: what keeping a gigabyte there for a month costs; `LoadingController` picks the cheapest.
        throttle_bytes_per_s: brake reads to this rate (a token bucket on real reads), to stand for a slower device.
            Results carry it in the label.
        cold: drop a file's pages from the page cache before it is read, so that every read reaches the device.
        readers: threads that read from it at the same time.
    """

    folder: str | Path
    capacity: str | int = "50GiB"
    name: str = ""
    price_per_gb_month: float = 0.0
    throttle_bytes_per_s: float | None = None
    cold: bool = False
    readers: int = 2

    def __post_init__(self) -> None:
        parse_bytes(self.capacity)
        if self.throttle_bytes_per_s is not None and not self.throttle_bytes_per_s > 0:
            raise ValueError(f"throttle_bytes_per_s={self.throttle_bytes_per_s!r}: give a rate above 0, or None")
        if self.price_per_gb_month < 0:
            raise ValueError(f"price_per_gb_month={self.price_per_gb_month!r}: a price is 0 or more")
        if self.readers < 1:
            raise ValueError(f"readers={self.readers!r}: a device needs at least one reader thread")
        if not self.name:
            object.__setattr__(self, "name", str(self.folder))

    @property
    def label(self) -> str:
        """Name and how it was read; what was throttled says so."""
        how = ["cold"] * self.cold
        if self.throttle_bytes_per_s is not None:
            how.append(f"throttled to {self.throttle_bytes_per_s * 8 / 1e9:.3g} Gbps")
        return f"{self.name} ({', '.join(how)})" if how else self.name


class Throttle:
    """A token bucket shared by all readers of a device: ``n`` bytes take at least ``n / rate`` seconds."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._rate = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def start(self) -> float:
        """When a read begins."""
        return time.perf_counter()

    def pay(self, num_bytes: int, started: float) -> None:
        """Wait until a read of ``num_bytes`` that began at ``started`` may end."""
        if self._rate is None:
            return
        with self._lock:
            self._free_at = max(self._free_at, started) + num_bytes / self._rate
            wait = self._free_at - time.perf_counter()
        if wait > 0:
            time.sleep(wait)


def list_devices(disk: object, capacity: str | int | None) -> list[StorageDevice]:
    """What `KVStore` was given as ``disk`` and ``disk_capacity``, as a list."""
    if disk is None:
        if capacity is not None:
            raise ValueError(f"disk_capacity={capacity!r} without disk=: there is no disk tier to limit")
        return []
    listed = list(disk) if isinstance(disk, Iterable) and not isinstance(disk, str) else [disk]
    devices = []
    for one in listed:
        if isinstance(one, StorageDevice):
            devices.append(one)
        elif isinstance(one, str | Path):
            devices.append(StorageDevice(one, capacity if capacity is not None else "50GiB"))
        else:
            raise TypeError(f"disk={one!r}: give a folder, a kr.StorageDevice, or a list of them")
    if capacity is not None and any(isinstance(one, StorageDevice) for one in listed):
        raise ValueError(f"disk_capacity={capacity!r} beside a StorageDevice: give each its own capacity=")
    names = [device.name for device in devices]
    if len(set(names)) < len(names):
        raise ValueError(f"disk={names}: give every device a name of its own")
    return devices
