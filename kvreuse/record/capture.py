"""What a pass through the layers leaves for recorders, and the attention weights that follow from it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from kvreuse import compat
from kvreuse.blend.cache import StopLayer
from kvreuse.blend.index import ROW_DIMS
from kvreuse.blend.rows import RowMask
from kvreuse.errors import UnsupportedModelError

if TYPE_CHECKING:
    from kvreuse.model import ReuseModel


@dataclass
class LayerCall:
    """One call of a decoder layer: hidden states [1, n, hidden] as they came in, the other arguments, the mask.

    ``mask`` is what the layer's attention was given in the end.
    """

    hidden: torch.Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mask: Any = None


class Capture:
    """Keeps the last call of each wanted layer. Hooks only look: they return nothing and change nothing."""

    def __init__(self, model: ReuseModel, layers: tuple[int, ...]) -> None:
        self.model, self.layers = model, layers
        self.calls: dict[int, LayerCall] = {}

    def hooks(self, stack: ExitStack) -> None:
        """Register the hooks; they are removed when ``stack`` closes."""
        for index in self.layers:
            layer = self.model.layers[index]
            for module, hook in (
                (layer, self._layer_hook(index)),
                (compat.attention_module(layer), self._mask_hook(index)),
            ):
                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def take(self) -> dict[int, LayerCall]:
        """The calls seen since the last time, forgotten here."""
        calls, self.calls = self.calls, {}
        return calls

    def _layer_hook(self, index: int) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
            # A copy: nothing forbids a layer to work in place.
            self.calls[index] = LayerCall(hidden.detach().clone(), args[1:], rest)

        return hook

    def _mask_hook(self, index: int) -> Callable[..., None]:
        def hook(attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if index in self.calls:  # a projection of K/V alone comes first and is overwritten by the real call
                self.calls[index].mask = kwargs.get("attention_mask")

        return hook


class _HeldCache(Cache):
    """Gives a layer the K/V that its cache holds already, whatever it computes."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self._held = keys, values

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """K/V of the whole prompt."""
        return self._held


@dataclass(frozen=True)
class Rows:
    """Sorted positions: of the rows handed to the first layer, of those that reached this one, of those it ran."""

    first: torch.Tensor
    before: torch.Tensor
    ran: torch.Tensor

    @classmethod
    def of_layer(cls, selected: list[torch.Tensor], layer: int) -> Rows:
        """From a trace's ``selected``: rows drop out between two layers."""
        return cls(selected[0], selected[max(0, layer - 1)], selected[layer])


@torch.inference_mode()
def attention_weights(
    model: ReuseModel, layer: int, call: LayerCall, rows: Rows, wanted: torch.Tensor, cache: Cache
) -> torch.Tensor:
    """Attention weights [H, n, S] (fp32) of the ``wanted`` rows [n] (sorted positions, part of ``rows.ran``).

    The layer's own code computes the queries again from what came into the layer, over the keys its cache holds, under
    the mask it had; the run itself is long over and was not touched. Weights are those of the model's attention: its
    scaling, windows, groups and, where it runs eager attention, its soft cap and sinks.
    """
    held = cache.layers[layer]
    num_tokens = held.keys.shape[2]
    of_hidden, of_first = (torch.searchsorted(r, wanted) for r in (rows.before, rows.first))
    hidden = call.hidden.index_select(1, of_hidden.to(call.hidden.device))
    n = rows.first.numel()

    def cut(value: Any, dim: int) -> Any:
        if isinstance(value, tuple):
            return tuple(cut(v, dim) for v in value)
        if not isinstance(value, torch.Tensor) or value.shape[dim] != n:  # RoPE tables may be shared by all rows
            return value
        return value.index_select(dim, of_first.to(value.device))

    args = tuple(cut(v, 1) if isinstance(v, torch.Tensor) and v.dim() > 1 else v for v in call.args)
    kwargs = {name: cut(value, ROW_DIMS[name]) if name in ROW_DIMS else value for name, value in call.kwargs.items()}
    kwargs[str(compat.find_cache(call.kwargs))] = _HeldCache(held.keys, held.values)
    mask = _mask_of(call.mask, rows, wanted, num_tokens, model.window(layer), held.keys.device)
    caught: list[torch.Tensor] = []

    def catch(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: RowMask,
        scaling: float | None = None,
        **_: Any,
    ) -> Any:
        caught.append(attention_mask.weights(query, key, scaling))
        raise StopLayer

    def catch_output(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not isinstance(output, tuple) or output[1] is None:
            raise UnsupportedModelError(
                f"{model.name}: its attention returns no weights; load it with attn_implementation='eager' to look at "
                "them"
            )
        caught.append(output[1].float())
        raise StopLayer

    module = model.layers[layer]
    with ExitStack() as stack:
        direct = stack.enter_context(compat.attention_through(model.hf, catch))
        if not direct:
            stack.callback(compat.attention_module(module).register_forward_hook(catch_output).remove)
        given = mask if direct else _dense(call.mask, mask, rows, wanted, hidden.dtype)
        with suppress(StopLayer):
            module.forward(hidden, *args, **{**kwargs, "attention_mask": given})
    return caught[0][0]


def _mask_of(
    seen: Any, rows: Rows, wanted: torch.Tensor, num_tokens: int, window: int | None, device: torch.device
) -> RowMask:
    """The mask by true position; by rank where the run's own was (the released code's)."""
    last_key = None
    if isinstance(seen, RowMask) and seen.last_key is not None:
        # The last layer runs the last row alone, so its mask is made again for all that reached it.
        by_rank = torch.arange(num_tokens - rows.ran.numel(), num_tokens)
        last_key = by_rank[torch.searchsorted(rows.ran, wanted)].to(device)
    return RowMask(wanted.to(device), num_tokens, window, last_key)


def _dense(seen: Any, mask: RowMask, rows: Rows, wanted: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The additive mask [1, 1, n, S] for eager attention: the rows of the run's own where it has them."""
    if isinstance(seen, torch.Tensor) and seen.dim() == 4 and seen.shape[2] == rows.ran.numel():
        return seen[:, :, torch.searchsorted(rows.ran, wanted).to(seen.device)]
    return mask.additive(dtype)[None, None]
