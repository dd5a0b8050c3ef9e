"""The only file that knows transformers' versions: names of arguments, where layers are, how rotary tables are made.

transformers 5.24 renamed ``past_key_values`` to ``cache`` in model and layer calls, and some layers still say
``layer_past``; `crop` changed its meaning. Everything here works from 5.0 on.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from transformers import Cache
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvreuse.errors import UnsupportedModelError

ROW_ATTENTION = "kvreuse_rows"  # the name under which the row attention is known while a blend runs


def text_config(hf: nn.Module) -> Any:
    """The decoder's configuration, also of a model that has a vision tower beside it."""
    return hf.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]


def decoder(hf: nn.Module) -> nn.Module:
    """The module that embeds tokens and runs the decoder layers (``hf.model`` in most models)."""
    base: Any = getattr(hf, getattr(hf, "base_model_prefix", "") or "model", hf)
    base = base if base is not hf else getattr(hf, "model", hf)  # Llama-4 names its prefix after the outer model
    for name in ("language_model", "decoder"):
        base = getattr(base, name, base)
    return base


_LAYER_LISTS = ("layers", "h", "blocks")  # most models; Falcon and GPT-2; MPT


def decoder_layers(hf: nn.Module) -> nn.ModuleList:
    """The decoder layers, first to last."""
    base = decoder(hf)
    layers = next((getattr(base, name) for name in _LAYER_LISTS if hasattr(base, name)), None)
    if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
        raise UnsupportedModelError(
            f"{type(hf).__name__}: no list of decoder layers was found (looked for {', '.join(_LAYER_LISTS)} in "
            f"{type(base).__name__}); only decoder-only models with rotary positions are supported"
        )
    return layers


def attention_module(layer: nn.Module) -> nn.Module:
    """The self-attention inside a decoder layer."""
    for name in ("self_attn", "attention", "attn", "self_attention"):
        module = getattr(layer, name, None)
        if isinstance(module, nn.Module):
            return module
    raise UnsupportedModelError(f"{type(layer).__name__} has no self-attention module (linear or recurrent layer?)")


def layer_types(config: Any) -> list[str]:
    """``full_attention`` or ``sliding_attention`` for every layer."""
    named = getattr(config, "layer_types", None)
    if named:
        # Gemma-2 and others name the types; a missing window means that the model never applies one.
        window = getattr(config, "sliding_window", None)
        return [t if window is not None or t != "sliding_attention" else "full_attention" for t in named]
    sliding = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    return ["sliding_attention" if sliding else "full_attention"] * config.num_hidden_layers


@functools.cache
def _parameters(fn: Callable[..., Any]) -> frozenset[str]:
    """Names of a class's method's arguments; read once, for every decoded token asks."""
    return frozenset(inspect.signature(fn).parameters)


def cache_kwarg(hf: nn.Module) -> str:
    """The name of the cache argument of a forward and of ``generate``: ``cache`` or ``past_key_values``."""
    return "cache" if "cache" in _parameters(type(hf).forward) else "past_key_values"


def run_decoder(
    hf: nn.Module, input_ids: torch.Tensor, position_ids: torch.Tensor, cache: Cache | None
) -> torch.Tensor:
    """Run embedding, layers and final norm; no language-model head.

    ``input_ids`` and ``position_ids`` are [B, n]. Returns hidden states [B, n', hidden] (n' < n where hooks cut rows).
    """
    base = decoder(hf)
    kwargs = {cache_kwarg(base): cache, "use_cache": cache is not None}
    return base(input_ids=input_ids, position_ids=position_ids, **kwargs).last_hidden_state


def run_model(
    hf: nn.Module,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    cache: Cache | None,
    attention_mask: torch.Tensor | None = None,
    logits_to_keep: int = 1,
) -> torch.Tensor:
    """The whole causal LM: logits [B, n or logits_to_keep, V]; ``logits_to_keep=0`` keeps all."""
    kwargs: dict[str, Any] = {cache_kwarg(hf): cache, "use_cache": cache is not None}
    if "logits_to_keep" in _parameters(type(hf).forward):
        kwargs["logits_to_keep"] = logits_to_keep
    if attention_mask is not None:
        kwargs["attention_mask"] = attention_mask
    logits = hf(input_ids=input_ids, position_ids=position_ids, **kwargs).logits
    return logits if logits_to_keep == 0 else logits[:, -logits_to_keep:]


def _hooks(module: nn.Module) -> tuple[Any, ...]:
    """What accelerate has hung on a module to run it on another device than its weights lie on."""
    hook = getattr(module, "_hf_hook", None)
    return () if hook is None else tuple(getattr(hook, "hooks", (hook,)))


def execution_device(module: nn.Module) -> torch.device | None:
    """Where a module computes, also where accelerate keeps its weights elsewhere until then (device_map)."""
    for parameter in module.parameters():
        if not parameter.is_meta:
            return parameter.device
    devices = (getattr(hook, "execution_device", None) for part in module.modules() for hook in _hooks(part))
    return next((torch.device(device) for device in devices if device is not None), None)


