"""Fixed shapes for layers: rows and keys padded to buckets, in memory that stays where it is from request to request.

Padding rows repeat the last row and write their K/V to a slot that no row sees; padding keys are masked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from kvreuse.blend.cache import BlendLayer
from kvreuse.blend.index import Index
from kvreuse.blend.rows import Block, PackedMask, RowMask, masked_attention

_LEAST_STEP = 32  # between buckets
_SCRATCH = 8  # slots behind the keys, where padding rows write; a multiple of what masks are aligned to


def bucket(n: int) -> int:
    """``n`` rounded up to a multiple of 32, above 512 of an eighth of the power of two below it."""
    step = max(_LEAST_STEP, 1 << max(0, (n - 1).bit_length() - 4))
    return -(-n // step) * step


@dataclass(frozen=True, eq=False)
class FixedMask:
    """Every row over every key, under an additive mask [rows, keys] whose memory stays where it is."""

    mask: torch.Tensor
    return_weights: bool = False

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Attention of ``query`` [1, H, n, D] over ``key``, ``value`` [1, H_kv, S, D]; returns [1, H, n, D]."""
        whole = Block(slice(query.shape[2]), slice(key.shape[2]), self.mask)
        return masked_attention(query, key, value, [whole], scale)


class FixedCache(Cache):
    """Scatters a layer's K/V into fixed buffers."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self._keys, self._values, self._slots = keys, values, slots

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """K/V of all keys, the fresh ones among them."""
        self._keys.index_copy_(2, self._slots, key_states)
        self._values.index_copy_(2, self._slots, value_states)
        return self._keys, self._values


class FixedShape:
    """The memory of one number of rows and keys.

    ``kv``: buffers of K/V, which all layers with like heads share, and all shapes of as many keys.
    """

    def __init__(self, num_rows: int, num_keys: int, device: torch.device, kv: dict[Any, torch.Tensor]) -> None:
        self.num_rows, self.num_keys, self.kv = num_rows, num_keys, kv
        self.slots = torch.zeros(num_rows, dtype=torch.long, device=device)
        self._pad = torch.zeros(num_rows, dtype=torch.long, device=device)
        self._rows: Index | None = None
        self._held: dict[Any, torch.Tensor] = {}
        self._sources: dict[Any, Any] = {}  # what was copied last; kept, so that no other object has its id

    def begin(self, rows: Index) -> None:
        """The rows of the calls to come."""
        if rows is not self._rows:
            n = rows.on_cpu.numel()
            self.slots[:n] = rows.on(self.slots.device)
            self.slots[n:] = self.num_keys
            torch.clamp(torch.arange(self.num_rows, device=self._pad.device), max=n - 1, out=self._pad)
            self._rows = rows
            self._sources.clear()

    def hold(self, name: Any, value: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """``value`` in fixed memory, padded along ``dim`` by its last row."""
        padded = value.index_select(dim, self._pad)
        return self._memory(name, padded.shape, padded.dtype).copy_(padded)

    def hold_once(self, name: Any, value: Any, dim: int) -> Any:
        """The same for what layers are handed alike, which is copied once per selection; of a tuple, each part."""
        if isinstance(value, tuple):
            return tuple(self.hold_once((name, i), part, dim) for i, part in enumerate(value))
        if not isinstance(value, torch.Tensor):
            return value
        if self._sources.get(name) is not value:
            self.hold(name, value, dim)
            self._sources[name] = value
        return self._held[name]

    def output(self, like: torch.Tensor) -> torch.Tensor:
        """Where graphs leave the hidden states."""
        return self._memory("output", like.shape, like.dtype)

    def mask(self, kind: str, mask: RowMask | PackedMask, num_keys: int, dtype: torch.dtype) -> FixedMask:
        """The mask of a kind of layer; made once per selection."""
        name = ("mask", kind)
        held = self._memory(name, (self.num_rows, self.num_keys + _SCRATCH), dtype)
        if self._sources.get(name) is not mask:
            held[:, :num_keys] = mask.additive(dtype).index_select(0, self._pad)
            held[:, num_keys:] = torch.finfo(dtype).min
            self._sources[name] = mask
        return FixedMask(held)

    def place(self, held: BlendLayer) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's K/V in the fixed buffers; zeros behind them, for what is masked must still be numbers."""
        out = []
        for name, part in (("keys", held.keys), ("values", held.values)):
            num_keys, at = part.shape[2], (name, part.shape[1], part.shape[3])
            if at not in self.kv:
                self.kv[at] = part.new_empty(1, part.shape[1], self.num_keys + _SCRATCH, part.shape[3])
            self.kv[at][:, :, :num_keys].copy_(part)
            self.kv[at][:, :, num_keys:].zero_()
            out.append(self.kv[at])
        return out[0], out[1]

    def _memory(self, name: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The same tensor whenever it is asked for by this name."""
        if name not in self._held:
            self._held[name] = torch.empty(shape, dtype=dtype, device=self.slots.device)
        return self._held[name]
