"""Indices of a pass's rows, known to the CPU and copied once to each device that needs them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

# Along which dimension the layer arguments that differ by row list the rows.
ROW_DIMS = {"position_embeddings": -2, "position_ids": -1, "cache_position": -1}


def lists_rows(value: Any, n: int) -> bool:
    """Whether a positional argument of a layer lists its ``n`` rows: [1, n, ...]."""
    return isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == n


@dataclass(frozen=True, eq=False)
class Index:
    """Sorted indices [n] on the CPU, where rows are chosen; `on` has them elsewhere.

    To ask a GPU's tensor for a number waits until the GPU has done all it was given, here in the middle of a layer.
    """

    on_cpu: torch.Tensor
    _copies: dict[torch.device, torch.Tensor] = field(default_factory=dict, init=False, repr=False)
    _flat: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict, init=False, repr=False)

    def on(self, device: torch.device) -> torch.Tensor:
        """The indices on a device."""
        if device not in self._copies:
            self._copies[device] = self.on_cpu.to(device, non_blocking=device.type == "cuda")
        return self._copies[device]

    def gather(self, held: torch.Tensor) -> torch.Tensor:
        """A copy of these rows of ``held`` [1, H, S, D]: [1, H, n, D]."""
        heads, slots, dim = held.shape[1:]
        if held.device.type != "cpu":
            return held.index_select(2, self.on(held.device))
        # Along dimension 0 PyTorch's CPU kernel copies whole rows, which takes a third of the time.
        if (heads, slots) not in self._flat:
            first = torch.arange(0, heads * slots, slots, device="cpu")  # of each head
            self._flat[heads, slots] = (first[:, None] + self.on_cpu).flatten()
        return held.flatten(0, 2).index_select(0, self._flat[heads, slots]).view(1, heads, -1, dim)

    @cached_property
    def run(self) -> slice | None:
        """The indices as a slice if there is no gap between them."""
        first, last = int(self.on_cpu[0]), int(self.on_cpu[-1])
        return slice(first, last + 1) if last - first + 1 == self.on_cpu.numel() else None
