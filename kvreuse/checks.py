"""The gate: may this model's K/V be moved and patched? Checked by numbers, not by name (docs/design.md, decision 7)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache

from kvreuse import compat
from kvreuse.errors import UnsupportedModelError
from kvreuse.rope import rotate

if TYPE_CHECKING:
    from kvreuse.model import ReuseModel

# Largest difference allowed, relative to the largest number: about three times the rounding seen over 30 real layers.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 1.5e-2, torch.bfloat16: 8e-2}
_SHIFT = 37


def _relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).abs().max() / b.float().abs().max().clamp_min(1e-30))


def _tolerance(model: ReuseModel) -> float:
    """The type's rounding, or four times what splitting a prefill changes on this model, if that is more.

    fp32 leaves no room for doubt. Low precision rounds more in larger models, and quantized activations depend on which
    rows run together. bitsandbytes rounds them to 8 bits, or on a CPU to bfloat16, whatever the model's type is.
    """
    quantized = getattr(model.hf, "is_quantized", False)
    limit = _TOLERANCE.get(torch.bfloat16 if quantized else model.dtype, 8e-2)
    return max(limit, 4 * _noise(model)) if quantized or model.dtype.itemsize < 4 else limit


@torch.inference_mode()
def _noise(model: ReuseModel) -> float:
    """Relative difference of the logits between a prefill in one piece and in two, by Hugging Face's own cache.

    The largest of three prompts: in one of them no rounding of an 8-bit activation may happen to fall another way.
    """
    found = []
    positions = torch.arange(24, device=model.device)
    for seed in (4, 5, 6):
        ids, cache = _random_ids(model, 24, seed).to(model.device), DynamicCache()
        compat.run_model(model.hf, ids[None, :16], positions[None, :16], cache)
        pieces = compat.run_model(model.hf, ids[None, 16:], positions[None, 16:], cache)
        found.append(_relative_error(pieces[:, -1], model.prefill(ids)[0]))
    return max(found)


def _random_ids(model: ReuseModel, count: int, seed: int) -> torch.Tensor:
    high = min(int(model.config.vocab_size), 1000)
    return torch.randint(min(10, high - 1), high, (count,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def detect_key_rotation(model: ReuseModel, limit: float | None = None) -> list[str]:
    """Per layer ``half``, ``interleaved`` or ``none``: which rotation takes keys at positions 0.. to the keys of a
    shifted run. ``limit`` is the relative error allowed, by default the gate's.

    Raises:
        UnsupportedModelError: if none does (absolute or learned positions, unknown rotary code, dynamic frequencies).
    """
    limit = _tolerance(model) if limit is None else limit
    kinds = compat.rope_types(model.config)
    if any("dynamic" in kind for kind in kinds):
        raise UnsupportedModelError(
            f"{model.name}: dynamic NTK RoPE changes its frequencies with the longest text seen so far, so stored "
            "keys have no fixed angle to rotate from"
        )
    ids = _random_ids(model, 8, seed=0).to(model.device)[None]
    caches = []
    # Both runs with the same frequencies: on a longrope model, below its switch.
    shifted = min(_SHIFT, (compat.longrope_switch(model.config) or model.max_context) - 8)
    for shift in (0, shifted):
        cache = DynamicCache()
        compat.run_decoder(model.hf, ids, torch.arange(shift, shift + 8, device=model.device)[None], cache)
        caches.append(cache)
    written = sum(layer.keys is not None for layer in caches[0].layers)
    if written != model.num_layers:
        raise UnsupportedModelError(
            f"{model.name} ({type(model.hf).__name__}): {model.num_layers} layers, but {written} keep keys and values: "
            "layers share them or run more than once, so they cannot be replaced layer by layer"
        )
    found = []
    for layer in range(model.num_layers):
        table = model.rotary_table(layer, shifted + 8)
        here, there = (cache.layers[layer].values for cache in caches)
        if not _relative_error(here, there) <= limit:
            raise UnsupportedModelError(
                f"{model.name}: what layer {layer} keeps as values changes with the position (relative error "
                f"{_relative_error(here, there):.1e}; multi-head latent attention keeps rotated keys there); only keys "
                "can be moved to another place in the prompt"
            )
        here, there = (cache.layers[layer].keys for cache in caches)
        move = table[shifted : shifted + 8].minus(table[:8])
        candidates = {
            "none": here,
            "half": rotate(here, move, interleaved=False),
            "interleaved": rotate(here, move, interleaved=True),
        }
        errors = {kind: _relative_error(keys, there) for kind, keys in candidates.items()}
        best = min(errors, key=lambda kind: errors[kind])
        if not errors[best] <= limit:
            raise UnsupportedModelError(
                f"{model.name}: layer {layer}'s keys at shifted positions are not a rotation of those at position 0 "
                f"(relative error {errors[best]:.1e}); its positions are not rotary, or rotate in a way this library "
                "does not know"
            )
        found.append(best)
    return found


def check_model(model: ReuseModel) -> None:
    """Raise `UnsupportedModelError` unless reuse is right on this model.

    Compared with full prefill: one chunk at its own place gives its logits; two chunks at ratio 1, and a part of the
    rows over its own K/V, give its logits and K/V; a shifted chunk's layer-0 keys are those of direct rotation, its
    values do not change. Runs once per model, on a few random tokens.
    """
    from kvreuse.blend.cache import new_blend_cache
    from kvreuse.blend.placement import rerotate_keys
    from kvreuse.blend.row_pass import RowPass
    from kvreuse.kv import encode_chunk
    from kvreuse.methods import CacheBlend, FullReuse
    from kvreuse.prompt import RagPrompt
    from kvreuse.store import KVStore

    first, second, question = (_random_ids(model, n, seed) for n, seed in ((12, 1), (11, 2), (5, 3)))
    limit = _tolerance(model)

    def require(what: str, error: float) -> None:
        if not error <= limit:
            raise UnsupportedModelError(
                f"{model.name} ({type(model.hf).__name__}, {model.dtype}): {what} differs from full prefill by "
                f"{error:.1e} (allowed {limit:.0e}); reuse would be wrong on this model"
            )

    one, two = RagPrompt([], [first], question), RagPrompt([], [first, second], question)
    ids = one.input_ids.to(model.device)[None]
    compat.run_model(model.hf, ids, torch.arange(ids.shape[1], device=model.device)[None], None)  # an error is its own
    model._checked = True  # the check itself reuses
    try:
        model._key_rotation = detect_key_rotation(model, limit)
        store = KVStore("1GiB")
        reuse, blend = FullReuse(context="bare"), CacheBlend(ratio=1.0, context="bare", schedule="constant")
        reuse.encode(model, one, store)
        logits, _ = model.prefill(one.input_ids)
        require("one chunk at its own place", _relative_error(reuse.prefill(model, one, store).logits, logits))
        blend.encode(model, two, store)
        logits, cache = model.prefill(two.input_ids)
        result = blend.prefill(model, two, store)
        require("two chunks, all recomputed,", _relative_error(result.logits, logits))
        for layer, (ours, full) in enumerate(zip(result.cache.layers, cache.layers, strict=True)):
            require(f"layer {layer}'s keys, all recomputed,", _relative_error(ours.keys, full.keys))
            require(f"layer {layer}'s values, all recomputed,", _relative_error(ours.values, full.values))
        # Over full prefill's own K/V any part of the rows, recomputed, gives full prefill again.
        part = torch.cat([torch.tensor([2, 3, 14]), torch.arange(two.num_context, two.num_tokens)])
        exact = new_blend_cache([(held.keys.clone(), held.values.clone()) for held in cache.layers])
        every = torch.arange(two.num_tokens)
        row_pass = RowPass(model, exact, every, two.num_tokens, narrow=lambda layer, *_: part if layer == 1 else None)
        require("a part of the rows, recomputed,", _relative_error(row_pass.run(two.input_ids), logits))
        for layer, (ours, full) in enumerate(zip(exact.layers, cache.layers, strict=True)):
            require(f"layer {layer}'s keys, in part recomputed,", _relative_error(ours.keys, full.keys))
            require(f"layer {layer}'s values, in part recomputed,", _relative_error(ours.values, full.values))
        moved = rerotate_keys(model, encode_chunk(model, first[:0], second), first.numel(), two.num_tokens)
        there = slice(first.numel(), first.numel() + second.numel())
        require("a moved chunk's layer-0 keys", _relative_error(moved[0], cache.layers[0].keys[:, :, there]))
    except BaseException as error:
        model._checked = False
        if isinstance(error, UnsupportedModelError | torch.OutOfMemoryError) or not isinstance(error, Exception):
            raise
        raise UnsupportedModelError(
            f"{model.name} ({type(model.hf).__name__}): its layers do not run on a part of the prompt over a cache of "
            f"the whole ({type(error).__name__}: {error})"
        ) from error
