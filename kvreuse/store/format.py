"""One chunk as one safetensors file in which every layer is one contiguous run of bytes.

Any safetensors reader opens these files; here they are written and read at offsets. The library's own writer orders
tensors by type and name, and its reader maps the file, so that one cut short under the mapping would kill the process
instead of being a miss. Tensors: ``ids`` int64 [T], then ``layer.NNN`` uint8 [bytes], in order. The metadata hold the
shapes, a CRC-32 per layer, and a SHA-256 over themselves and the ids.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvreuse.kv import KVShape
from kvreuse.store.codec import Codec, PackedKV

VERSION = 1
_FIRST_READ = 1 << 14  # covers the header of most chunks
_MAX_HEADER = 1 << 26


class BadFileError(Exception):
    """The file is not a whole chunk that this version has written; the message says what is wrong."""


@dataclass(frozen=True, eq=False)
class Header:
    """What a chunk's file says about itself; ``offsets[i]`` is where layer i begins, one more ends the file."""

    ids: torch.Tensor
    start: int
    long_rope: bool
    shapes: tuple[KVShape, ...]
    checksums: tuple[int, ...]
    offsets: tuple[int, ...]


def write_chunk(descriptor: int, entry: PackedKV) -> None:
    """Write an entry to an open, empty file; returns when it is on the device (fsync)."""
    ids = entry.ids.to(torch.int64).contiguous()
    layers = [_bytes_of(parts) for parts in entry.parts]
    meta: dict[str, Any] = {
        "version": VERSION,
        "codec": entry.codec.name,
        "dtype": str(entry.shapes[0].dtype).removeprefix("torch."),
        "start": entry.start,
        "long_rope": entry.long_rope,
        "shapes": [[like.keys[1], like.keys[3], like.values[1], like.values[3]] for like in entry.shapes],
        "checksums": [_checksum(layer) for layer in layers],
    }
    text = json.dumps(meta, separators=(",", ":"))
    sizes = [ids.numel() * 8, *(sum(len(part) for part in layer) for layer in layers)]
    header = json.dumps(_table(text, _digest(text, ids), sizes), separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    pieces: list[bytes | memoryview] = [
        len(header).to_bytes(8, "little") + header,
        byte_view(ids),
        *(part for layer in layers for part in layer),
    ]
    for piece in pieces:
        left = memoryview(piece)
        while left:
            left = left[os.write(descriptor, left) :]
    os.fsync(descriptor)


def read_header(descriptor: int, codec: Codec) -> Header:
    """Read and check everything but the layers' bytes."""
    size = os.fstat(descriptor).st_size
    first = os.pread(descriptor, _FIRST_READ, 0)
    length = int.from_bytes(first[:8], "little")
    if len(first) < 8 or not 2 <= length <= min(_MAX_HEADER, size - 8):
        raise BadFileError(f"no safetensors header in {size} bytes")
    if len(first) < 8 + length:
        first += os.pread(descriptor, 8 + length - len(first), len(first))
    try:
        table = json.loads(first[8 : 8 + length])
        text, digest = table["__metadata__"]["kvreuse"], table["__metadata__"]["digest"]
        num_ids = int(table["ids"]["shape"][0])
        body = 8 + length
        raw = first[body : body + 8 * num_ids]
        if len(raw) < 8 * num_ids:
            raw += os.pread(descriptor, 8 * num_ids - len(raw), body + len(raw))
        ids = torch.from_numpy(np.frombuffer(raw, dtype="<i8").astype(np.int64))
        if digest != _digest(text, ids):
            raise BadFileError("the header's checksum does not match")
        meta = json.loads(text)
        if (meta["version"], meta["codec"]) != (VERSION, codec.name):
            raise BadFileError(f"written as version {meta['version']}, {meta['codec']}")
        dtype = getattr(torch, meta["dtype"])
        shapes = tuple(
            KVShape((1, heads, num_ids, dim), (1, value_heads, num_ids, value_dim), dtype)
            for heads, dim, value_heads, value_dim in meta["shapes"]
        )
        checksums, start, long_rope = tuple(meta["checksums"]), meta["start"], meta["long_rope"]
    except BadFileError:
        raise
    except (KeyError, ValueError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise BadFileError(f"not a chunk's file ({type(error).__name__}: {error})") from error
    sizes = [8 * num_ids, *(codec.num_bytes(like) for like in shapes)]
    if table != _table(text, digest, sizes) or len(checksums) != len(shapes):
        raise BadFileError("its table does not fit its shapes")
    offsets = [body + sizes[0]]
    for layer_bytes in sizes[1:]:
        offsets.append(offsets[-1] + layer_bytes)
    if size != offsets[-1]:
        raise BadFileError(f"{size} bytes instead of {offsets[-1]}")
    return Header(ids, start, long_rope, shapes, checksums, tuple(offsets))


def split_layer(raw: torch.Tensor, codec: Codec, like: KVShape) -> list[torch.Tensor]:
    """One layer's bytes [n] uint8 as packed tensors, without copying."""
    parts, at = [], 0
    for dtype, shape in codec.specs(like):
        stop = at + math.prod(shape) * dtype.itemsize
        parts.append(raw[at:stop].view(dtype).view(shape))
        at = stop
    return parts


def checksum_of(raw: torch.Tensor) -> int:
    """CRC-32 of one layer's bytes [n] uint8."""
    return zlib.crc32(byte_view(raw))


def _table(text: str, digest: str, sizes: list[int]) -> dict[str, Any]:
    """The safetensors header of ids and layers of these sizes."""
    table: dict[str, Any] = {"__metadata__": {"kvreuse": text, "digest": digest}}
    at = 0
    for index, size in enumerate(sizes):
        name, dtype, shape = ("ids", "I64", size // 8) if index == 0 else (f"layer.{index - 1:03d}", "U8", size)
        table[name] = {"dtype": dtype, "shape": [shape], "data_offsets": [at, at + size]}
        at += size
    return table


def _digest(text: str, ids: torch.Tensor) -> str:
    return hashlib.sha256(f"{len(text)}:{text}".encode() + bytes(byte_view(ids))).hexdigest()


def _bytes_of(parts: list[torch.Tensor]) -> list[memoryview]:
    return [byte_view(part.detach().cpu().contiguous()) for part in parts]


def byte_view(tensor: torch.Tensor) -> memoryview:
    """A CPU tensor's bytes, writable, not copied."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _checksum(parts: list[memoryview]) -> int:
    value = 0
    for part in parts:
        value = zlib.crc32(part, value)
    return value
