"""Attention of scattered rows in fp32 on a CPU: products of many rows with a tile of keys, and plain exponentials.

A softmax first takes off each row's largest score. Where no score is extreme exponentials need not wait for that: the
keys come tile by tile, each under all rows that see it, and sums are divided by at the end. PyTorch's fused kernel
tiles short queries in 32 rows, which keeps its products from their best rate (docs/performance.md).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch

_TILE_KEYS = 256
# Scores that are held at a time for each thread, 1.5 MiB of them: they stay in a core's own cache.
_SCORES = 3 * 2**17
# Rows for each thread from which KV heads go one by one.
_MANY_ROWS = 200
# Sums of exponentials that are trusted. fp32 begins at 1e-38: of smaller sums weights of 1e-8 would be lost.
_LEAST_SUM, _MOST_SUM = 1e-30, 1e30
# Below -87, for which fp32 has no room, MKL's exponential takes a hundred times as long.
_LEAST_SCORE, _MOST_SCORE = -80.0, math.log(_MOST_SUM)
_SAMPLED_TOKENS, _SAMPLED_KEYS = 16, 128


class Scratch:
    """Memory for the scores of one tile at a time, of whichever layer: new memory would cost page faults."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.float32, device="cpu")

    def take(self, numel: int) -> torch.Tensor:
        """``numel`` numbers, whoever held them before."""
        if self._memory.numel() < numel:
            self._memory = torch.empty(numel, dtype=torch.float32, device="cpu")
        return self._memory[:numel]


class Split(NamedTuple):
    """What is computed at a time: the tokens are cut into ``blocks``, the KV heads go ``heads`` at a time.

    If there are many rows, ``groups`` for each token, a single head goes at a time, its rows in as many ``pieces`` as
    there are threads: what a thread made of its piece it finds in its own cache. Otherwise the rows are one piece.
    """

    groups: int
    heads: int
    pieces: int
    blocks: int

    @classmethod
    def of(cls, tokens: int, groups: int, heads: int) -> Split:
        """For ``tokens`` under ``heads`` KV heads in all."""
        threads, rows = torch.get_num_threads(), tokens * groups
        load = rows * _TILE_KEYS / (_SCORES * threads)
        blocks = min(tokens, max(1, round(load)))
        if rows >= _MANY_ROWS * threads:
            return cls(groups, 1, threads, blocks)
        # All of one number, since a tile's weights have one shape.
        together = [n for n in range(1, heads + 1) if heads % n == 0 and n * load <= 1]
        return cls(groups, max(together, default=1), 1, blocks)


class Tile(NamedTuple):
    """Some keys, and the rows of the tokens that see any of them.

    ``weights``: memory for their exponentials, until the next tile's, [heads * pieces, rows of a piece, keys].
    ``masks``: regions of it [heads, tokens, groups, keys], and 1 where a token sees a key and 0 where not, [tokens, 1,
    keys].
    """

    first_key: int
    num_keys: int
    first_row: int
    num_rows: int
    weights: torch.Tensor
    masks: list[tuple[torch.Tensor, torch.Tensor]]


