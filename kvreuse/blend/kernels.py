"""How a pass of rows runs what PyTorch has several ways for: attention kernels, and an MLP in blocks of rows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel


def attention_kernels(device: torch.device) -> AbstractContextManager[Any]:
    """While open, attention on a GPU is PyTorch's flash kernel, or under a mask its memory-efficient one, not cuDNN's.

    PyTorch prefers cuDNN's on data centres' Hopper and Blackwell GPUs. That one builds a plan for each number of rows
    and of keys it has not seen (https://github.com/pytorch/pytorch/pull/155958), and here every layer has its own.
    The choice is the process's: what another thread runs meanwhile is held to it as well.
    """
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


# About how many rows of an MLP at a time on a CPU: of thousands, what is between its products leaves the cache
# (docs/performance.md).
_MLP_ROWS = 512


def takes_row_blocks(mlp: Any) -> bool:
    """Whether a module is a dense MLP in fp32 on a CPU, every row of which is computed by itself."""
    down = getattr(mlp, "down_proj", None)
    return type(down) is nn.Linear and down.weight.device.type == "cpu" and down.weight.dtype == torch.float32


def in_row_blocks(forward: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
    """``forward`` of ``hidden`` [1, n, hidden], a block of rows at a time; no block is a small remainder."""
    count = round(hidden.shape[1] / _MLP_ROWS)
    if count <= 1:
        return forward(hidden)
    out = torch.empty_like(hidden)
    for part, rows in zip(out.tensor_split(count, dim=1), hidden.tensor_split(count, dim=1), strict=True):
        part.copy_(forward(rows))
    return out
