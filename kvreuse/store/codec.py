"""How one layer's K/V are laid out in bytes: as they are, in bfloat16, or quantized to 8 or 4 bits.

Quantized keys have one range per channel (dimension) and group of 64 tokens, values one range per token and head:
outliers of keys sit in a few channels, those of values do not (KIVI, https://arxiv.org/abs/2402.02750).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
import torch.nn.functional as F

from kvreuse.kv import ChunkKV, KVShape

KVDtype = Literal["bf16", "int8", "int4"]
Spec = tuple[torch.dtype, tuple[int, ...]]
_GROUP = 64  # tokens of a chunk that share a key channel's range


class Codec(ABC):
    """Turns one layer's K/V into a list of tensors and back."""

    name: str

    @abstractmethod
    def specs(self, like: KVShape) -> list[Spec]:
        """Type and shape of every packed tensor, in the order in which they are written."""

    @abstractmethod
    def pack(self, keys: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor]:
        """Keys and values [1, H_kv, T, D] as packed tensors."""

    @abstractmethod
    def unpack(self, parts: Sequence[torch.Tensor], like: KVShape) -> tuple[torch.Tensor, torch.Tensor]:
        """Back to keys and values of the model's type, on the parts' device."""

    def num_bytes(self, like: KVShape) -> int:
        """Bytes of one packed layer."""
        return sum(math.prod(shape) * dtype.itemsize for dtype, shape in self.specs(like))


class Plain(Codec):
    """K/V as the model computed them: exact."""

    name = "plain"

    def specs(self, like: KVShape) -> list[Spec]:
        """Keys, values."""
        return [(like.dtype, like.keys), (like.dtype, like.values)]

    def pack(self, keys: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor]:
        """The same tensors."""
        return [keys, values]

    def unpack(self, parts: Sequence[torch.Tensor], like: KVShape) -> tuple[torch.Tensor, torch.Tensor]:
        """The same tensors."""
        return parts[0], parts[1]


class BFloat16(Codec):
    """Rounded to bfloat16."""

    name = "bf16"

    def specs(self, like: KVShape) -> list[Spec]:
        """Keys, values."""
        return [(torch.bfloat16, like.keys), (torch.bfloat16, like.values)]

    def pack(self, keys: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor]:
        """Round."""
        return [keys.to(torch.bfloat16), values.to(torch.bfloat16)]

    def unpack(self, parts: Sequence[torch.Tensor], like: KVShape) -> tuple[torch.Tensor, torch.Tensor]:
        """Widen."""
        return parts[0].to(like.dtype), parts[1].to(like.dtype)


