"""Attention of a subset of the prompt's rows, masked by true position (docs/design.md, decision 6)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

from kvreuse.blend.products import RowProducts, Scratch

# Rows per attention call: fewer waste less on keys nobody sees, more keep the kernel busy.
_BLOCK_ROWS_CPU = 64
_BLOCK_ROWS_GPU = 1024
_ALIGNMENT = 8  # of a mask's rows, in numbers, for PyTorch's memory-efficient attention on GPUs
# Measured: what a score costs under a mask, and by products, in scores of PyTorch's causal kernel.
_MASKED_COST = 2.2
_PRODUCTS_COST = 1.02


@dataclass(frozen=True)
class Block:
    """Rows against keys; ``mask``: additive, [rows, keys]."""

    rows: slice
    keys: slice
    mask: torch.Tensor


@dataclass(frozen=True, eq=False)
class RowMask:
    """Which keys each query row sees: the row at position p sees keys 0..p (its window's part of them), no other.

    Args:
        rows: sorted positions of the query rows, [n].
        num_keys: S, the keys that exist.
        window: keys seen in a sliding-window layer, the row's own included.
        last_key: last key seen per row [n], where it isn't the row's own position (the released code's mask).
        return_weights: also compute attention weights [B, H, n, S] (analysis; costs a dense product).
        scratch: memory to compute in, shared by all masks of a pass.
    """

    rows: torch.Tensor
    num_keys: int
    window: int | None = None
    last_key: torch.Tensor | None = None
    return_weights: bool = False
    scratch: Scratch = field(default_factory=Scratch, repr=False)
    _blocks: dict[Any, list[Block]] = field(default_factory=dict, init=False, repr=False)

    @property
    def _last(self) -> torch.Tensor:
        return self.rows if self.last_key is None else self.last_key

    def visible(self, rows: slice = slice(None), keys: slice = slice(None)) -> torch.Tensor:
        """Boolean [rows, keys]: true where the row sees the key."""
        last = self._last[rows, None]
        start, stop, _ = keys.indices(self.num_keys)
        key = torch.arange(start, stop, device=last.device)[None]
        seen = key <= last
        return seen if self.window is None else seen & (key > last - self.window)

    def additive(self, dtype: torch.dtype, rows: slice = slice(None), keys: slice = slice(None)) -> torch.Tensor:
        """The mask as it is added to scores: 0 where seen, the type's lowest number elsewhere."""
        hidden = ~self.visible(rows, keys)
        return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, torch.finfo(dtype).min)

    @cached_property
    def is_suffix(self) -> bool:
        """The rows are the prompt's last n tokens, each seeing all before it: plain causal attention."""
        n, windowed = self.rows.numel(), self.window is not None and self.window < self.num_keys
        return self.last_key is None and not windowed and bool(n == self.num_keys - int(self.rows[0]))

    def _is_nearly_square(self, cost: float) -> bool:
        """Whether the causal kernel, with empty rows in front, takes less than these rows at ``cost`` a score."""
        skipped = self.num_keys - self.rows.numel()
        return self.is_suffix and self.num_keys**2 <= cost * (self.num_keys**2 - skipped**2)

    @cached_property
    def _products(self) -> RowProducts:
        return RowProducts(self._last, self.window, self.scratch)

    def blocks(self, dtype: torch.dtype, size: int) -> list[Block]:
        """The rows in blocks of ``size``, made once per selection.

        Masks stand at multiples of 8 numbers: what does not, a GPU's memory-efficient kernel copies in every layer.
        """
        key = (dtype, size)
        if key not in self._blocks:
            self._blocks[key] = list(self._make_blocks(dtype, size))
        return self._blocks[key]

    def _make_blocks(self, dtype: torch.dtype, size: int) -> Iterator[Block]:
        seen = self._last.tolist()
        for start in range(0, len(seen), size):
            rows = slice(start, min(start + size, len(seen)))
            keys = slice(0 if self.window is None else max(0, seen[start] - self.window + 1), seen[rows.stop - 1] + 1)
            # Before any window begins all rows see what the first one sees: only the keys behind that differ.
            alike = self.window is None or seen[rows.stop - 1] < self.window
            differ = slice(seen[start] + 1 if alike else keys.start, keys.stop)
            shape = rows.stop - start, -(-(keys.stop - keys.start) // _ALIGNMENT) * _ALIGNMENT
            mask = torch.zeros(shape, dtype=dtype, device=self.rows.device)[:, : keys.stop - keys.start]
            mask[:, differ.start - keys.start :] = self.additive(dtype, rows, differ)
            yield Block(rows, keys, mask)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Attention of ``query`` [B, H, n, D] over ``key``, ``value`` [B, H_kv, S, D]; returns [B, H, n, D]."""
        by_products = query.device.type == "cpu" and query.dtype == torch.float32
        if by_products and not self._is_nearly_square(_PRODUCTS_COST):
            attended = self._products.attend(query, key, value, scale)
            if attended is not None:
                return attended
        if self._is_nearly_square(_MASKED_COST):
            skipped = self.num_keys - query.shape[2]
            square = F.pad(query, (0, 0, skipped, 0)) if skipped else query
            grouped, causal = query.shape[1] != key.shape[1], query.shape[2] > 1
            out = F.scaled_dot_product_attention(square, key, value, is_causal=causal, scale=scale, enable_gqa=grouped)
            return out[:, :, skipped:]
        size = _BLOCK_ROWS_CPU if query.device.type == "cpu" else _BLOCK_ROWS_GPU
        return masked_attention(query, key, value, self.blocks(query.dtype, size), scale)

    def weights(self, query: torch.Tensor, key: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Attention weights [B, H, n, S] in fp32."""
        kv_heads, n = key.shape[1], query.shape[2]
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        # The query heads that share a KV head become rows of one product: no key is copied.
        folded = query.float().unflatten(1, (kv_heads, -1)).flatten(2, 3)
        scores = (folded * scale) @ key.float().transpose(-1, -2)
        scores = scores.unflatten(2, (-1, n)).flatten(1, 2)
        return scores.masked_fill_(~self.visible(), float("-inf")).softmax(dim=-1)


@dataclass(frozen=True, eq=False)
class PackedMask:
    """Rows of several prompts over K/V that stand in one row of slots: each row sees its own prompt's keys alone.

    Args:
        parts: every prompt's rows, in the prompt's own positions.
        starts: the slot of every prompt's first key.
        num_slots: keys and values there are.
    """

    parts: tuple[RowMask, ...]
    starts: tuple[int, ...]
    num_slots: int

    @property
    def return_weights(self) -> bool:
        """As the parts say."""
        return self.parts[0].return_weights

    def cut(self) -> Iterator[tuple[RowMask, slice, slice]]:
        """Every prompt's mask, rows and keys."""
        row = 0
        for part, start in zip(self.parts, self.starts, strict=True):
            n = part.rows.numel()
            yield part, slice(row, row + n), slice(start, start + part.num_keys)
            row += n

    def additive(self, dtype: torch.dtype) -> torch.Tensor:
        """The parts' masks [rows, slots] on the diagonal, the type's lowest number around them."""
        n, device = sum(part.rows.numel() for part in self.parts), self.parts[0].rows.device
        out = torch.full((n, self.num_slots), torch.finfo(dtype).min, dtype=dtype, device=device)
        for part, rows, keys in self.cut():
            out[rows, keys] = part.additive(dtype)
        return out

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Attention of ``query`` [1, H, n, D] over ``key``, ``value`` [1, H_kv, slots, D]; returns [1, H, n, D]."""
        outputs = [
            part.attend(query[:, :, rows], key[:, :, keys], value[:, :, keys], scale) for part, rows, keys in self.cut()
        ]
        return torch.cat(outputs, dim=2)

    def weights(self, query: torch.Tensor, key: torch.Tensor, scale: float | None) -> tuple[torch.Tensor, ...]:
        """Attention weights in fp32, per prompt [1, H, n, S]."""
        return tuple(part.weights(query[:, :, rows], key[:, :, keys], scale) for part, rows, keys in self.cut())


def masked_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: Sequence[Block], scale: float | None
) -> torch.Tensor:
    """Attention of `RowMask.attend` by PyTorch's kernels, a block of rows at a time under its mask.

    The query heads that share a KV head become the batch, over which keys, values and mask repeat without copies.
    """
    (batch, kv_heads), n = key.shape[:2], query.shape[2]
    groups = query.shape[1] // kv_heads
    folded = query.unflatten(1, (kv_heads, groups)).permute(2, 0, 1, 3, 4).flatten(0, 1)
    keys, values = (t[None].expand(groups, -1, -1, -1, -1).flatten(0, 1) for t in (key, value))
    out = query.new_empty(groups * batch, kv_heads, n, value.shape[-1])
    for block in blocks:
        out[:, :, block.rows] = F.scaled_dot_product_attention(
            folded[:, :, block.rows], keys[:, :, block.keys], values[:, :, block.keys], block.mask, scale=scale
        )
    return out.unflatten(0, (groups, batch)).permute(1, 2, 0, 3, 4).flatten(1, 2)


def row_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: RowMask | PackedMask,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | tuple[torch.Tensor, ...] | None]:
    """transformers' attention interface on a mask of rows: output [B, n, H, D]; weights if the mask asks for them."""
    weights = attention_mask.weights(query, key, scaling) if attention_mask.return_weights else None
    return attention_mask.attend(query, key, value, scaling).transpose(1, 2).contiguous(), weights