def offloaded_weight(hf: nn.Module, name: str) -> torch.Tensor | None:
    """A weight that accelerate keeps in main memory or on disk until its layer runs, read; None for any other."""
    owner, _, leaf = name.rpartition(".")
    try:
        hooks = _hooks(hf.get_submodule(owner))
    except AttributeError:  # not the name of a parameter
        return None
    for hook in hooks:
        with suppress(KeyError):  # asking a map whether it has a weight would read it
            return (getattr(hook, "weights_map", None) or {})[leaf]
    return None


def find_cache(kwargs: dict[str, Any]) -> str | None:
    """Under which name a layer was handed its cache (``cache``, ``past_key_values`` or ``layer_past``)."""
    return next((name for name, value in kwargs.items() if isinstance(value, Cache)), None)


def new_cache(layers: list[DynamicLayer]) -> Cache:
    """A Cache that is made of the given layers."""
    return Cache(layers=layers)


def fill_layer(layer: DynamicLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Hand K/V buffers [B, H_kv, S, D] to a cache layer without copying them."""
    layer.dtype, layer.device = keys.dtype, keys.device
    layer.keys, layer.values = keys, values
    layer.is_initialized = True


def truncate(cache: Cache, num_tokens: int) -> None:
    """Drop everything behind the first ``num_tokens`` tokens (``Cache.crop`` means different things by version)."""
    for layer in cache.layers:
        if layer.keys is not None and layer.keys.shape[-2] > num_tokens:
            layer.keys = layer.keys[..., :num_tokens, :]
            layer.values = layer.values[..., :num_tokens, :]


def rotary_tables(hf: nn.Module, layer_type: str, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's own rotary tables (cos, sin), each [n, rotary_dim] in fp32, for ``positions`` [n].

    ``layer_type`` picks the table where a model has several (Gemma-3's local and global theta).
    """
    base = decoder(hf)
    rotary = getattr(base, "rotary_emb", None)
    if rotary is None:
        raise UnsupportedModelError(
            f"{type(hf).__name__} has no rotary module (absolute positions, ALiBi or per-layer rotary code); "
            "its keys cannot be moved to another place in the prompt"
        )
    device = next((b.device for b in rotary.buffers()), positions.device)
    probe = torch.empty(1, dtype=torch.float32, device=device)  # its dtype and device decide those of the tables
    args = (probe, positions[None].to(device))
    if "layer_type" in _parameters(type(rotary).forward) and getattr(rotary, "layer_types", None):
        tables = rotary(*args, layer_type)
    else:
        local = getattr(base, "rotary_emb_local", None)  # Gemma-3 before per-type tables
        tables = (local if local is not None and layer_type == "sliding_attention" else rotary)(*args)
    if not isinstance(tables, tuple) or len(tables) != 2:
        raise UnsupportedModelError(f"{type(hf).__name__}: its rotary module does not return (cos, sin)")
    cos, sin = (t.float().reshape(-1, t.shape[-1]) for t in tables)
    if cos.shape[0] != positions.numel():
        raise UnsupportedModelError(f"{type(hf).__name__}: rotary tables of more than one axis (M-RoPE)")
    return cos, sin


def longrope_switch(config: Any) -> int | None:
    """The prompt length behind which a longrope model changes its frequencies; None for other models."""
    if "longrope" not in rope_types(config):
        return None
    parameters = getattr(config, "rope_parameters", None) or {}
    length = parameters.get("original_max_position_embeddings")
    length = length or getattr(config, "original_max_position_embeddings", None) or 0
    return int(length) or None


def rope_types(config: Any) -> set[str]:
    """The kinds of RoPE scaling the configuration names: default, linear, llama3, yarn, longrope, dynamic, ..."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, dict)] or [parameters]
    return {str(p.get("rope_type", p.get("type", "default"))) for p in nested}


def _calls_attention_interface(hf: nn.Module) -> bool:
    """Whether the model's code looks its attention kernel up by name; Falcon's calls PyTorch's on its own."""
    code = sys.modules[type(attention_module(decoder_layers(hf)[0])).__module__]
    return hasattr(code, "ALL_ATTENTION_FUNCTIONS")


@contextmanager
def attention_through(hf: nn.Module, function: Callable[..., Any]) -> Iterator[bool]:
    """While open, the model's attention modules call ``function`` instead of their own kernel.

    Uses transformers' public attention interface. Yields False, and changes nothing, for a model that runs eager
    attention: its extras (soft capping, sinks) live in that code, and it takes a dense mask.
    """
    config = text_config(hf)
    before = config._attn_implementation
    if before in (None, "eager") or not _calls_attention_interface(hf):
        yield False
        return
    ALL_ATTENTION_FUNCTIONS.register(ROW_ATTENTION, function)
    config._attn_implementation = ROW_ATTENTION
    try:
        yield True
    finally:
        config._attn_implementation = before