class RowProducts:
    """Attention of tokens of which the i-th sees the keys up to ``last[i]`` (sorted, [n], on the CPU), its window's.

    Args:
        last: the last key that each token sees.
        window: keys seen, that one included; None is all.
        scratch: memory to compute in.
    """

    def __init__(self, last: torch.Tensor, window: int | None, scratch: Scratch) -> None:
        self._seen, self._window, self._scratch = last.tolist(), window, scratch
        # Masks [n, 1, keys]: of every token in the tile of the last key it sees, and in that of the last it has left.
        triangle = torch.ones(_TILE_KEYS, _TILE_KEYS, dtype=torch.float32, device="cpu").tril_()[:, None]
        self._until = triangle.index_select(0, last % _TILE_KEYS)
        self._since = None if window is None else 1 - triangle.index_select(0, (last - window) % _TILE_KEYS)
        self._tiles: dict[Split, list[Tile]] = {}

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor | None:
        """Attention of ``query`` [B, H, n, D] over ``key``, ``value`` [B, H_kv, S, D], fp32: [B, H, n, D].

        None where scores are too extreme for plain exponentials.
        """
        batch, kv_heads = key.shape[:2]
        n, groups = query.shape[2], query.shape[1] // kv_heads
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        split = Split.of(n, groups, batch * kv_heads)
        # The query heads that share a KV head become rows: no key is repeated. [B * H_kv, tokens * groups, D] here and
        # below, with room behind the last token for zeros that fill pieces up to one size.
        by_token = query.new_empty(batch, kv_heads, n + split.pieces - 1, groups, query.shape[-1])
        by_token[:, :, :n] = query.unflatten(1, (kv_heads, groups)).transpose(2, 3)
        by_token[:, :, n:] = 0
        rows, keys, values = by_token.flatten(2, 3).flatten(0, 1), key.flatten(0, 1).mT, value.flatten(0, 1)
        sampled = by_token[:, :, : n : max(1, n // _SAMPLED_TOKENS)].flatten(2, 3).flatten(0, 1)
        sample = sampled @ keys[:, :, :: max(1, keys.shape[2] // _SAMPLED_KEYS)] * scale
        if not _within(sample, _LEAST_SCORE, _MOST_SCORE):  # spares the work; what decides are the sums
            return None
        mixed = rows.new_zeros(*rows.shape[:2], values.shape[-1])
        total = rows.new_zeros(*rows.shape[:2], 1)
        tiles, items = self._tiles_of(split), split.heads * split.pieces
        rows_shape, mix_shape, sums_shape = ((items, -1, t.shape[-1]) for t in (rows, mixed, total))
        by_heads = (t.split(split.heads) for t in (rows, keys, values, mixed, total))
        for own, k, v, mix, sums in zip(*by_heads, strict=True):
            k, v = k.expand(items, -1, -1), v.expand(items, -1, -1)
            for first_key, num_keys, first_row, num_rows, weights, masks in tiles:
                seeing = own.narrow(1, first_row, num_rows).view(rows_shape)
                weights.baddbmm_(seeing, k.narrow(2, first_key, num_keys), beta=0, alpha=scale).exp_()
                for region, mask in masks:
                    region.mul_(mask)
                sums.narrow(1, first_row, num_rows).view(sums_shape).add_(weights.sum(dim=-1, keepdim=True))
                mix.narrow(1, first_row, num_rows).view(mix_shape).baddbmm_(weights, v.narrow(1, first_key, num_keys))
        mixed, total = (t.view(batch, kv_heads, -1, groups, t.shape[-1])[:, :, :n] for t in (mixed, total))
        # A sum is finite only if all its numbers are, and costs an eighth of their least and largest.
        if not (_within(total, _LEAST_SUM, _MOST_SUM) and math.isfinite(mixed.sum().item())):
            return None
        mixed, total = mixed.transpose(1, 2), total.transpose(1, 2)
        out = query.new_empty(mixed.shape)
        return torch.div(mixed, total, out=out).flatten(2, 3).transpose(1, 2)

    def _tiles_of(self, split: Split) -> list[Tile]:
        """The tiles of all tokens, made once."""
        if split not in self._tiles:
            cuts = [round(len(self._seen) * i / split.blocks) for i in range(split.blocks + 1)]
            most = max(stop - start for start, stop in pairwise(cuts)) + split.pieces - 1
            memory = self._scratch.take(split.heads * most * split.groups * min(_TILE_KEYS, self._seen[-1] + 1))
            self._tiles[split] = [tile for at in pairwise(cuts) for tile in self._cut(split, memory, *at)]
        return self._tiles[split]

    def _cut(self, split: Split, memory: torch.Tensor, start: int, stop: int) -> Iterator[Tile]:
        """The tiles of tokens ``start:stop``."""
        seen, groups = self._seen, split.groups
        top = seen[stop - 1]
        window = top + 1 if self._window is None else self._window

        def first_to_see(key: int) -> int:  # of the tokens, by the last key they see
            return bisect_left(seen, key, start, stop)

        lowest = max(0, seen[start] - window + 1)
        for first in range(lowest - lowest % _TILE_KEYS, top + 1, _TILE_KEYS):
            num_keys = min(_TILE_KEYS, top + 1 - first)
            begin, end = first_to_see(first), first_to_see(first + num_keys - 1 + window)
            if begin == end:
                continue
            num_tokens = end - begin + (begin - end) % split.pieces  # up to a multiple of the pieces
            weights = memory[: split.heads * num_tokens * groups * num_keys]
            weights = weights.view(split.heads, num_tokens, groups, num_keys)
            partly = [(self._until, begin, first_to_see(first + num_keys - 1))]
            if self._since is not None:
                partly.append((self._since, first_to_see(first + window), end))
            masks = [(weights[:, a - begin : b - begin], mask[a:b, :, :num_keys]) for mask, a, b in partly if a < b]
            if end < min(begin + num_tokens, len(seen)):  # these see none of the keys, or see them in another block
                masks.append((weights[:, end - begin :], weights.new_zeros(1)))
            in_pieces = weights.view(split.heads * split.pieces, -1, num_keys)
            yield Tile(first, num_keys, begin * groups, num_tokens * groups, in_pieces, masks)


def _within(numbers: torch.Tensor, least: float, most: float) -> bool:
    """Whether all numbers lie between these; false if there is a NaN."""
    low, high = torch.aminmax(numbers)
    return low.item() > least and high.item() < most
