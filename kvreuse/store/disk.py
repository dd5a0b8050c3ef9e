"""The disk tier: one file per chunk, least recently used first out, shared by any number of processes."""

from __future__ import annotations

import hashlib
import os
import threading
import time
import warnings
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass

import torch

from kvreuse.store.codec import Codec, PackedKV
from kvreuse.store.devices import StorageDevice, Throttle
from kvreuse.store.disk_entry import DiskEntry
from kvreuse.store.folder import file_path, publish, scan_folder, written_aside
from kvreuse.store.format import BadFileError, read_header
from kvreuse.store.tiers import parse_bytes


@dataclass
class _Record:
    """What the index knows of a file; ``leases`` counts those who read it now."""

    path: str
    num_bytes: int
    leases: int = 0
    pinned: bool = False


class DiskTier:
    """Files ``folder / model / key.safetensors``, both names hashes. Safe to share between threads and processes.

    A file is written under a temporary name, synced, renamed, and its folder synced: a reader finds a whole file or
    none. Whoever reads a file holds it open, so no eviction, here or in another process, can take it away under them.
    Whatever goes wrong with the device is a miss and one warning.
    """

    def __init__(self, device: StorageDevice, codec: Codec) -> None:
        self.device, self.codec = device, codec
        self.capacity_bytes = parse_bytes(device.capacity)
        self.throttle = Throttle(device.throttle_bytes_per_s)
        self.num_bytes = self.evictions = 0
        self._folder = str(device.folder)
        self._index: OrderedDict[str, _Record] = OrderedDict()  # by hash of the key, least recently used first
        self._bad: set[str] = set()  # to be removed, but could not be
        self._warned: set[str] = set()
        self._lock = threading.RLock()
        self._next_scan = 0.0
        self.scan()

    # -- the index --------------------------------------------------------------------------------------------------

    def scan(self) -> None:
        """Rebuild the index from the folder: other processes write and evict there too."""
        with self._lock:
            started = time.perf_counter()
            try:
                os.makedirs(self._folder, exist_ok=True)
                found = scan_folder(self._folder)
            except OSError as error:
                self._warn("scan", f"cannot read the folder {self._folder} ({error.strerror}): its chunks are misses")
                found = []
            before, self._index = self._index, OrderedDict()
            for _, name, path, size in found:
                if name not in self._bad:
                    record = self._index[name] = before.get(name) or _Record(path, size)
                    record.path, record.num_bytes = path, size
            self.num_bytes = sum(record.num_bytes for record in self._index.values())
            now = time.perf_counter()
            self._next_scan = now + max(2.0, 20 * (now - started))

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, key: str) -> bool:
        return self.name(key) in self._index

    def names(self) -> set[str]:
        """`name` of every key."""
        with self._lock:
            return set(self._index)

    def name(self, key: str) -> str:
        """The file's name: entries of another layout are other files."""
        return hashlib.sha256(f"{self.codec.name}:{key}".encode()).hexdigest()

    # -- reading ----------------------------------------------------------------------------------------------------

    def open(self, key: str, ids: torch.Tensor, model: str) -> DiskEntry | None:
        """The entry for exactly these ids, leased until it is closed; None is a miss."""
        name = self.name(key)
        with self._lock:
            if name in self._bad:
                return None
            record = self._index.get(name)
            path = record.path if record is not None else file_path(self._folder, name, model)
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except OSError as error:
                if record is not None:
                    self._forget(name)
                    self._warn(name, f"{path} cannot be opened ({error.strerror}): its chunk is recomputed")
                return None
            if record is None:  # another process wrote it
                record = self._index[name] = _Record(path, os.fstat(descriptor).st_size)
                self.num_bytes += record.num_bytes
            record.leases += 1
            self._index.move_to_end(name)
        if self.device.cold and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        with suppress(OSError):
            os.utime(descriptor if os.utime in os.supports_fd else path)  # recency, for the next process
        try:
            header = read_header(descriptor, self.codec)
            if not torch.equal(header.ids, ids):
                raise BadFileError("it holds other token ids")
        except (OSError, BadFileError) as error:
            self.lose(name, descriptor, str(error))
            self.release(name, descriptor)
            return None
        return DiskEntry(self, name, descriptor, header)

    def lose(self, name: str, descriptor: int, reason: str) -> None:
        """Drop an entry that turned out bad, unless it has been written anew meanwhile."""
        with self._lock:
            record = self._index.get(name)
            with suppress(FileNotFoundError):
                if record is not None and os.stat(record.path).st_ino == os.fstat(descriptor).st_ino:
                    self._warn(name, f"{record.path} is damaged ({reason}): it is dropped and its chunk recomputed")
                    self._remove(name)

    def release(self, name: str, descriptor: int) -> None:
        """End a lease."""
        os.close(descriptor)
        with self._lock:
            record = self._index.get(name)
            if record is not None and record.leases:
                record.leases -= 1

    # -- writing ----------------------------------------------------------------------------------------------------

    def put(self, key: str, entry: PackedKV, model: str) -> bool:
        """Write an entry; evicts as needed. False, with one warning, if it cannot be kept."""
        name = self.name(key)
        path = file_path(self._folder, name, model)
        if entry.num_bytes > self.capacity_bytes:
            return self._refuse("capacity", f"a chunk's K/V take {entry.num_bytes:,} bytes, {self} is smaller")
        if time.perf_counter() > self._next_scan:
            self.scan()
        try:
            with written_aside(path, entry) as (temporary, size), self._lock:
                if not self._make_room(size, name):
                    return self._refuse("room", f"what {self} holds is pinned or being read")
                publish(temporary, path)
                old = self._forget(name)
                self._bad.discard(name)
                self._index[name] = _Record(path, size, pinned=old is not None and old.pinned)
                self.num_bytes += size
        except OSError as error:
            return self._refuse("write", f"cannot write to {self._folder} ({error.strerror})")
        return True

    def _make_room(self, size: int, name: str) -> bool:
        """Evict the least recently used until ``size`` fits in ``name``'s place; all or nothing."""
        old = self._index.get(name)
        excess = self.num_bytes - (old.num_bytes if old else 0) + size - self.capacity_bytes
        victims = []
        for other, record in self._index.items():
            if excess <= 0:
                break
            if other != name and not record.leases and not record.pinned:
                victims.append(other)
                excess -= record.num_bytes
        if excess > 0:
            return False
        for victim in victims:
            self._remove(victim)
        self.evictions += len(victims)
        return True

    def pin(self, key: str, pinned: bool = True) -> bool:
        """Keep an entry from eviction by this process, or let it go again; False if there is none."""
        with self._lock:
            record = self._index.get(self.name(key))
            if record is not None:
                record.pinned = pinned
            return record is not None

    def delete(self, key: str) -> bool:
        """Remove one entry; False if there is none."""
        with self._lock:
            return self._remove(self.name(key))

    def delete_chunk(self, ids: torch.Tensor) -> int:
        """Remove what was computed for these token ids by any model; reads every header."""
        with self._lock:
            return sum(self._remove(name) for name, record in list(self._index.items()) if self._holds(record, ids))

    def delete_model(self, model: str) -> int:
        """Remove all entries of one model."""
        folder = os.path.dirname(file_path(self._folder, "", model))
        self.scan()  # another process may have added some
        with self._lock:
            own = [name for name, record in self._index.items() if os.path.dirname(record.path) == folder]
            return sum(self._remove(name) for name in own)

    def _holds(self, record: _Record, ids: torch.Tensor) -> bool:
        with suppress(OSError, BadFileError):
            descriptor = os.open(record.path, os.O_RDONLY)
            try:
                return torch.equal(read_header(descriptor, self.codec).ids, ids)
            finally:
                os.close(descriptor)
        return False

    def _remove(self, name: str) -> bool:
        record = self._forget(name)
        if record is None:
            return False
        try:
            os.unlink(record.path)
        except FileNotFoundError:
            pass
        except OSError:  # a folder that is read-only: at least never read it again
            self._bad.add(name)
        return True

    def _forget(self, name: str) -> _Record | None:
        record = self._index.pop(name, None)
        if record is not None:
            self.num_bytes -= record.num_bytes
        return record

    # -- saying so --------------------------------------------------------------------------------------------------

    def _refuse(self, kind: str, what: str) -> bool:
        self._warn(kind, f"{what}: the chunk is not kept there and will be recomputed")
        return False

    def _warn(self, kind: str, message: str) -> None:
        with self._lock:
            known = kind in self._warned
            self._warned.add(kind)
        if not known:
            warnings.warn(message, stacklevel=4)

    def __str__(self) -> str:
        return f"{self.device.label} ({self.capacity_bytes:,} bytes)"
