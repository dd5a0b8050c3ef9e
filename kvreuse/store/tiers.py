"""Storage tiers. One tier keeps entries up to a number of bytes and evicts the least recently used."""

from __future__ import annotations

import re
from collections import OrderedDict

from kvreuse.kv import ChunkKV
from kvreuse.store.codec import PackedKV

MemoryEntry = ChunkKV | PackedKV
_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


def parse_bytes(size: str | int) -> int:
    """Bytes of a size like ``"2GiB"``, ``"500MB"`` or ``1024``."""
    if isinstance(size, int) and not isinstance(size, bool):
        number, unit = float(size), ""
    else:
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]i?)?b?\s*", str(size), flags=re.IGNORECASE)
        if match is None:
            raise ValueError(f"size {size!r} is not understood: write it like '2GiB', '500MB' or a number of bytes")
        number, unit = float(match[1]), (match[2] or "").lower()
    if number * _UNITS[unit] < 1:
        raise ValueError(f"size {size!r}: a tier needs room for at least one byte")
    return int(number * _UNITS[unit])


class MemoryTier:
    """Entries in main memory. Not thread-safe by itself: `KVStore` holds the lock."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.num_bytes = 0
        self.evictions = 0
        self.pinned: set[str] = set()
        self._entries: OrderedDict[str, MemoryEntry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def all_keys(self) -> list[str]:
        """All keys, least recently used first."""
        return list(self._entries)

    def items(self) -> list[tuple[str, MemoryEntry]]:
        """All keys and entries, least recently used first."""
        return list(self._entries.items())

    def get(self, key: str) -> MemoryEntry | None:
        """The entry, now the most recently used, or None."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def put(self, key: str, entry: MemoryEntry) -> bool:
        """Keep an entry; evicts as needed. False, and nothing has changed, if it does not fit beside what is pinned."""
        old = self._entries.get(key)
        excess = self.num_bytes - (old.num_bytes if old else 0) + entry.num_bytes - self.capacity_bytes
        victims = []
        for other, held in self._entries.items():
            if excess <= 0:
                break
            if other != key and other not in self.pinned:
                victims.append(other)
                excess -= held.num_bytes
        if excess > 0:
            return False
        for victim in victims:
            self.delete(victim)
        self.evictions += len(victims)
        self.num_bytes += entry.num_bytes - (old.num_bytes if old else 0)
        self._entries[key] = entry
        self._entries.move_to_end(key)
        return True

    def delete(self, key: str) -> bool:
        """Drop an entry; False if there is none."""
        entry = self._entries.pop(key, None)
        self.pinned.discard(key)
        if entry is None:
            return False
        self.num_bytes -= entry.num_bytes
        return True
