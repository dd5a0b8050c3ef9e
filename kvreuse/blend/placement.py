"""Puts stored K/V at their place in the prompt: values are copied, keys re-rotated (docs/design.md, decision 7)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kvreuse.blend.plan import Segment
from kvreuse.kv import ChunkKV
from kvreuse.rope import RotaryTable, rotate

if TYPE_CHECKING:
    from kvreuse.model import ReuseModel

Buffers = list[tuple[torch.Tensor, torch.Tensor]]


def rerotate_keys(model: ReuseModel, kv: ChunkKV, place: int, num_tokens: int) -> tuple[torch.Tensor, ...]:
    """Keys of ``kv`` as if its first token stood at position ``place`` of a prompt of ``num_tokens`` tokens.

    Per layer [1, H_kv, T, D]; the stored keys are not changed. Values carry no position.
    """
    if place < 0:
        raise ValueError(f"place={place}: positions start at 0")
    tables = _Tables(model, max(num_tokens, place + kv.num_tokens))
    out = []
    for layer, keys in enumerate(kv.keys):
        moved = torch.empty_like(keys)
        _place_keys(model, tables, layer, kv, place, moved)
        out.append(moved)
    return tuple(out)


class _Tables:
    """Rotary tables of one prompt, and the rotations from where chunks were encoded; each made once."""

    def __init__(self, model: ReuseModel, num_tokens: int) -> None:
        self._model, self._num_tokens = model, num_tokens
        self._made: dict[tuple[str, int], RotaryTable] = {}
        self._moves: dict[tuple[str, bool, int, int, int], RotaryTable | None] = {}

    def _table(self, layer: int, num_tokens: int) -> RotaryTable:
        key = (self._model.layer_types[layer], num_tokens)
        if key not in self._made:
            self._made[key] = self._model.rotary_table(layer, num_tokens)
        return self._made[key]

    def move(self, layer: int, kv: ChunkKV, place: int) -> RotaryTable | None:
        """The rotation of every token of ``kv``; None where it stands at its place already."""
        key = (self._model.layer_types[layer], kv.long_rope, kv.start, place, kv.num_tokens)
        if key not in self._moves:
            stop = kv.start + kv.num_tokens
            length = max(stop, self._model.long_rope_length) if kv.long_rope else stop
            encoded_at = self._table(layer, length)[kv.start : stop]
            target = self._table(layer, self._num_tokens)[place : place + kv.num_tokens]
            self._moves[key] = None if target.same_as(encoded_at) else target.minus(encoded_at)
        return self._moves[key]


def _place_keys(model: ReuseModel, tables: _Tables, layer: int, kv: ChunkKV, place: int, out: torch.Tensor) -> None:
    pairing = model.key_rotation[layer]
    move = None if pairing == "none" else tables.move(layer, kv, place)
    if move is None:
        out.copy_(kv.keys[layer])
    else:
        rotate(kv.keys[layer], move, interleaved=pairing == "interleaved", out=out)


def load(model: ReuseModel, segments: list[Segment], num_tokens: int) -> tuple[Buffers, list[Segment]]:
    """Buffers for the whole prompt's K/V with the stored values copied in, and the segments with keys on their device.

    The keys follow with `place_keys`.
    """
    example = next(s.stored for s in segments if s.stored is not None)
    buffers: Buffers = []
    for layer in range(model.num_layers):
        device = model.layer_device(layer)
        buffers.append(
            tuple(  # type: ignore[arg-type]
                torch.empty(*t.shape[:2], num_tokens, t.shape[3], dtype=t.dtype, device=device)
                for t in (example.keys[layer], example.values[layer])
            )
        )
        for s in segments:
            if s.stored is not None:
                buffers[layer][1][:, :, s.place : s.stop].copy_(s.stored.values[layer])

    def with_keys_loaded(kv: ChunkKV) -> ChunkKV:
        return replace(kv, keys=tuple(k.to(b.device) for k, (b, _) in zip(kv.keys, buffers, strict=True)))

    return buffers, [s if s.stored is None else replace(s, stored=with_keys_loaded(s.stored)) for s in segments]


def place_keys(model: ReuseModel, segments: list[Segment], num_tokens: int, buffers: Buffers) -> None:
    """Write the stored keys, re-rotated once in fp32, into the buffers."""
    tables = _Tables(model, num_tokens)
    for layer, (keys, _) in enumerate(buffers):
        for s in segments:
            if s.stored is not None:
                _place_keys(model, tables, layer, s.stored, s.place, keys[:, :, s.place : s.stop])
