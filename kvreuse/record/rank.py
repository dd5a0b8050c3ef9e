"""Spearman's rank correlation."""

from __future__ import annotations

import torch


def ranks(values: torch.Tensor) -> torch.Tensor:
    """Ranks from 1 [n], fp64; equal values share the mean of theirs."""
    _, place, counts = torch.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts.double() - 1) / 2)[place]


def spearman(a: torch.Tensor, b: torch.Tensor) -> float:
    """Spearman's rank correlation of two samples [n]; NaN for fewer than two values, or where one side is constant."""
    if a.shape != b.shape or a.dim() != 1:
        raise ValueError(f"samples of shapes {tuple(a.shape)} and {tuple(b.shape)}: give two of the same length")
    if a.numel() < 2:
        return float("nan")
    x, y = (r - r.mean() for r in (ranks(a), ranks(b)))
    return float((x @ y) / (x.norm() * y.norm()))
