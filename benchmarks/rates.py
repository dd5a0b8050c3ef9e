"""What this machine reaches at the model's own shapes: matrix products, causal attention, copies.

Measured between the methods that are held against them, so that a slow minute slows both, and by the same clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import kvreuse as kr
from benchmarks.flops import Work

Clock = Callable[[], float]

_COPIED_BYTES = 256 * 2**20  # beyond what caches hold
_TRIES = 3


def clock_of(model: kr.ReuseModel) -> Clock:
    """The process's CPU time where one thread computes, so that what else runs on the machine counts little; else time.

    On an idle machine both are the same.
    """
    alone = torch.get_num_threads() == 1 and all(
        model.layer_device(layer).type == "cpu" for layer in range(model.num_layers)
    )
    return time.process_time if alone else time.perf_counter


@dataclass(frozen=True)
class Rates:
    """FLOP/s of the linear layers and of causal attention, and bytes/s (read and written) of a copy."""

    gemm: float
    attention: float
    copy: float

    def floor_s(self, work: Work) -> float:
        """Seconds of the work at these rates.

        Matrix products, or the reading of their weights if that takes longer; plus attention; plus stored K/V put in
        place. Each kind at its own best rate, nothing between them.
        """
        linear = max(work.linear / self.gemm, work.weight_bytes / self.copy)
        return linear + work.attention / self.attention + work.kv_bytes / self.copy

    def gemm_floor_s(self, work: Work) -> float:
        """Seconds if all FLOP, attention's too, ran at the rate of the matrix products, and nothing had to be moved."""
        return work.flops / self.gemm


class Meter:
    """Measures `Rates` at the shapes of a model and a prompt of ``num_tokens``.

    The linear layers are those of a middle layer, on as many rows; attention is PyTorch's causal kernel with the
    model's heads. The best of three tries counts: what the machine can do.
    """

    def __init__(self, model: kr.ReuseModel, num_tokens: int) -> None:
        layer = model.num_layers // 2
        self.clock = clock_of(model)
        self._device, dtype = model.layer_device(layer), model.dtype
        self._linears = [m for m in model.layers[layer].modules() if isinstance(m, nn.Linear)]
        widths = {m.in_features for m in self._linears}
        generator = torch.Generator().manual_seed(0)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(self._device, dtype)

        self._rows = {width: noise(num_tokens, width) for width in widths}
        _, cache = model.prefill(torch.arange(3) + 3)
        heads, held = int(model.config.num_attention_heads), cache.layers[layer]
        self._query = noise(1, heads, num_tokens, held.keys.shape[-1])
        self._key, self._value = (noise(1, t.shape[1], num_tokens, t.shape[-1]) for t in (held.keys, held.values))
        self._from = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=self._device)
        self._to = torch.zeros_like(self._from)
        rows_by_weights = sum(m.in_features * m.out_features for m in self._linears)
        self._gemm_flops = 2 * num_tokens * rows_by_weights
        dims = self._key.shape[-1] + self._value.shape[-1]
        self._attention_flops = heads * dims * num_tokens * (num_tokens + 1)  # 2 * dims per key, half the square

    @torch.inference_mode()
    def measure(self) -> Rates:
        """The rates now."""
        return Rates(
            self._gemm_flops / self._best(self._gemm),
            self._attention_flops / self._best(self._attention),
            2 * _COPIED_BYTES / self._best(lambda: self._to.copy_(self._from)),
        )

    def _gemm(self) -> None:
        for linear in self._linears:
            linear(self._rows[linear.in_features])

    def _attention(self) -> None:
        grouped = self._query.shape[1] != self._key.shape[1]
        F.scaled_dot_product_attention(self._query, self._key, self._value, is_causal=True, enable_gqa=grouped)

    def _best(self, run: Callable[[], object]) -> float:
        return min(self._seconds(run) for _ in range(_TRIES))

    def _seconds(self, run: Callable[[], object]) -> float:
        self._wait()
        started = self.clock()
        run()
        self._wait()
        return self.clock() - started

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
