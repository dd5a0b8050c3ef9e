"""Attention of scattered rows in fp32 on a CPU: products of many rows with a tile of keys, and plain exponentials.

A softmax first takes off each row's largest score. Where no score is extreme exponentials need not wait for that: the
keys come tile by tile, each under all rows that see it, and sums are divided by at the end. PyTorch's fused kernel
tiles short queries in 32 rows, which keeps its products from their best rate (docs/performance.md).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

_TILE_KEYS = 192
# Scores that are held at a time for each thread, 1 MiB of them: they stay in a core's own cache.
_SCORES = 2**18
# MKL's exponential of numbers below -87, which fp32 has no room for, takes a hundred times as long.
_LEAST_SCORE = -80.0
_SAMPLE_EVERY = 16


@dataclass(frozen=True)
class Tile:
    """``keys``, and the tokens ``start:stop`` that see any of them.

    ``masks``: for those of the tokens that don't see all keys, counted from ``start``, 1 where one sees a key and 0
    where not, [tokens, 1, keys].
    """

    keys: slice
    start: int
    stop: int
    masks: list[tuple[slice, torch.Tensor]]


class RowProducts:
    """Attention of tokens of which the i-th sees the keys up to ``last[i]`` (sorted, [n], on the CPU), its window's.

    Args:
        last: the last key that each token sees.
        window: keys seen, that one included; None is all.
    """

    def __init__(self, last: torch.Tensor, window: int | None) -> None:
        self._last, self._window = last, window
        self._tiles: dict[int, list[Tile]] = {}
        self._scores = torch.empty(0, dtype=torch.float32, device="cpu")  # one memory for all tiles and layers

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor | None:
        """Attention of ``query`` [B, H, n, D] over ``key``, ``value`` [B, H_kv, S, D], fp32: [B, H, n, D].

        None where scores are too extreme for plain exponentials.
        """
        batch, kv_heads = key.shape[:2]
        n, groups = query.shape[2], query.shape[1] // kv_heads
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        # The query heads that share a KV head become rows: no key is repeated. [B * H_kv, n * groups, D] here and below
        rows = query.unflatten(1, (kv_heads, groups)).transpose(2, 3).reshape(batch * kv_heads, n * groups, -1)
        keys, values = key.flatten(0, 1), value.flatten(0, 1)
        sample = rows[:, ::_SAMPLE_EVERY] @ keys[:, ::_SAMPLE_EVERY].transpose(1, 2)
        if not sample.amin().item() * scale > _LEAST_SCORE:
            return None
        mixed = rows.new_zeros(*rows.shape[:2], values.shape[-1])
        total = rows.new_zeros(*rows.shape[:2], 1)
        # Scores of a KV head, in what can be held: several blocks of tokens, or several heads at a time.
        held = n * groups * _TILE_KEYS / (_SCORES * torch.get_num_threads())
        tiles, heads = self._tiles_of(min(n, max(1, round(held)))), max(1, round(1 / held))
        for own, k, v, mix, sums in zip(*(t.split(heads) for t in (rows, keys, values, mixed, total)), strict=True):
            for tile in tiles:
                seeing = slice(tile.start * groups, tile.stop * groups)
                weights = self._exponentials(own[:, seeing], k[:, tile.keys], scale)
                by_token = weights.view(len(own), -1, groups, weights.shape[-1])
                for tokens, mask in tile.masks:
                    by_token[:, tokens].mul_(mask)
                sums[:, seeing].add_(weights.sum(dim=-1, keepdim=True))
                mix[:, seeing].baddbmm_(weights, v[:, tile.keys])
        if not _is_moderate(total):
            return None
        out = query.new_empty(batch, n, kv_heads, groups, mixed.shape[-1])
        parts = (t.view(batch, kv_heads, n, groups, -1).transpose(1, 2) for t in (mixed, total))
        return torch.div(*parts, out=out).flatten(2, 3).transpose(1, 2)

    def _exponentials(self, rows: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
        """e to the power of the scores of ``rows`` [heads, r, D] against ``keys`` [heads, k, D]: [heads, r, k]."""
        shape = rows.shape[0], rows.shape[1], keys.shape[1]
        needed = shape[0] * shape[1] * shape[2]
        if self._scores.numel() < needed:
            self._scores.resize_(needed)
        scores = self._scores[:needed].view(shape)
        scores.baddbmm_(rows, keys.transpose(1, 2), beta=0, alpha=scale)
        return torch.exp(scores, out=scores)

    def _tiles_of(self, blocks: int) -> list[Tile]:
        """The tiles of all tokens in as many blocks, made once."""
        if blocks not in self._tiles:
            # In float: its arithmetic is vectorised where comparisons are not, and numbers of tokens are exact.
            at = torch.arange(_TILE_KEYS, dtype=torch.float32, device="cpu")
            last = self._last[:, None, None]
            not_later = (last % _TILE_KEYS - at + 1).clamp_(0, 1)  # in the tile of the last key that a token sees
            not_before = None
            if self._window is not None:  # in the tile of the first
                not_before = (at - (last - self._window + 1) % _TILE_KEYS + 1).clamp_(0, 1)
            cuts = [round(last.numel() * i / blocks) for i in range(blocks + 1)]
            blocks_of = (self._cut(start, stop, not_later, not_before) for start, stop in pairwise(cuts))
            self._tiles[blocks] = [tile for block in blocks_of for tile in block]
        return self._tiles[blocks]

    def _cut(self, start: int, stop: int, not_later: torch.Tensor, not_before: torch.Tensor | None) -> Iterator[Tile]:
        """The tiles of tokens ``start:stop``."""
        seen = self._last[start:stop].tolist()
        window = seen[-1] + 1 if self._window is None else self._window
        lowest = max(0, seen[0] - window + 1)
        for first in range(lowest - lowest % _TILE_KEYS, seen[-1] + 1, _TILE_KEYS):
            end = first + _TILE_KEYS
            keys = slice(first, min(end, seen[-1] + 1))
            some, none = start + bisect_left(seen, first), start + bisect_left(seen, keys.stop - 1 + window)
            partly = [(not_later, some, start + bisect_left(seen, end))]
            if not_before is not None:
                partly.append((not_before, start + bisect_left(seen, first + window), none))
            masks = [(slice(a - some, b - some), mask[a:b, :, : keys.stop - first]) for mask, a, b in partly if a < b]
            yield Tile(keys, some, none, masks)


def _is_moderate(total: torch.Tensor) -> bool:
    """Whether sums of exponentials are far enough from fp32's ends that no weight that counts is lost."""
    least, most = torch.aminmax(total)
    return least.item() > 1e-30 and most.item() < 1e30
