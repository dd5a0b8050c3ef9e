"""One forward pass of the model's own layers over a changing subset of the prompt's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import Cache

from kvreuse import compat
from kvreuse.blend.cache import ProbeCache, StopLayer
from kvreuse.blend.rows import RowMask, row_attention
from kvreuse.errors import UnsupportedModelError

if TYPE_CHECKING:
    from kvreuse.model import ReuseModel


@dataclass(frozen=True, eq=False)
class FreshKV:
    """K/V just computed for the current rows on one layer, and what the cache held there: [1, H_kv, n, D] each."""

    keys: torch.Tensor
    values: torch.Tensor
    stored_keys: torch.Tensor
    stored_values: torch.Tensor


# Along which dimension the layer arguments that differ by row list the rows.
ROW_DIMS = {"position_embeddings": -2, "position_ids": -1, "cache_position": -1}


class StopPass(Exception):
    """Raised by a callback, leaves a pass that has shown all it was run for; its hooks are removed."""


Project = Callable[[], FreshKV]
Narrow = Callable[[int, torch.Tensor, Project], torch.Tensor | None]


class RowPass:
    """Runs ``rows`` (sorted positions) through all layers over a cache (`new_blend_cache`) with K/V of the others.

    Args:
        narrow: called before each layer with (layer, rows, project); returns the rows that stay, or None for all.
            ``project()`` computes the layer's K/V of all current rows, and nothing else of the layer, and writes them
            to the cache.
        trim_last: only the last row goes through the last layer's attention and MLP; of the others only K/V are
            needed.
        bottom_right_from: from this layer on mask as the released code does (rank, not position); None never.
        on_layer_start, on_layer_end: called before (ahead of all else) and after each layer with its index.
        on_attention: called with (layer, weights [1, H, n, S]) of every layer.
    """

    def __init__(
        self,
        model: ReuseModel,
        cache: Cache,
        rows: torch.Tensor,
        num_tokens: int,
        *,
        narrow: Narrow | None = None,
        trim_last: bool = True,
        bottom_right_from: int | None = None,
        on_layer_start: Callable[[int], None] | None = None,
        on_layer_end: Callable[[int], None] | None = None,
        on_attention: Callable[[int, torch.Tensor], None] | None = None,
    ) -> None:
        self.model, self.cache, self.num_tokens = model, cache, num_tokens
        self.rows = self._first_rows = rows.to(model.device)
        self.selected: list[torch.Tensor] = []
        self._narrow, self._trim_last, self._bottom_right_from = narrow, trim_last, bottom_right_from
        self._on_layer_start, self._on_layer_end, self._on_attention = on_layer_start, on_layer_end, on_attention
        self._index: torch.Tensor | None = None  # of the rows among the first; None: they are all there
        self._masks: dict[Any, Any] = {}
        self._cuts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._dense = False

    @torch.inference_mode()
    def run(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits [1, V] of the last row. ``input_ids`` [S] are the whole prompt's."""
        model, rows = self.model, self.rows
        with ExitStack() as stack:
            for index, layer in enumerate(model.layers):
                stack.enter_context(_hooked(layer.register_forward_pre_hook(self._before(index), with_kwargs=True)))
                stack.enter_context(_hooked(layer.register_forward_hook(self._after(index))))
                if self._on_attention is not None:
                    attention = compat.attention_module(layer)
                    stack.enter_context(_hooked(attention.register_forward_hook(self._watch(index))))
            self._dense = not stack.enter_context(compat.attention_through(model.hf, row_attention))
            ids = input_ids.to(model.device)[rows]
            try:
                return compat.run_model(model.hf, ids[None], rows[None], self.cache)[:, -1]
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
                return self._project(index, layer, args, kwargs)

            kept = self._narrow(index, self.rows, project) if self._narrow is not None else None
            if kept is not None:
                args = (self._keep(kept, args[0]), *args[1:])
            self.selected.append(self.rows.cpu())
            if index == self.model.num_layers - 1 and self._trim_last and self.rows.numel() > 1:
                project()
                args = (self._keep(self.rows[-1:], args[0]), *args[1:])
            self.cache.layers[index].rows = self.rows
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
            if not isinstance(output, tuple) or output[1] is None:
                raise UnsupportedModelError(
                    f"{self.model.name}: its attention returns no weights; load it with attn_implementation='eager' to "
                    "look at them"
                )
            self._on_attention(index, output[1].detach())

        return hook

    # -- parts ------------------------------------------------------------------------------------------------------

    def _keep(self, kept: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Go on with fewer rows: cut the hidden states [1, n, hidden] to them."""
        index = torch.searchsorted(self.rows, kept.to(self.rows.device))
        self.rows = self.rows[index]
        fewer = self.rows.numel() < self._first_rows.numel()
        self._index = torch.searchsorted(self._first_rows, self.rows) if fewer else None
        self._masks.clear()
        self._cuts.clear()
        return hidden.index_select(1, index.to(hidden.device))

    def _cut(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Cut what the model hands to every layer whole to the current rows; args[0], the hidden states, is cut.

        By name: positions and rotary tables. By shape [1, n, ...]: positional arguments (Gemma-4's inputs per layer).
        """
        if self._index is None:
            return args, kwargs
        n = self._first_rows.numel()
        by_row = [isinstance(v, torch.Tensor) and v.dim() > 1 and v.shape[1] == n for v in args[1:]]
        rest = (self._cut_value(v, 1) if cut else v for v, cut in zip(args[1:], by_row, strict=True))
        named = {name: self._cut_value(kwargs[name], dim) for name, dim in ROW_DIMS.items() if name in kwargs}
        return (args[0], *rest), {**kwargs, **named}

    def _cut_value(self, value: Any, dim: int) -> Any:
        if isinstance(value, tuple):
            return tuple(self._cut_value(v, dim) for v in value)
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self._cuts:  # kept with its cut: while it lives no other tensor has its id
            assert self._index is not None
            self._cuts[id(value)] = value, value.index_select(dim, self._index.to(value.device))
        return self._cuts[id(value)][1]

    def _mask(self, index: int, dtype: torch.dtype) -> RowMask | torch.Tensor:
        """The layer's mask; made once per selection, window and device."""
        device = self.cache.layers[index].keys.device
        released = self._bottom_right_from is not None and index >= self._bottom_right_from
        key = (self.model.window(index), released, device)
        if key not in self._masks:
            rows, n = self.rows.to(device), self.rows.numel()
            last_key = torch.arange(self.num_tokens - n, self.num_tokens, device=device) if released else None
            mask = RowMask(rows, self.num_tokens, key[0], last_key, return_weights=self._on_attention is not None)
            self._masks[key] = mask.additive(dtype)[None, None] if self._dense else mask
        return self._masks[key]

    def _project(self, index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FreshKV:
        """The layer's own norm, K and V projection, key norm and rotation on all current rows; nothing behind."""
        caught: list[torch.Tensor] = []
        probe = ProbeCache(lambda keys, values: caught.extend((keys, values)))
        name = compat.find_cache(kwargs)
        args, kwargs = self._cut(args, kwargs)
        with _narrow_query(compat.attention_module(layer)), suppress(StopLayer):
            layer.forward(*args, **{**kwargs, str(name): probe, "attention_mask": None})
        keys, values = caught
        held = self.cache.layers[index]
        rows = self.rows.to(held.keys.device)
        fresh = FreshKV(keys, values, held.keys[:, :, rows], held.values[:, :, rows])
        held.scatter(keys, values, rows)
        return fresh


@contextmanager
def _hooked(handle: Any) -> Iterator[None]:
    """Remove a hook on exit, also after an error."""
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _narrow_query(attention: nn.Module) -> Iterator[None]:
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

    with _hooked(q_proj.register_forward_pre_hook(first_row)), _hooked(q_proj.register_forward_hook(repeat)):
        yield
