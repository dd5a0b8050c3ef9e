"""Small chunk K/V for tests of the store."""

from __future__ import annotations

import torch
from tiny import ids

import kvreuse as kr


def entry(seed: int, tokens: int = 4, layers: int = 2, dim: int = 2) -> kr.ChunkKV:
    """Random K/V, the same for the same arguments."""
    g = torch.Generator().manual_seed(seed)
    keys, values = (tuple(torch.randn(1, 1, tokens, dim, generator=g) for _ in range(layers)) for _ in range(2))
    return kr.ChunkKV(ids(tokens, seed), 3, keys, values)


def same(a: kr.ChunkKV, b: kr.ChunkKV) -> bool:
    """Equal in every bit."""
    pairs = zip((a.ids, *a.keys, *a.values), (b.ids, *b.keys, *b.values), strict=True)
    return (a.start, a.long_rope) == (b.start, b.long_rope) and all(torch.equal(x, y) for x, y in pairs)
