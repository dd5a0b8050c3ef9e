"""The scatter-update Cache: freshly computed K/V of some rows are written into the stored K/V of the whole prompt.

Hugging Face attention calls ``cache.update(keys, values, layer)`` behind RoPE and norms and attends over what comes
back, so a cache that scatters *is* selective recompute (CacheBlend, 4.2, figure 5b), on unmodified models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from kvreuse import compat
from kvreuse.blend.deviation import Metric, squared_deviation
from kvreuse.blend.index import Index


class BlendLayer(DynamicLayer):
    """K/V [1, H_kv, S, D] of one layer.

    While ``rows`` is set an update scatters there; afterwards it appends as usual. ``num_slots``: S of a layer that
    holds nothing yet; the first scatter allocates it.
    """

    def __init__(self, num_slots: int = 0) -> None:
        super().__init__()
        self._num_slots = num_slots
        self.rows: Index | None = None
        self.measure: Metric | None = None  # set: the deviation of the rows is taken before they are overwritten
        self.deviation: torch.Tensor | None = None

    def scatter(self, keys: torch.Tensor, values: torch.Tensor, rows: Index) -> None:
        """Write K/V [1, H_kv, n, D] of the sorted slots ``rows`` [n]."""
        if self.keys is None:
            new = (t.new_zeros(*t.shape[:2], self._num_slots, t.shape[3]) for t in (keys, values))
            compat.fill_layer(self, *new)
        for whole, part in ((self.keys, keys), (self.values, values)):
            if rows.run is not None:  # a copy is cheaper than a scatter
                whole[:, :, rows.run] = part
            else:
                whole.index_copy_(2, rows.on(whole.device), part)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scatter the rows and return K/V of the whole prompt."""
        if self.rows is None:
            return super().update(key_states, value_states, *args, **kwargs)
        if self.measure is not None:
            old = self.rows.gather(self.keys), self.rows.gather(self.values)
            self.deviation = squared_deviation(self.measure, key_states, value_states, *old)
        self.scatter(key_states, value_states, self.rows)
        return self.keys, self.values


def new_blend_cache(buffers: list[tuple[torch.Tensor, torch.Tensor]]) -> Cache:
    """A Cache over preallocated per-layer (keys, values), each [1, H_kv, S, D]."""
    layers = []
    for keys, values in buffers:
        layer = BlendLayer()
        compat.fill_layer(layer, keys, values)
        layers.append(layer)
    return compat.new_cache(list(layers))


def empty_blend_cache(num_layers: int, num_slots: int) -> Cache:
    """A Cache of ``num_slots`` tokens, none of them known: for a pass that runs them all."""
    return compat.new_cache([BlendLayer(num_slots) for _ in range(num_layers)])


class StopLayer(Exception):
    """Leaves a decoder layer once its keys and values are known."""


class ProbeCache(Cache):
    """Catches a layer's K/V and stops the layer there: the K/V projection, without attention and MLP."""

    def __init__(self, catch: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self._catch = catch

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Hand over the K/V; does not return."""
        self._catch(key_states, value_states)
        raise StopLayer
