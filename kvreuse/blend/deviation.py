"""KV deviation: how far stored K/V are from freshly computed ones (CacheBlend, 4.1 and table 1)."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

Metric = Literal["k", "v", "kv"]
METRICS = ("k", "v", "kv")


def squared_deviation(
    metric: Metric,
    keys: torch.Tensor,
    values: torch.Tensor,
    stored_keys: torch.Tensor,
    stored_values: torch.Tensor,
) -> torch.Tensor:
    """Squared L2 distance per token over heads and dimensions, fp32.

    K/V are [1, H_kv, n, D] each; returns [n]. ``metric``: on K, on V, or the sum of both. Keys may be compared before
    or after RoPE: a rotation changes no distance.
    """
    pairs = {"k": [(keys, stored_keys)], "v": [(values, stored_values)]}
    pairs["kv"] = pairs["k"] + pairs["v"]
    squared = [F.mse_loss(a.float(), b.float(), reduction="none") for a, b in pairs[metric]]  # one pass each
    return torch.stack([part.sum(dim=(0, 1, 3)) for part in squared]).sum(dim=0)
