"""Which of PyTorch's attention kernels a pass of rows may use."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
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
