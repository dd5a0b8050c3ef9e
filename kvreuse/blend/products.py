"""Attention of scattered rows in fp32 on a CPU: two matrix products and a softmax for a block of rows at a time.

PyTorch's fused CPU kernel tiles short queries in 32 rows, which keeps its products from their best rate, and is slow
under a mask (docs/performance.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

# Rows of a block: tokens times the query heads that share a KV head. More waste more on keys that only the last sees.
_BLOCK_ROWS = 96


@dataclass(frozen=True)
class Part:
    """Tokens ``start:stop`` of the rows against keys ``key_start:key_stop``.

    ``mask``: additive, [tokens, key_stop - mask_start]; the keys before ``mask_start`` are seen by all of them.
    """

    start: int
    stop: int
    key_start: int
    key_stop: int
    mask_start: int
    mask: torch.Tensor


class RowProducts:
    """Row i sees the keys up to ``last[i]`` (sorted, [n]), of these the last ``window`` if there is one."""

    def __init__(self, last: torch.Tensor, window: int | None) -> None:
        self._last, self._window = last, window
        self._parts: dict[int, list[Part]] = {}
        self._scores = torch.empty(0, dtype=torch.float32)  # one memory for all parts and layers

    def parts(self, size: int) -> list[Part]:
        """The rows in blocks of ``size`` tokens, made once; their masks are cut from one tensor."""
        if size not in self._parts:
            self._parts[size] = self._make_parts(size)
        return self._parts[size]

    def _make_parts(self, size: int) -> list[Part]:
        last, window = self._last.tolist(), self._window
        spans = []
        for start in range(0, len(last), size):
            stop = min(start + size, len(last))
            key_start = 0 if window is None else max(0, last[start] - window + 1)
            # Without a window all see what the first one sees: only the keys behind that differ.
            mask_start = last[start] + 1 if window is None else key_start
            spans.append((start, stop, key_start, last[stop - 1] + 1, mask_start))
        # In float, whose arithmetic is vectorised where comparisons are not; numbers of tokens are exact in it.
        begin = torch.tensor([float(mask_start) for *_, mask_start in spans]).repeat_interleave(size)[: len(last)]
        ahead = (self._last - begin)[:, None]  # the last key seen, from the block's mask_start on
        key = torch.arange(max(key_stop - mask_start for *_, key_stop, mask_start in spans), dtype=torch.float32)
        room = ahead - key  # below 0: not yet seen
        if window is not None:
            torch.minimum(room, key - ahead + (window - 1), out=room)  # below 0: no longer seen
        mask = room.clamp_(-1, 0).mul_(torch.finfo(torch.float32).max)
        return [Part(*span, mask[span[0] : span[1], : span[3] - span[4]]) for span in spans]

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Attention of ``query`` [B, H, n, D] over ``key``, ``value`` [B, H_kv, S, D]; returns [B, H, n, D]."""
        batch, kv_heads = key.shape[:2]
        n, dim, groups = query.shape[2], value.shape[-1], query.shape[1] // kv_heads
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        # The query heads that share a KV head become rows: no key is repeated.
        rows = query.unflatten(1, (kv_heads, groups)).transpose(2, 3).reshape(batch * kv_heads, n * groups, -1)
        # Transposed once, for all parts: a product with keys as they lie takes up to a quarter longer.
        keys, values = key.flatten(0, 1).transpose(1, 2).contiguous(), value.flatten(0, 1)
        out = query.new_empty(batch, n, kv_heads, groups, dim)
        parts = self.parts(max(1, _BLOCK_ROWS // groups))
        needed = len(rows) * groups * max((p.stop - p.start) * (p.key_stop - p.key_start) for p in parts)
        if self._scores.numel() < needed:
            self._scores.resize_(needed)
        for part in parts:
            seen = slice(part.key_start, part.key_stop)
            own = rows[:, part.start * groups : part.stop * groups]
            shape = (*own.shape[:2], part.key_stop - part.key_start)
            scores = self._scores[: math.prod(shape)].view(shape)
            torch.baddbmm(scores, own, keys[:, :, seen], beta=0, alpha=scale, out=scores)
            scores.unflatten(1, (-1, groups))[..., part.mask_start - part.key_start :].add_(part.mask[:, None])
            torch.softmax(scores, dim=-1, out=scores)
            mixed = (scores @ values[:, seen]).view(batch, kv_heads, -1, groups, dim)
            out[:, part.start : part.stop] = mixed.transpose(1, 2)
        return out.flatten(2, 3).transpose(1, 2)
