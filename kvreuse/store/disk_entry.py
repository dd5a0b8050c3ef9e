"""One chunk on disk, opened for reading layer by layer."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import torch

from kvreuse.errors import LostEntryError
from kvreuse.kv import ChunkKV, KVShape
from kvreuse.store.codec import PackedKV
from kvreuse.store.format import Header, byte_view, checksum_of, split_layer

if TYPE_CHECKING:
    from kvreuse.store.disk import DiskTier


class DiskEntry:
    """K/V whose layers are read when they are asked for. Holds its file open, and a lease on it, until `close`.

    Close it only when no thread reads from it any more.
    """

    def __init__(self, tier: DiskTier, name: str, descriptor: int, header: Header) -> None:
        self._tier, self._name, self._descriptor, self._header = tier, name, descriptor, header
        self._closing = threading.Lock()
        self._is_open = True

    @property
    def ids(self) -> torch.Tensor:
        """Token ids [T]."""
        return self._header.ids

    @property
    def start(self) -> int:
        """Position the first token was computed at."""
        return self._header.start

    @property
    def long_rope(self) -> bool:
        """With a longrope model's frequencies for long prompts."""
        return self._header.long_rope

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.ids.numel()

    @property
    def num_bytes(self) -> int:
        """Bytes of the file."""
        return self._header.offsets[-1]

    @property
    def in_memory(self) -> bool:
        """False."""
        return False

    @property
    def readers(self) -> int:
        """Threads that may read from its device at the same time."""
        return self._tier.device.readers

    def like(self, layer: int) -> KVShape:
        """Shapes and type of a layer's K/V, without reading them."""
        return self._header.shapes[layer]

    def read(self, layer: int, pin_memory: bool = False) -> list[torch.Tensor]:
        """One layer's packed tensors, read in one piece and checked; raises LostEntryError."""
        begin, stop = self._header.offsets[layer : layer + 2]
        raw = torch.empty(stop - begin, dtype=torch.uint8, pin_memory=pin_memory)
        view, at = byte_view(raw), 0
        started = self._tier.throttle.start()
        try:
            while at < len(view):
                count = os.preadv(self._descriptor, [view[at:]], begin + at)
                if count == 0:
                    raise self._lost(f"layer {layer} ends after {at} of {len(view)} bytes")
                at += count
        except OSError as error:
            raise self._lost(f"layer {layer}: {error.strerror}") from error
        if checksum_of(raw) != self._header.checksums[layer]:
            raise self._lost(f"layer {layer} does not match its checksum")
        self._tier.throttle.pay(at, started)
        return split_layer(raw, self._tier.codec, self.like(layer))

    def unpack(self, layer: int, parts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values out of packed tensors, on the device they are on."""
        return self._tier.codec.unpack(parts, self.like(layer))

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer; raises LostEntryError."""
        return self.unpack(layer, self.read(layer))

    def packed(self, known: dict[int, list[torch.Tensor]] | None = None) -> PackedKV:
        """All layers as they are stored; those in ``known`` are not read again. Raises LostEntryError."""
        known = known or {}
        shapes = self._header.shapes
        parts = tuple(known[i] if i in known else self.read(i) for i in range(len(shapes)))
        return PackedKV(self.ids, self.start, self.long_rope, self._tier.codec, shapes, parts)

    def load(self) -> ChunkKV:
        """All layers in memory; raises LostEntryError."""
        return self.packed().load()

    def close(self) -> None:
        """Close the file and end the lease."""
        with self._closing:
            if self._is_open:
                self._is_open = False
                self._tier.release(self._name, self._descriptor)

    def __del__(self) -> None:
        if getattr(self, "_is_open", False):
            self.close()

    def _lost(self, reason: str) -> LostEntryError:
        self._tier.lose(self._name, self._descriptor, reason)
        return LostEntryError(f"{self._tier.device.label}: {self._name}: {reason}")
