"""`KVStore`: chunk K/V by content-addressed key (CacheBlend, 5; rules in docs/design.md)."""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from kvreuse.kv import ChunkKV
from kvreuse.store.tiers import MemoryTier, parse_bytes


@dataclass(frozen=True)
class StoreStats:
    """Counts since the store was made, and what it holds now."""

    entries: int
    num_bytes: int
    capacity_bytes: int
    hits: int
    misses: int
    evictions: int


class KVStore:
    """Keeps chunk K/V between requests; least recently used entries make room. Safe to share between threads.

    Args:
        memory: capacity in main memory, like "2GiB" or a number of bytes.
        disk, disk_capacity: the disk tier's folder and limit; this version does not have it yet, leave them None.

    An entry larger than the capacity is not kept: one warning, and the request is served without it.
    """

    def __init__(
        self, memory: str | int = "2GiB", disk: str | Path | None = None, disk_capacity: str | int | None = None
    ) -> None:
        if disk is None and disk_capacity is not None:
            raise ValueError(f"disk_capacity={disk_capacity!r} without disk=: there is no disk tier to limit")
        if disk is not None:
            raise ValueError(
                f"disk={str(disk)!r}: this version keeps K/V in memory only; leave disk=None and give memory= more room"
            )
        self._memory = MemoryTier(parse_bytes(memory))
        self._lock = threading.Lock()
        self._hits = self._misses = 0
        self._warned = False

    def get(self, key: str, ids: torch.Tensor) -> ChunkKV | None:
        """The entry under ``key`` if it was computed for exactly the token ids ``ids`` [T], else None (a miss)."""
        with self._lock:
            entry = self._memory.get(key)
            if entry is not None and not torch.equal(entry.ids, ids):
                self._memory.delete(key)
                entry = None
            self._hits += entry is not None
            self._misses += entry is None
            return entry

    def put(self, key: str, entry: ChunkKV) -> bool:
        """Keep an entry (in main memory, whatever device it comes from). False if it does not fit."""
        entry = entry.to("cpu")
        with self._lock:
            kept = self._memory.put(key, entry)
            warn, self._warned = not kept and not self._warned, self._warned or not kept
        if warn:
            warnings.warn(
                f"a chunk's K/V take {entry.num_bytes:,} bytes, the store holds {self._memory.capacity_bytes:,}: it "
                "is not kept and will be recomputed; give KVStore(memory=...) more room",
                stacklevel=2,
            )
        return kept

    def delete(self, key: str) -> bool:
        """Drop one entry; False if there is none."""
        with self._lock:
            return self._memory.delete(key)

    def clear(self) -> None:
        """Drop all entries."""
        with self._lock:
            for key in self._memory.all_keys():
                self._memory.delete(key)

    def __contains__(self, key: str) -> bool:
        with self._lock:
            return key in self._memory

    def __len__(self) -> int:
        with self._lock:
            return len(self._memory)

    def stats(self) -> StoreStats:
        """Entries, bytes, hits, misses, evictions."""
        with self._lock:
            tier = self._memory
            return StoreStats(len(tier), tier.num_bytes, tier.capacity_bytes, self._hits, self._misses, tier.evictions)

    def __repr__(self) -> str:
        s = self.stats()
        return f"KVStore({s.entries} entries, {s.num_bytes:,} of {s.capacity_bytes:,} bytes)"
