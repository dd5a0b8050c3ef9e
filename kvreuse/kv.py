"""One chunk's keys and values, how they are computed, and the key under which they are found again."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol, get_args

import torch
from transformers import Cache, DynamicCache

from kvreuse import compat

if TYPE_CHECKING:
    from kvreuse.model import ReuseModel

EncoderContext = Literal["bare", "bos", "prefix"]


class StoredKV(Protocol):
    """K/V of one run of tokens wherever they are kept: in memory as they are, compressed, or on disk.

    ``start``, ``long_rope``: as in `ChunkKV`. ``in_memory``: `layer` reads no storage device.
    """

    @property
    def ids(self) -> torch.Tensor:
        """Token ids [T]."""

    @property
    def start(self) -> int:
        """Position the first token was computed at."""

    @property
    def long_rope(self) -> bool:
        """With a longrope model's frequencies for long prompts."""

    @property
    def in_memory(self) -> bool:
        """False: `layer` reads a storage device."""

    def like(self, layer: int) -> KVShape:
        """Shapes and type of a layer's K/V, without reading them."""

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, [1, H_kv, T, D] each, on the CPU or wherever they are.

        Raises:
            LostEntryError: the entry's file can no longer be read or is not what was written.
        """

    def load(self) -> ChunkKV:
        """All layers in memory; raises as `layer` does."""

    def close(self) -> None:
        """Let go of what reading holds (an open file)."""


@dataclass(frozen=True)
class KVShape:
    """Shape [1, H_kv, T, D] of one layer's keys and values, and their type as the model computes them."""

    keys: tuple[int, ...]
    values: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class ChunkKV:
    """K/V of one run of tokens: per layer [1, H_kv, T, D], keys rotated at positions ``start .. start + T``.

    ``long_rope``: with the frequencies a longrope model uses for long prompts; False for all other models.
    Never changed after it is made: a blend copies out of it.
    """

    ids: torch.Tensor
    start: int
    keys: tuple[torch.Tensor, ...] = field(repr=False)
    values: tuple[torch.Tensor, ...] = field(repr=False)
    long_rope: bool = False

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.ids.numel()

    @property
    def num_bytes(self) -> int:
        """Bytes of keys, values and ids."""
        return sum(t.numel() * t.element_size() for t in (self.ids, *self.keys, *self.values))

    @property
    def in_memory(self) -> bool:
        """True."""
        return True

    def like(self, layer: int) -> KVShape:
        """Shapes and type of a layer's K/V."""
        keys, values = self.keys[layer], self.values[layer]
        return KVShape(tuple(keys.shape), tuple(values.shape), keys.dtype)

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer."""
        return self.keys[layer], self.values[layer]

    def load(self) -> ChunkKV:
        """Itself."""
        return self

    def close(self) -> None:
        """Nothing to let go of."""

    def part(self, start: int, stop: int) -> ChunkKV:
        """Tokens ``start .. stop`` of it, copied."""
        keys, values = (tuple(t[:, :, start:stop].clone() for t in side) for side in (self.keys, self.values))
        return ChunkKV(self.ids[start:stop].clone(), self.start + start, keys, values, self.long_rope)

    def to(self, device: torch.device | str) -> ChunkKV:
        """On another device; the same object where it is there already."""
        keys = tuple(k.to(device) for k in self.keys)
        if all(a is b for a, b in zip(keys, self.keys, strict=True)):
            return self
        return ChunkKV(self.ids, self.start, keys, tuple(v.to(device) for v in self.values), self.long_rope)

    def pinned(self) -> ChunkKV:
        """In page-locked main memory, from which a GPU copies at its bus's full speed. Not without a GPU."""
        keys, values = (tuple(t.pin_memory() for t in side) for side in (self.keys, self.values))
        return ChunkKV(self.ids, self.start, keys, values, self.long_rope)


def chunk_key(fingerprint: str, context: torch.Tensor, start: int, ids: torch.Tensor, long_rope: bool) -> str:
    """SHA-256 (hex) over everything that decides the K/V: model, what stood before the chunk, its place, its tokens.

    Tagged, length-prefixed fields: no two different inputs share an encoding, and every process computes the same.
    """
    digest = hashlib.sha256()
    fields = {
        "version": b"1",
        "model": fingerprint.encode(),
        "context": context.numpy().astype("<i8").tobytes(),
        "start": str(start).encode(),
        "long_rope": str(long_rope).encode(),
        "ids": ids.numpy().astype("<i8").tobytes(),
    }
    for tag, data in fields.items():
        digest.update(f"{tag}:{len(data)}:".encode())
        digest.update(data)
    return digest.hexdigest()


@dataclass(frozen=True)
class ChunkEncoder:
    """Computes chunk K/V offline.

    Args:
        context: what stands before the chunk while its K/V are computed. ``bare``: nothing. ``bos``: the BOS token,
            as the released CacheBlend code does. ``prefix``: the prompt's own system prefix. What stood before is cut
            off; it keeps the attention sink where the model expects it. The choice is part of the key.
    """

    context: EncoderContext = "prefix"

    def __post_init__(self) -> None:
        if self.context not in get_args(EncoderContext):
            raise ValueError(f"context={self.context!r}: choose one of {', '.join(get_args(EncoderContext))}")

    def context_ids(self, model: ReuseModel, prefix: torch.Tensor) -> torch.Tensor:
        """The token ids that stand before a chunk while it is encoded, [P]."""
        if self.context == "prefix":
            return prefix
        return torch.tensor([model.bos_token_id] if self.context == "bos" else [], dtype=torch.long)


@torch.inference_mode()
def encode_chunk(
    model: ReuseModel,
    context: torch.Tensor,
    ids: torch.Tensor,
    start: int | None = None,
    long_rope: bool = False,
) -> ChunkKV:
    """K/V of ``ids`` [T] computed behind ``context`` [P], whose own K/V are cut off.

    ``start`` is the position of the chunk's first token, P by default; a larger one is PromptCache's position buffer:
    context and chunk are shifted together, nothing stands before them. ``long_rope``: encode with the frequencies of
    a longrope model's long prompts, for use in one.
    """
    if ids.numel() == 0:
        raise ValueError("ids is empty: there is nothing to encode")
    if start is not None and start < context.numel():
        raise ValueError(
            f"start={start} is inside the {context.numel()} context tokens: give {context.numel()} or more"
        )
    if long_rope and not model.long_rope_length:
        raise ValueError(f"long_rope=True, but {model.name} is no longrope model")
    start = context.numel() if start is None else start
    joined = torch.cat([context, ids]).to(model.device)
    first = start - context.numel()
    positions = torch.arange(first, first + joined.numel(), device=model.device)
    model.check_length(first + joined.numel())
    if long_rope:  # the model looks at the largest position: one more token, whom nobody sees, stands far behind
        joined = torch.cat([joined, joined[-1:]])
        positions = torch.cat([positions, positions.new_tensor([model.long_rope_length - 1])])
    cache = DynamicCache()
    compat.run_decoder(model.hf, joined[None], positions[None], cache)
    return replace(cut_out(cache, ids, context.numel(), long_rope), start=start)


def cut_out(cache: Cache, ids: torch.Tensor, place: int, long_rope: bool) -> ChunkKV:
    """K/V of ``ids`` [T], which stand at ``place`` in a prefilled cache, copied."""
    part = slice(place, place + ids.numel())
    keys = tuple(layer.keys[:, :, part].clone() for layer in cache.layers)
    values = tuple(layer.values[:, :, part].clone() for layer in cache.layers)
    return ChunkKV(ids.clone(), place, keys, values, long_rope)