class Integer(Codec):
    """``bits`` per number between the least and the greatest of its group, whose range is kept in fp32."""

    def __init__(self, bits: int) -> None:
        self.bits, self.name = bits, f"int{bits}"

    def _packed(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape if self.bits == 8 else (*shape[:-1], -(-shape[-1] // 2))

    def specs(self, like: KVShape) -> list[Spec]:
        """Least number and step of keys [1, H_kv, groups, D] and of values [1, H_kv, T, 1]; then the numbers."""
        one, heads, tokens, dim = like.keys
        of_keys = (torch.float32, (one, heads, -(-tokens // _GROUP), dim))
        of_values = (torch.float32, (*like.values[:-1], 1))
        numbers = [(torch.uint8, self._packed(shape)) for shape in (like.keys, like.values)]
        return [of_keys, of_keys, of_values, of_values, *numbers]

    def pack(self, keys: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor]:
        """Quantize."""
        keys, values = keys.float(), values.float()
        tokens = keys.shape[2]
        groups = -(-tokens // _GROUP)
        padding = groups * _GROUP - tokens  # repeats the last token, which changes no range
        padded = torch.cat([keys, keys[:, :, -1:].expand(-1, -1, padding, -1)], dim=2)
        grouped = padded.unflatten(2, (groups, _GROUP))
        low, step = self._range(grouped.amin(3), grouped.amax(3))
        key_numbers = self._quantize(grouped, low[:, :, :, None], step[:, :, :, None]).flatten(2, 3)[:, :, :tokens]
        value_low, value_step = self._range(values.amin(3, keepdim=True), values.amax(3, keepdim=True))
        value_numbers = self._quantize(values, value_low, value_step)
        return [low, step, value_low, value_step, self._join(key_numbers), self._join(value_numbers)]

    def unpack(self, parts: Sequence[torch.Tensor], like: KVShape) -> tuple[torch.Tensor, torch.Tensor]:
        """Back to the model's type."""
        low, step, value_low, value_step, key_numbers, value_numbers = parts
        tokens = like.keys[2]
        group = torch.arange(tokens, device=low.device) // _GROUP
        keys = self._split(key_numbers, like.keys[-1]).float()
        keys = torch.addcmul(low[:, :, group], keys, step[:, :, group])
        values = torch.addcmul(value_low, self._split(value_numbers, like.values[-1]).float(), value_step)
        return keys.to(like.dtype), values.to(like.dtype)

    def _range(self, least: torch.Tensor, most: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        step = (most - least) / (2**self.bits - 1)
        return least, torch.where(step > 0, step, 1.0)

    def _quantize(self, numbers: torch.Tensor, low: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        return ((numbers - low) / step).round().clamp(0, 2**self.bits - 1).to(torch.uint8)

    def _join(self, numbers: torch.Tensor) -> torch.Tensor:
        if self.bits == 8:
            return numbers.contiguous()
        even = F.pad(numbers, (0, numbers.shape[-1] % 2))
        return even[..., ::2] | (even[..., 1::2] << 4)

    def _split(self, numbers: torch.Tensor, dim: int) -> torch.Tensor:
        if self.bits == 8:
            return numbers
        return torch.stack([numbers & 15, numbers >> 4], dim=-1).flatten(-2)[..., :dim]


_CODECS: dict[str | None, Codec] = {None: Plain(), "bf16": BFloat16(), "int8": Integer(8), "int4": Integer(4)}


def codec_for(kv_dtype: str | None) -> Codec:
    """The codec of a ``kv_dtype``; None keeps K/V as they are."""
    if kv_dtype not in _CODECS:
        raise ValueError(f"kv_dtype={kv_dtype!r}: choose one of {', '.join(get_args(KVDtype))}, or None for exact K/V")
    return _CODECS[kv_dtype]


@dataclass(frozen=True, eq=False)
class PackedKV:
    """One chunk's K/V as a codec lays them out; per layer a list of tensors."""

    ids: torch.Tensor
    start: int
    long_rope: bool
    codec: Codec
    shapes: tuple[KVShape, ...]
    parts: tuple[list[torch.Tensor], ...] = field(repr=False)

    @classmethod
    def of(cls, entry: ChunkKV, codec: Codec) -> PackedKV:
        """Pack all layers of a chunk."""
        shapes = tuple(entry.like(layer) for layer in range(len(entry.keys)))
        parts = tuple(codec.pack(k, v) for k, v in zip(entry.keys, entry.values, strict=True))
        return cls(entry.ids, entry.start, entry.long_rope, codec, shapes, parts)

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed tensors and the ids."""
        return self.ids.numel() * self.ids.element_size() + sum(self.codec.num_bytes(like) for like in self.shapes)

    @property
    def in_memory(self) -> bool:
        """True."""
        return True

    def like(self, layer: int) -> KVShape:
        """Shapes and type of a layer's K/V."""
        return self.shapes[layer]

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer's keys and values, unpacked."""
        return self.codec.unpack(self.parts[layer], self.shapes[layer])

    def load(self) -> ChunkKV:
        """All layers, unpacked."""
        keys, values = zip(*(self.layer(layer) for layer in range(len(self.parts))), strict=True)
        return ChunkKV(self.ids, self.start, keys, values, self.long_rope)

    def close(self) -> None:
        """Nothing to let go of."""
