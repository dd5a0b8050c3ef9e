"""Attention of scattered rows in fp32 on a CPU: products of many rows with a tile of keys, and plain exponentials.

A softmax first takes off each row's largest score. Where no score is extreme exponentials need not wait for that: the
keys come tile by tile, each under all rows that see it, and sums are divided by at the end. PyTorch's fused kernel
tiles short queries in 32 rows, which keeps its products from their best rate (docs/performance.md).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

_TILE_KEYS = 192
# Scores that are held at a time for each thread, 1 MiB of them: they stay in a core's own cache.
_SCORES = 2**18
# Sums of exponentials that are trusted. fp32 begins at 1e-38: of smaller sums weights of 1e-8 would be lost.
_LEAST_SUM, _MOST_SUM = 1e-30, 1e30
# Below -87, for which fp32 has no room, MKL's exponential takes a hundred times as long.
_LEAST_SCORE, _MOST_SCORE = -80.0, math.log(_MOST_SUM)
_SAMPLED_TOKENS, _SAMPLED_KEYS = 32, 256


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
        sampled = rows.unflatten(1, (n, groups))[:, :: max(1, n // _SAMPLED_TOKENS)].flatten(1, 2)
        sample = sampled @ keys[:, :: max(1, keys.shape[1] // _SAMPLED_KEYS)].transpose(1, 2) * scale
        if not _within(sample, _LEAST_SCORE, _MOST_SCORE):  # spares the work; what decides are the sums
            return None
        mixed = rows.new_zeros(*rows.shape[:2], values.shape[-1])
        total = rows.new_zeros(*rows.shape[:2], 1)
        # Scores of one KV head's tile over those that can be held: blocks of tokens if many, heads together if few.
        load = n * groups * _TILE_KEYS / (_SCORES * torch.get_num_threads())
        tiles, heads = self._tiles_of(min(n, max(1, round(load)))), max(1, round(1 / load))
        for own, k, v, mix, sums in zip(*(t.split(heads) for t in (rows, keys, values, mixed, total)), strict=True):
            for tile in tiles:
                seeing = slice(tile.start * groups, tile.stop * groups)
                weights = self._exponentials(own[:, seeing], k[:, tile.keys], scale)
                by_token = weights.view(len(own), -1, groups, weights.shape[-1])
                for tokens, mask in tile.masks:
                    by_token[:, tokens].mul_(mask)
                sums[:, seeing].add_(weights.sum(dim=-1, keepdim=True))
                mix[:, seeing].baddbmm_(weights, v[:, tile.keys])
        if not _within(total, _LEAST_SUM, _MOST_SUM):
            return None
        mixed, total = (t.view(batch, kv_heads, n, groups, -1).transpose(1, 2) for t in (mixed, total))
        out = query.new_empty(mixed.shape)
        return torch.div(mixed, total, out=out).flatten(2, 3).transpose(1, 2)

    def _exponentials(self, rows: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
        """e to the power of the scores of ``rows`` [heads, r, D] against ``keys`` [heads, k, D]: [heads, r, k]."""
        shape = rows.shape[0], rows.shape[1], keys.shape[1]
        needed = shape[0] * shape[1] * shape[2]
        if self._scores.numel() < needed:
            self._scores.resize_(needed)
        scores = self._scores[:needed].view(shape)
        return scores.baddbmm_(rows, keys.transpose(1, 2), beta=0, alpha=scale).exp_()

    def _tiles_of(self, num_blocks: int) -> list[Tile]:
        """The tiles of all tokens in as many blocks, made once."""
        if num_blocks not in self._tiles:
            # Masks [n, 1, keys] in float, whose arithmetic is vectorised where comparisons are not: of every token in
            # the tile of the last key it sees, and in that of the first.
            at = torch.arange(_TILE_KEYS, dtype=torch.float32, device="cpu")
            last = self._last[:, None, None]
            until = (last % _TILE_KEYS - at + 1).clamp_(0, 1)
            since = None
            if self._window is not None:
                since = (at - (last - self._window + 1) % _TILE_KEYS + 1).clamp_(0, 1)
            cuts = [round(last.numel() * i / num_blocks) for i in range(num_blocks + 1)]
            tiles = [tile for start, stop in pairwise(cuts) for tile in self._cut(start, stop, until, since)]
            self._tiles[num_blocks] = tiles
        return self._tiles[num_blocks]

    def _cut(self, start: int, stop: int, until: torch.Tensor, since: torch.Tensor | None) -> Iterator[Tile]:
        """The tiles of tokens ``start:stop``."""
        seen = self._last[start:stop].tolist()
        window = seen[-1] + 1 if self._window is None else self._window

        def first_to_see(key: int) -> int:  # of the tokens, by the last key they see
            return start + bisect_left(seen, key)

        lowest = max(0, seen[0] - window + 1)
        for first in range(lowest - lowest % _TILE_KEYS, seen[-1] + 1, _TILE_KEYS):
            keys = slice(first, min(first + _TILE_KEYS, seen[-1] + 1))
            begin, end = first_to_see(first), first_to_see(keys.stop - 1 + window)
            partly = [(until, begin, first_to_see(first + _TILE_KEYS))]
            if since is not None:
                partly.append((since, first_to_see(first + window), end))
            masks = [(slice(a - begin, b - begin), mask[a:b, :, : keys.stop - first]) for mask, a, b in partly if a < b]
            yield Tile(keys, begin, end, masks)


def _within(numbers: torch.Tensor, least: float, most: float) -> bool:
    """Whether all numbers lie between these; false if there is a NaN."""
    low, high = torch.aminmax(numbers)
    return low.item() > least and high.item() < most
