"""Attention of a subset of the prompt's rows, masked by true position (docs/design.md, decision 6)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

# Rows per attention call: fewer waste less on keys nobody sees, more keep the kernel busy.
_BLOCK_ROWS_CPU = 96
_BLOCK_ROWS_GPU = 1024
_MASKED_COST = 2.2  # measured: a masked score costs this many times a causal one


@dataclass(frozen=True)
class Block:
    """Rows ``start:stop`` against keys ``key_start:key_stop``, with an additive mask [rows, keys]."""

    start: int
    stop: int
    key_start: int
    key_stop: int
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
    """

    rows: torch.Tensor
    num_keys: int
    window: int | None = None
    last_key: torch.Tensor | None = None
    return_weights: bool = False

    @property
    def _last(self) -> torch.Tensor:
        return self.rows if self.last_key is None else self.last_key

    def visible(self, rows: slice = slice(None), keys: slice = slice(None)) -> torch.Tensor:
        """Boolean [rows, keys]: true where the row sees the key."""
        last = self._last[rows, None]
        key = torch.arange(self.num_keys, device=last.device)[None, keys]
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

    def blocks(self, dtype: torch.dtype, groups: int) -> list[Block]:
        """The rows in blocks with their masks, made once per selection; ``groups`` query heads share a KV head."""
        cache = self.__dict__.setdefault("_blocks", {})
        if (dtype, groups) not in cache:
            cache[dtype, groups] = list(self._make_blocks(dtype, groups))
        return cache[dtype, groups]

    def _make_blocks(self, dtype: torch.dtype, groups: int) -> Iterator[Block]:
        last = self._last.tolist()
        size = _BLOCK_ROWS_CPU if self.rows.device.type == "cpu" else _BLOCK_ROWS_GPU
        for start in range(0, len(last), size):
            stop = min(start + size, len(last))
            key_stop = last[stop - 1] + 1
            key_start = 0 if self.window is None else max(0, last[start] - self.window + 1)
            mask = self.additive(dtype, slice(start, stop), slice(key_start, key_stop))
            yield Block(start, stop, key_start, key_stop, mask.repeat(groups, 1))

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Attention of ``query`` [B, H, n, D] over ``key``, ``value`` [B, H_kv, S, D]; returns [B, H, n, D]."""
        groups = query.shape[1] // key.shape[1]
        n, skipped = query.shape[2], self.num_keys - query.shape[2]
        if self.is_suffix and self.num_keys**2 <= _MASKED_COST * (self.num_keys**2 - skipped**2):
            # Empty rows in front make the square that the causal kernel wants; they cost less than a mask.
            square = F.pad(query, (0, 0, skipped, 0)) if skipped else query
            out = F.scaled_dot_product_attention(
                square, key, value, is_causal=n > 1, scale=scale, enable_gqa=groups > 1
            )
            return out[:, :, skipped:]
        batch, kv_heads, _, dim = key.shape
        out = query.new_empty(batch, kv_heads, groups, n, value.shape[-1])
        folded = query.view(batch, kv_heads, groups, n, dim)
        for block in self.blocks(query.dtype, groups):
            rows, keys = slice(block.start, block.stop), slice(block.key_start, block.key_stop)
            # The query heads of one KV head become rows, so that keys are not copied once per head.
            q = folded[:, :, :, rows].reshape(batch, kv_heads, -1, dim)
            o = F.scaled_dot_product_attention(q, key[:, :, keys], value[:, :, keys], attn_mask=block.mask, scale=scale)
            out[:, :, :, rows] = o.view(batch, kv_heads, groups, -1, o.shape[-1])
        return out.view(batch, kv_heads * groups, n, -1)

    def weights(self, query: torch.Tensor, key: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Attention weights [B, H, n, S] in fp32."""
        groups = query.shape[1] // key.shape[1]
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        scores = query.float() @ key.float().repeat_interleave(groups, dim=1).transpose(-1, -2) * scale
        return scores.masked_fill(~self.visible(), float("-inf")).softmax(dim=-1)


def row_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: RowMask,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' attention interface on a `RowMask`: output [B, n, H, D], and weights if the mask asks for them."""
    weights = attention_mask.weights(query, key, scaling) if attention_mask.return_weights else None
    return attention_mask.attend(query, key, value, scaling).transpose(1, 2).contiguous(), weights
