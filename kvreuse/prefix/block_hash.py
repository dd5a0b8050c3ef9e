"""Chained block hashes: a block's name stands for its tokens and for everything that stands before them.

    h_i = H(h_{i-1}, tokens_i, extra keys)        h_0's parent: the root, H(model fingerprint, tenant salt, ...)

H is SHA-256 over tagged, length-prefixed fields, so no two different inputs share an encoding, and every process
computes the same on every run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch

_NO_EXTRA: Mapping[str, str] = {}


def _digest(fields: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for tag, data in fields.items():
        name = tag.encode()
        digest.update(b"%d:%b:%d:" % (len(name), name, len(data)))
        digest.update(data)
    return digest.hexdigest()


def root_hash(fingerprint: str, salt: str = "", extra: Mapping[str, str] = _NO_EXTRA) -> str:
    """What stands before the first block (hex).

    Args:
        fingerprint: the model, by content (`ReuseModel.fingerprint`).
        salt: keeps tenants apart: blocks of one salt are never found under another.
        extra: whatever else changes all K/V of a prompt.
    """
    fields = {"kind": b"root", "version": b"1", "model": fingerprint.encode(), "salt": salt.encode()}
    return _digest(fields | {f"extra.{name}": value.encode() for name, value in sorted(extra.items())})


def block_hash(parent: str, ids: torch.Tensor, extra: Mapping[str, str] = _NO_EXTRA) -> str:
    """The hash (hex) of the block of token ids ``ids`` [block size] behind the block, or root, ``parent``."""
    fields = {"kind": b"block", "parent": parent.encode(), "tokens": ids.numpy().astype("<i8").tobytes()}
    return _digest(fields | {f"extra.{name}": value.encode() for name, value in sorted(extra.items())})


def block_hashes(root: str, ids: torch.Tensor, block_size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """(hash, token ids) of every full block of ``ids`` [S], first to last; made as they are asked for."""
    parent = root
    for start in range(0, ids.numel() - block_size + 1, block_size):
        block = ids[start : start + block_size]
        parent = block_hash(parent, block)
        yield parent, block
