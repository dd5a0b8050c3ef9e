"""Puts stored K/V at their place in the prompt: values are copied, keys re-rotated (docs/design.md, decision 7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvreuse.blend.packing import Packing
from kvreuse.kv import ChunkKV, StoredKV
from kvreuse.rope import RotaryTable, rotate
from kvreuse.store.loader import LayerLoader
from kvreuse.timing import StageTimer

if TYPE_CHECKING:
    from kvreuse.model import ReuseModel


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
        _place_keys(model, tables, layer, kv, keys, place, moved)
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

    def move(self, layer: int, kv: StoredKV, place: int) -> RotaryTable | None:
        """The rotation of every token of ``kv``; None where it stands at its place already."""
        num_tokens = kv.ids.numel()
        key = (self._model.layer_types[layer], kv.long_rope, kv.start, place, num_tokens)
        if key not in self._moves:
            stop = kv.start + num_tokens
            length = max(stop, self._model.long_rope_length) if kv.long_rope else stop
            encoded_at = self._table(layer, length)[kv.start : stop]
            target = self._table(layer, self._num_tokens)[place : place + num_tokens]
            self._moves[key] = None if target.same_as(encoded_at) else target.minus(encoded_at)
        return self._moves[key]


def _place_keys(
    model: ReuseModel, tables: _Tables, layer: int, kv: StoredKV, keys: torch.Tensor, place: int, out: torch.Tensor
) -> None:
    pairing = model.key_rotation[layer]
    move = None if pairing == "none" else tables.move(layer, kv, place)
    if move is None:
        out.copy_(keys)
    else:
        rotate(keys.to(out.device), move, interleaved=pairing == "interleaved", out=out)


@dataclass(frozen=True, eq=False)
class Placed:
    """Stored K/V and where they go: ``place`` is a position, ``slot`` where that is in the buffers."""

    stored: StoredKV
    source: int
    place: int
    slot: int


class Placement:
    """The K/V buffers, [1, H_kv, slots, D] per layer, filled layer by layer with what the loader hands out.

    Args:
        parts: what goes where; ``source`` is an entry's number among the loader's.
    """

    def __init__(self, model: ReuseModel, parts: Sequence[Placed], packing: Packing, loader: LayerLoader) -> None:
        self._model, self._parts, self._loader = model, parts, loader
        self._tables = _Tables(model, max(packing.lengths))
        example = parts[0].stored
        self.buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        for layer in range(model.num_layers):
            like, device = example.like(layer), model.layer_device(layer)
            keys, values = (
                torch.empty(*shape[:2], packing.num_slots, shape[3], dtype=like.dtype, device=device)
                for shape in (like.keys, like.values)
            )
            packing.clear_padding(keys)
            packing.clear_padding(values)
            self.buffers.append((keys, values))

    def place(self, layer: int, timer: StageTimer) -> None:
        """Wait for a layer's stored K/V, copy the values in and re-rotate the keys, once, in fp32."""
        keys, values = self.buffers[layer]
        loaded = self._loader.take(layer)
        wanted = [(p, kv) for p in self._parts if (kv := loaded[p.source]) is not None]
        for p, kv in wanted:
            values[:, :, p.slot : p.slot + p.stored.ids.numel()].copy_(kv[1])
        timer.mark("load_s", wait=False)
        for p, kv in wanted:
            out = keys[:, :, p.slot : p.slot + p.stored.ids.numel()]
            _place_keys(self._model, self._tables, layer, p.stored, kv[0], p.place, out)
        timer.mark("rotate_s", wait=False)
