"""One chunk as one safetensors file in which every layer is one contiguous run of bytes.

Any safetensors reader opens these files; here they are written and read at offsets. The library's own writer orders
tensors by type and name, and its reader maps the file, so that one cut short under the mapping would kill the process
instead of being a miss. Tensors: ``ids`` int64 [T], then ``layer.NNN`` uint8 [bytes], in order. The metadata hold the
shapes, a CRC-32 per layer, and a SHA-256 over the rest of the header and the ids.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zlib
from dataclasses import dataclass
from itertools import accumulate, groupby

import numpy as np
import torch

from kvreuse.kv import KVShape
from kvreuse.store.codec import Codec, PackedKV

VERSION = 1
_FIRST_READ = 1 << 14  # covers the header of most chunks
_MAX_HEADER = 1 << 26
_HEAD = b'{"__metadata__":{"digest":"'
_AFTER_DIGEST = b'","kvreuse":'
_DIGEST = slice(len(_HEAD), len(_HEAD) + 64)


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
    layers = [[byte_view(part.detach().cpu().contiguous()) for part in parts] for parts in entry.parts]
    shapes = [(like.keys[1], like.keys[3], like.values[1], like.values[3]) for like in entry.shapes]
    meta = {
        "version": VERSION,
        "codec": entry.codec.name,
        "dtype": str(entry.shapes[0].dtype).removeprefix("torch."),
        "tokens": ids.numel(),
        "start": entry.start,
        "long_rope": entry.long_rope,
        "shapes": [[len(list(run)), *shape] for shape, run in groupby(shapes)],  # most layers are alike
        "checksums": [_checksum(layer) for layer in layers],
    }
    sizes = [ids.numel() * 8, *(sum(len(part) for part in layer) for layer in layers)]
    text = json.dumps(json.dumps(meta, separators=(",", ":")))
    rest = _AFTER_DIGEST + text.encode() + b"}," + _table(sizes)
    rest += b" " * (-(_DIGEST.stop + len(rest)) % 8)
    header = _HEAD + _digest(rest, byte_view(ids)).encode() + rest
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
    body = 8 + length
    if len(first) < 8 or not _DIGEST.stop < length <= min(_MAX_HEADER, size - 8):
        raise BadFileError(f"no chunk's header in {size} bytes")
    if len(first) < body:
        first += os.pread(descriptor, body - len(first), len(first))
    header = first[8:body]
    if not (header.startswith(_HEAD) and header.startswith(_AFTER_DIGEST, _DIGEST.stop)):
        raise BadFileError("not a chunk's file")
    try:
        # The rest of the header is the table for other readers: the digest covers it, so it need not be parsed.
        text, _ = json.JSONDecoder().raw_decode(header.decode(), _DIGEST.stop + len(_AFTER_DIGEST))
        meta = json.loads(text)
        num_ids = meta["tokens"]
        raw = first[body : body + 8 * num_ids]
        if len(raw) < 8 * num_ids:
            raw += os.pread(descriptor, 8 * num_ids - len(raw), body + len(raw))
        ids = torch.from_numpy(np.frombuffer(raw, dtype="<i8").astype(np.int64))
        if header[_DIGEST].decode() != _digest(header[_DIGEST.stop :], raw):
            raise BadFileError("its header does not match its checksum")
        if (meta["version"], meta["codec"]) != (VERSION, codec.name):
            raise BadFileError(f"written as version {meta['version']}, {meta['codec']}")
        dtype = getattr(torch, meta["dtype"])
        shapes: list[KVShape] = []
        sizes = [body, 8 * num_ids]
        for layers, heads, dim, value_heads, value_dim in meta["shapes"]:
            like = KVShape((1, heads, num_ids, dim), (1, value_heads, num_ids, value_dim), dtype)
            shapes += [like] * layers
            sizes += [codec.num_bytes(like)] * layers
        checksums, start, long_rope = tuple(meta["checksums"]), meta["start"], meta["long_rope"]
    except (KeyError, ValueError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise BadFileError(f"not a chunk's file ({type(error).__name__}: {error})") from error
    offsets = tuple(accumulate(sizes))[1:]
    if size != offsets[-1] or len(checksums) != len(shapes):
        raise BadFileError(f"{size} bytes instead of {offsets[-1]}")
    return Header(ids, start, long_rope, tuple(shapes), checksums, offsets)


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


def byte_view(tensor: torch.Tensor) -> memoryview:
    """A CPU tensor's bytes, writable, not copied."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _table(sizes: list[int]) -> bytes:
    """The tensors of a safetensors header: ids and layers of these sizes, without the opening brace."""
    table = {}
    stops = list(accumulate(sizes))
    for index, (size, stop) in enumerate(zip(sizes, stops, strict=True)):
        name, dtype, shape = ("ids", "I64", size // 8) if index == 0 else (f"layer.{index - 1:03d}", "U8", size)
        table[name] = {"dtype": dtype, "shape": [shape], "data_offsets": [stop - size, stop]}
    return json.dumps(table, separators=(",", ":"))[1:].encode()


def _digest(rest: bytes, ids: bytes | memoryview) -> str:
    digest = hashlib.sha256(len(rest).to_bytes(8, "little") + rest)
    digest.update(ids)
    return digest.hexdigest()


def _checksum(parts: list[memoryview]) -> int:
    value = 0
    for part in parts:
        value = zlib.crc32(part, value)
    return value
