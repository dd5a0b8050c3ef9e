"""One forward pass of the model's own layers over a changing subset of the prompt's rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import Cache

from kvreuse import compat
from kvreuse.blend.cache import ProbeCache, StopLayer
from kvreuse.blend.hooks import forward_through, hooked, narrow_query
from kvreuse.blend.index import ROW_DIMS, Index, lists_rows
from kvreuse.blend.kernels import attention_kernels, in_row_blocks, takes_row_blocks
from kvreuse.blend.packing import Packing
from kvreuse.blend.products import Scratch
from kvreuse.blend.rows import PackedMask, RowMask, row_attention
from kvreuse.errors import UnsupportedModelError

if TYPE_CHECKING:
    from kvreuse.blend.graphs import LayerGraphs
    from kvreuse.model import ReuseModel


@dataclass(frozen=True, eq=False)
class FreshKV:
    """K/V just computed for the current rows on one layer, and what the cache held there: [1, H_kv, n, D] each."""

    keys: torch.Tensor
    values: torch.Tensor
    stored_keys: torch.Tensor
    stored_values: torch.Tensor


class StopPass(Exception):
    """Raised by a callback, leaves a pass that has shown all it was run for; its hooks are removed."""


Project = Callable[[], FreshKV]
Narrow = Callable[[int, torch.Tensor, Project], torch.Tensor | None]


class RowPass:
    """Runs ``rows`` (sorted slots) through all layers over a cache (`new_blend_cache`) with K/V of the others.

    Args:
        packing: whose slots they are; every prompt has at least one row. For a single prompt its length will do, and
            slots are its positions.
        narrow: called before each layer with (layer, rows, project); returns the rows that stay, or None for all.
            ``project()`` computes the layer's K/V of all current rows, and nothing else of the layer, and writes them
            to the cache.
        trim_last: only each prompt's last row goes through the last layer's attention and MLP; of the others only K/V
            are needed.
        bottom_right_from: from this layer on mask as the released code does (rank, not position); None never.
        on_layer_start, on_layer_end: called before (ahead of all else) and after each layer with its index.
        on_attention: called with (layer, weights [1, H, n, S] per prompt) of every layer.
    """

    def __init__(
        self,
        model: ReuseModel,
        cache: Cache,
        rows: torch.Tensor,
        packing: Packing | int,
        *,
        narrow: Narrow | None = None,
        trim_last: bool = True,
        bottom_right_from: int | None = None,
        on_layer_start: Callable[[int], None] | None = None,
        on_layer_end: Callable[[int], None] | None = None,
        on_attention: Callable[[int, Sequence[torch.Tensor]], None] | None = None,
    ) -> None:
        self.model, self.cache = model, cache
        self.packing = packing if isinstance(packing, Packing) else Packing.of((packing,))
        self._rows = self._first_rows = Index(rows.cpu())
        self.selected: list[torch.Tensor] = []
        self._narrow, self._trim_last, self._bottom_right_from = narrow, trim_last, bottom_right_from
        self._on_layer_start, self._on_layer_end, self._on_attention = on_layer_start, on_layer_end, on_attention
        self._among_first: Index | None = None  # where the rows are among the first; None: they are all there
        self._masks: dict[Any, Any] = {}
        self._scratch = Scratch()
        self._cuts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._dense = False

    @property
    def rows(self) -> torch.Tensor:
        """Sorted slots [n] of the rows that are still there, on the CPU."""
        return self._rows.on_cpu

    @torch.inference_mode()
    def run(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits [B, V] of every prompt's last row. ``input_ids`` are those of all slots (`Packing.ids`).

        Without ``trim_last`` only a single prompt has logits; the pass is made to look at.
        """
        model = self.model
        last = self.packing.num_prompts
        with ExitStack() as stack:
            for index, layer in enumerate(model.layers):
                stack.enter_context(hooked(layer.register_forward_pre_hook(self._before(index), with_kwargs=True)))
                stack.enter_context(hooked(layer.register_forward_hook(self._after(index))))
                if self._on_attention is not None:
                    attention = compat.attention_module(layer)
                    stack.enter_context(hooked(attention.register_forward_hook(self._watch(index))))
            self._dense = not stack.enter_context(compat.attention_through(model.hf, row_attention))
            stack.enter_context(attention_kernels(model.device))
            mlps: list[Any] = [getattr(layer, "mlp", None) for layer in model.layers]
            for mlp in filter(takes_row_blocks, mlps):
                stack.enter_context(forward_through(mlp, partial(in_row_blocks, mlp.forward)))
            if model.graphs is not None and not self._dense and self._on_attention is None:
                for index, layer in enumerate(model.layers):
                    through = partial(self._through_graphs, model.graphs, index, layer.forward)
                    stack.enter_context(forward_through(layer, through))
            ids = input_ids[self.rows].to(model.device)
            try:
                positions = self.packing.positions(self.rows).to(model.device)
                return compat.run_model(model.hf, ids[None], positions[None], self.cache, logits_to_keep=last)[0]
            finally:
                for cache_layer in self.cache.layers:
                    cache_layer.rows = cache_layer.measure = None

    # -- hooks ------------------------------------------------------------------------------------------------------

    def _before(self, index: int) -> Callable[..., Any]:
        def hook(
            layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if self._on_layer_start is not None:
                self._on_layer_start(index)
            if not args:
                args = (kwargs.pop("hidden_states"),)

            def project() -> FreshKV:
                held = self.cache.layers[index]
                stored = [self._rows.gather(t) for t in (held.keys, held.values)]
                return FreshKV(*self._project(index, layer, args, kwargs), *stored)

            kept = self._narrow(index, self.rows, project) if self._narrow is not None else None
            if kept is not None:
                args = (self._keep(kept, args[0]), *args[1:])
            self.selected.append(self.rows)
            if index == self.model.num_layers - 1 and self._trim_last and self.rows.numel() > self.packing.num_prompts:
                self._project(index, layer, args, kwargs)
                last = self.packing.join([own[-1:] for own in self.packing.split(self.rows)])
                args = (self._keep(last, args[0]), *args[1:])
            self.cache.layers[index].rows = self._rows
            args, kwargs = self._cut(args, kwargs)
            return args, {**kwargs, "attention_mask": self._mask(index, args[0].dtype)}

        return hook

    def _after(self, index: int) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self.cache.layers[index].rows = None
            if self._on_layer_end is not None:
                self._on_layer_end(index)

        return hook

    def _watch(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            assert self._on_attention is not None
            weights = output[1] if isinstance(output, tuple) else None
            if weights is None:
                raise UnsupportedModelError(
                    f"{self.model.name}: its attention returns no weights; load it with attn_implementation='eager' to "
                    "look at them"
                )
            if self.packing.num_prompts == 1:
                weights = (weights,)
            elif isinstance(weights, torch.Tensor):  # eager attention's, over all slots
                mask = self._packed_mask(index, weights.device)
                weights = tuple(weights[:, :, rows, keys] for _, rows, keys in mask.cut())
            self._on_attention(index, [w.detach() for w in weights])

        return hook

    def _through_graphs(
        self, graphs: LayerGraphs, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """A layer over scattered rows; rows without a gap run as they are."""
        held = self.cache.layers[index]
        if held.rows is None or held.rows.run is not None or held.keys is None:
            return forward(*args, **kwargs)
        return graphs.run(index, forward, held, args, kwargs)

    # -- parts ------------------------------------------------------------------------------------------------------

    def _keep(self, kept: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Go on with fewer rows: cut the hidden states [1, n, hidden] to them."""
        index = torch.searchsorted(self.rows, kept.cpu())
        first = self._first_rows.on_cpu
        self._rows = Index(self.rows[index])
        fewer = self.rows.numel() < first.numel()
        self._among_first = Index(torch.searchsorted(first, self.rows)) if fewer else None
        self._masks.clear()
        self._cuts.clear()
        return hidden.index_select(1, Index(index).on(hidden.device))

    def _cut(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Cut what the model hands to every layer whole to the current rows; args[0], the hidden states, is cut.

        By name: positions and rotary tables. By shape [1, n, ...]: positional arguments (Gemma-4's inputs per layer).
        """
        if self._among_first is None:
            return args, kwargs
        n = self._first_rows.on_cpu.numel()
        rest = (self._cut_value(v, 1) if lists_rows(v, n) else v for v in args[1:])
        named = {name: self._cut_value(kwargs[name], dim) for name, dim in ROW_DIMS.items() if name in kwargs}
        return (args[0], *rest), {**kwargs, **named}

    def _cut_value(self, value: Any, dim: int) -> Any:
        if isinstance(value, tuple):
            return tuple(self._cut_value(v, dim) for v in value)
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self._cuts:  # kept with its cut: while it lives no other tensor has its id
            assert self._among_first is not None
            self._cuts[id(value)] = value, value.index_select(dim, self._among_first.on(value.device))
        return self._cuts[id(value)][1]

    def _mask(self, index: int, dtype: torch.dtype) -> RowMask | PackedMask | torch.Tensor:
        """The layer's mask; made once per selection, window and device."""
        held = self.cache.layers[index].keys
        device = self.model.layer_device(index) if held is None else held.device
        key = (self.model.window(index), self._is_released(index), device)
        if key not in self._masks:
            packed = self._packed_mask(index, device)
            mask = packed if self.packing.num_prompts > 1 else packed.parts[0]
            self._masks[key] = mask.additive(dtype)[None, None] if self._dense else mask
        return self._masks[key]

    def _is_released(self, index: int) -> bool:
        return self._bottom_right_from is not None and index >= self._bottom_right_from

    def _packed_mask(self, index: int, device: torch.device) -> PackedMask:
        parts, window, packing = [], self.model.window(index), self.packing
        looked_at = self._on_attention is not None
        for rows, length in zip(packing.split(self.rows), packing.lengths, strict=True):
            last_key = torch.arange(length - rows.numel(), length, device=device) if self._is_released(index) else None
            parts.append(RowMask(Index(rows).on(device), length, window, last_key, looked_at, self._scratch))
        return PackedMask(tuple(parts), packing.starts, packing.num_slots)

    def _project(
        self, index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[torch.Tensor]:
        """Keys and values by the layer's own norm, K and V projection, key norm and rotation on all current rows.

        Nothing behind them is computed; they are written to the cache.
        """
        caught: list[torch.Tensor] = []
        probe = ProbeCache(lambda keys, values: caught.extend((keys, values)))
        name = compat.find_cache(kwargs)
        args, kwargs = self._cut(args, kwargs)
        with narrow_query(compat.attention_module(layer)), suppress(StopLayer):
            layer.forward(*args, **{**kwargs, str(name): probe, "attention_mask": None})
        self.cache.layers[index].scatter(*caught, self._rows)
        return caught
