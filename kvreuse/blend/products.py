"""Attention of scattered rows in fp32 on a CPU: two matrix products and a softmax for a block of rows at a time.

PyTorch's fused CPU kernel tiles short queries in 32 rows, which keeps its products from their best rate, and is slow
under a mask (docs/performance.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

# Rows of a block: tokens times the query heads that share a KV head. More waste more on keys that only the last sees.
_BLOCK_ROWS = 96


@dataclass(frozen=True)
class Span:
    """Tokens ``start:stop`` of the rows, which see keys ``key_start:key_stop``, all of them those before ``differ``."""

    start: int
    stop: int
    key_start: int
    key_stop: int
    differ: int


def spans(last: torch.Tensor, window: int | None, size: int) -> Iterator[Span]:
    """Blocks of ``size`` tokens; token i sees the keys up to ``last[i]`` (sorted, [n]), its window's part of them."""
    seen = last.tolist()
    for start in range(0, len(seen), size):
        stop = min(start + size, len(seen))
        key_start = 0 if window is None else max(0, seen[start] - window + 1)
        # Before any window begins all tokens see what the first one sees: only the keys behind that differ.
        differ = seen[start] + 1 if window is None or seen[stop - 1] < window else key_start
        yield Span(start, stop, key_start, seen[stop - 1] + 1, differ)


class RowProducts:
    """Attention of tokens of which the i-th sees the keys up to ``last[i]`` (sorted, [n], on the CPU), its window's.

    Args:
        last: the last key that each token sees.
        window: keys seen, that one included; None is all.
    """

    def __init__(self, last: torch.Tensor, window: int | None) -> None:
        self._last, self._window = last, window
        self._blocks: dict[int, list[tuple[Span, torch.Tensor]]] = {}
        self._scores = torch.empty(0, dtype=torch.float32, device="cpu")  # one memory for all blocks and layers

    def _blocks_of(self, size: int) -> list[tuple[Span, torch.Tensor]]:
        """Blocks of ``size`` tokens, each with -1 where a token does not see a key [tokens, key_stop - differ], else 0.

        Made once, in float: its arithmetic is vectorised where comparisons are not, and numbers of tokens are exact.
        """
        if size not in self._blocks:
            last = self._last.float()[:, None]
            keys = torch.arange(int(self._last[-1]) + 1, dtype=torch.float32, device="cpu")
            cut = spans(self._last, self._window, size)
            self._blocks[size] = [(s, self._unseen(last[s.start : s.stop], keys[s.differ : s.key_stop])) for s in cut]
        return self._blocks[size]

    def _unseen(self, last: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        room = last - keys  # below 0: not yet seen
        if self._window is not None:
            torch.minimum(room, keys - last + (self._window - 1), out=room)  # below 0: no longer seen
        return room.clamp_(-1, 0)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Attention of ``query`` [B, H, n, D] over ``key``, ``value`` [B, H_kv, S, D], fp32; returns [B, H, n, D]."""
        batch, kv_heads = key.shape[:2]
        n, dim, groups = query.shape[2], value.shape[-1], query.shape[1] // kv_heads
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        # The query heads that share a KV head become rows: no key is repeated.
        rows = query.unflatten(1, (kv_heads, groups)).transpose(2, 3).reshape(batch * kv_heads, n * groups, -1)
        keys, values = key.flatten(0, 1).transpose(1, 2), value.flatten(0, 1)
        out = query.new_empty(batch, n, kv_heads, groups, dim)
        blocks = self._blocks_of(max(1, _BLOCK_ROWS // groups))
        if len(blocks) > 1:  # transposed once: a product with keys as they lie takes up to a quarter longer
            keys = keys.contiguous()
        needed = len(rows) * groups * max((s.stop - s.start) * (s.key_stop - s.key_start) for s, _ in blocks)
        if self._scores.numel() < needed:
            self._scores.resize_(needed)
        most = torch.finfo(torch.float32).max
        for span, unseen in blocks:
            seen = slice(span.key_start, span.key_stop)
            own = rows[:, span.start * groups : span.stop * groups]
            shape = (*own.shape[:2], span.key_stop - span.key_start)
            scores = self._scores[: math.prod(shape)].view(shape).baddbmm_(own, keys[:, :, seen], beta=0, alpha=scale)
            differ = scores.view(len(rows), -1, groups, shape[-1])[..., span.differ - span.key_start :]
            differ.add_(unseen[:, None], alpha=most)
            torch.softmax(scores, dim=-1, out=scores)
            mixed = (scores @ values[:, seen]).view(batch, kv_heads, -1, groups, dim)
            out[:, span.start : span.stop] = mixed.transpose(1, 2)
        return out.flatten(2, 3).transpose(1, 2)
