"""`KVStore`: chunk K/V by content-addressed key, in memory and on disk (CacheBlend, 5; rules in docs/design.md)."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from kvreuse.kv import ChunkKV, StoredKV
from kvreuse.store.codec import KVDtype, PackedKV, codec_for
from kvreuse.store.devices import StorageDevice, list_devices
from kvreuse.store.disk import DiskTier
from kvreuse.store.disk_entry import DiskEntry
from kvreuse.store.tiers import MemoryEntry, MemoryTier, parse_bytes
from kvreuse.store.writer import BackgroundWriter


@dataclass(frozen=True)
class TierStats:
    """What one tier holds, and how many entries made room since the store was opened."""

    name: str
    entries: int
    num_bytes: int
    capacity_bytes: int
    evictions: int


@dataclass(frozen=True)
class StoreStats:
    """Counts since the store was opened, and what it holds now: in all (``entries`` counts a chunk once), per tier."""

    entries: int
    num_bytes: int
    capacity_bytes: int
    hits: int
    misses: int
    evictions: int
    tiers: tuple[TierStats, ...]


class KVStore:
    """Keeps chunk K/V between requests; in every tier the least recently used make room. Safe to share between threads.

    Args:
        memory: capacity in main memory, like "2GiB" or a number of bytes; None keeps nothing there.
        disk: a folder, a `StorageDevice`, or a list of them, fastest first. Processes may share a folder; POSIX only.
        disk_capacity: most bytes on disk, where ``disk`` is a folder; "50GiB" by default.
        kv_dtype: "bf16", "int8" or "int4" compress what is kept; None keeps it exact.
        write: ``through``: an entry is on disk when `put` returns. ``back``: a background thread writes it; `flush`
            and `close` wait for it, as does the end of the program.
        promote: keep in memory what was read from disk.
        pin_memory: keep the main memory's entries page-locked, for models on a GPU, which copies layers from there
            directly and beside its work. PyTorch takes such memory in powers of two: up to twice the capacity.

    A device that is full, read-only or damaged, an entry too large: one warning, and requests are served without.
    """

    def __init__(
        self,
        memory: str | int | None = "2GiB",
        disk: str | Path | StorageDevice | Sequence[str | Path | StorageDevice] | None = None,
        disk_capacity: str | int | None = None,
        *,
        kv_dtype: KVDtype | None = None,
        write: Literal["through", "back"] = "through",
        promote: bool = True,
        pin_memory: bool = False,
    ) -> None:
        if write not in ("through", "back"):
            raise ValueError(f"write={write!r}: choose 'through' or 'back'")
        devices = list_devices(disk, disk_capacity)
        if memory is None and not devices:
            raise ValueError("memory=None without disk=: the store has nowhere to keep anything")
        if pin_memory and not torch.cuda.is_available():
            raise ValueError("pin_memory=True: page-locked memory is for a CUDA GPU, and there is none: leave it out")
        if pin_memory and kv_dtype is not None:
            raise ValueError(f"pin_memory=True with kv_dtype={kv_dtype!r}: the compressed is unpacked on the CPU first")
        self._pin_memory = pin_memory
        self._codec, self._write_back = codec_for(kv_dtype), write == "back"
        self.kv_dtype = kv_dtype
        self._memory = MemoryTier(parse_bytes(memory)) if memory is not None else None
        self._disks = {device.name: DiskTier(device, self._codec) for device in devices}
        self.promotes = promote and self._memory is not None
        self._writer = BackgroundWriter()
        self._finalizer = weakref.finalize(self, self._writer.flush)
        self._lock = threading.Lock()
        self._owner: dict[str, str] = {}  # model by key, of what this store has put or got
        self._hits = self._misses = 0
        self._warned = False

    @property
    def devices(self) -> tuple[StorageDevice, ...]:
        """The disks, in the order in which they are searched."""
        return tuple(tier.device for tier in self._disks.values())

    def get(self, key: str, ids: torch.Tensor, model: str = "") -> StoredKV | None:
        """The entry under ``key`` if it was computed for exactly the token ids ``ids`` [T], else None (a miss).

        An entry on disk is opened, not read, and leased until it is closed; ``model``: the fingerprint it was put with.
        """
        found: StoredKV | None = None
        with self._lock:
            if self._memory is not None:
                held = self._memory.get(key)
                if held is not None and not torch.equal(held.ids, ids):
                    self._memory.delete(key)
                    held = None
                found = held
        if found is None:
            pending = self._writer.get(key)
            found = pending if pending is not None and torch.equal(pending.ids, ids) else None
        for tier in self._disks.values():
            found = found or tier.open(key, ids, model)
        with self._lock:
            self._hits += found is not None
            self._misses += found is None
            if found is not None:
                self._owner[key] = model
        return found

    def put(self, key: str, entry: ChunkKV, model: str = "", device: str | None = None) -> bool:
        """Keep an entry (on the CPU, whatever device it comes from). False if no tier keeps it.

        ``model``: the fingerprint, by which `clear` finds it again. ``device``: the name of the disk to write to; the
        first by default.
        """
        tier = self._tier(device)
        entry = entry.to("cpu")
        packed = PackedKV.of(entry, self._codec) if tier is not None or self.kv_dtype else None
        kept = self._remember(key, packed if packed is not None and self.kv_dtype else entry)
        if tier is not None:
            assert packed is not None
            kept = self._to_disk(tier, key, packed, model) or kept
        with self._lock:
            if kept:
                self._owner[key] = model
            warn = not kept and not self._warned and tier is None
            self._warned |= warn
        if warn:
            warnings.warn(
                f"a chunk's K/V take {entry.num_bytes:,} bytes and do not fit into {self!r}: it is not kept and will "
                "be recomputed; give KVStore(memory=...) more room",
                stacklevel=2,
            )
        return kept

    def _tier(self, device: str | None) -> DiskTier | None:
        if device is None:
            return next(iter(self._disks.values()), None)
        if device not in self._disks:
            raise ValueError(f"device={device!r}: this store has {', '.join(self._disks) or 'no disk'}")
        return self._disks[device]

    def _remember(self, key: str, entry: MemoryEntry) -> bool:
        if self._pin_memory and isinstance(entry, ChunkKV):
            entry = entry.pinned()
        with self._lock:
            return self._memory is not None and self._memory.put(key, entry)

    def _to_disk(self, tier: DiskTier, key: str, packed: PackedKV, model: str) -> bool:
        if not self._write_back:
            return tier.put(key, packed, model)
        self._writer.submit(key, packed, lambda: tier.put(key, packed, model))
        return True

    def promote(self, key: str, entry: StoredKV, layers: dict[int, list[torch.Tensor]] | None = None) -> None:
        """Keep in memory what was read from disk. ``layers``: packed tensors already read. Raises LostEntryError."""
        if self.promotes and isinstance(entry, DiskEntry):
            packed = entry.packed(layers)
            self._remember(key, packed if self.kv_dtype else packed.load())

    def pin(self, key: str, pinned: bool = True) -> bool:
        """Keep an entry from eviction, or let it go again (``pinned=False``); False if there is none."""
        with self._lock:
            in_memory = self._memory is not None and key in self._memory
            if in_memory and self._memory is not None:
                (self._memory.pinned.add if pinned else self._memory.pinned.discard)(key)
        return any([in_memory, *(tier.pin(key, pinned) for tier in self._disks.values())])

    def delete(self, key: str) -> bool:
        """Drop one entry everywhere; False if there is none."""
        found = self._writer.cancel(key)
        with self._lock:
            found = (self._memory is not None and self._memory.delete(key)) or found
            self._owner.pop(key, None)
        return any([found, *(tier.delete(key) for tier in self._disks.values())])

    def delete_chunk(self, ids: torch.Tensor) -> int:
        """Drop what was computed for these token ids, of every model and context; files and entries dropped."""
        self.flush()
        with self._lock:
            memory = self._memory
            same = [k for k, e in memory.items() if torch.equal(e.ids, ids)] if memory is not None else []
        return sum(map(self.delete, same)) + sum(tier.delete_chunk(ids) for tier in self._disks.values())

    def clear(self, model: str | None = None) -> None:
        """Drop a model's entries, on disk too; by default those of the models that this store has served.

        ``model``: a fingerprint (`ReuseModel.fingerprint`). Other models' entries in the same folders stay.
        """
        self.flush()
        with self._lock:
            models = {model} if model is not None else set(self._owner.values())
            own = [key for key, owner in self._owner.items() if owner in models]
            for key in own:
                del self._owner[key]
                if self._memory is not None:
                    self._memory.delete(key)
        for tier in self._disks.values():
            for name in models:
                tier.delete_model(name)

    def flush(self) -> None:
        """Wait until everything put is on disk."""
        self._writer.flush()

    def close(self) -> None:
        """Flush; the store may be used again."""
        self.flush()

    def __enter__(self) -> KVStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __contains__(self, key: str) -> bool:
        with self._lock:
            if self._memory is not None and key in self._memory:
                return True
        return self._writer.get(key) is not None or any(key in tier for tier in self._disks.values())

    def __len__(self) -> int:
        return self.stats().entries

    def stats(self) -> StoreStats:
        """Entries, bytes, hits, misses, evictions; per tier too."""
        with self._lock:
            memory = self._memory
            tiers = [] if memory is None else [_stats("memory", memory)]
            keys: set[str] = set() if memory is None else set(memory.all_keys())
            hits, misses = self._hits, self._misses
        keys |= self._writer.keys()
        names: set[str] = set()
        for tier in self._disks.values():
            tiers.append(_stats(tier.device.label, tier))
            names |= tier.names()
        if self._disks:
            name_of = next(iter(self._disks.values())).name
            names |= {name_of(key) for key in keys}
        total = [sum(getattr(t, what) for t in tiers) for what in ("num_bytes", "capacity_bytes", "evictions")]
        return StoreStats(len(names or keys), total[0], total[1], hits, misses, total[2], tuple(tiers))

    def __repr__(self) -> str:
        s = self.stats()
        return f"KVStore({s.entries} entries, {s.num_bytes:,} of {s.capacity_bytes:,} bytes)"


def _stats(name: str, tier: MemoryTier | DiskTier) -> TierStats:
    return TierStats(name, len(tier), tier.num_bytes, tier.capacity_bytes, tier.evictions)
