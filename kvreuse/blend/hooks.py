"""Hooks of a pass that last as long as their block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def hooked(handle: Any) -> Iterator[None]:
    """Remove a hook on exit, also after an error."""
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def forward_through(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Have calls of this one module run ``forward`` while the block is open; its class is left alone."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


@contextmanager
def narrow_query(attention: nn.Module) -> Iterator[None]:
    """Project one row's query and repeat it without copying: while only K/V are wanted, queries cost nothing.

    A packed QKV projection (Phi-3, GPT-NeoX) has no separate query and runs as it is.
    """
    q_proj = getattr(attention, "q_proj", None)
    if not isinstance(q_proj, nn.Linear):
        yield
        return
    length: list[int] = []

    def first_row(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        length.append(args[0].shape[1])
        return (args[0][:, :1],)

    def repeat(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return output.expand(-1, length[-1], -1)

    with hooked(q_proj.register_forward_pre_hook(first_row)), hooked(q_proj.register_forward_hook(repeat)):
        yield
