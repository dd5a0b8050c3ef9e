"""What a block cache hands out: a chain of blocks, and that chain as one run of K/V."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvreuse.errors import IntegrityError
from kvreuse.kv import ChunkKV, KVShape


@dataclass(eq=False)
class Block:
    """A full block in memory. ``refs``: handles that hold it; without any it is free, and matchable all the same."""

    kv: ChunkKV
    refs: int = 0


class BlockRoot(NamedTuple):
    """What stands before a prompt's first block: ``hash`` (`root_hash`), and the fingerprint of the ``model``."""

    hash: str
    model: str = ""


@dataclass(frozen=True, eq=False)
class BlockMatch:
    """A chain of cached blocks from a prompt's first token on, held until `BlockPrefixCache.release`.

    ``keys``: their hashes. ``blocks``: their K/V. ``num_read``: how many of them were read from the store below.
    """

    root: BlockRoot
    keys: tuple[str, ...]
    blocks: tuple[ChunkKV, ...]
    num_read: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all blocks."""
        return sum(block.num_tokens for block in self.blocks)


@dataclass(frozen=True, eq=False)
class JoinedBlocks:
    """A chain's blocks as one `StoredKV`; layers are joined as they are asked for, so that few are held twice."""

    blocks: tuple[ChunkKV, ...]

    @property
    def ids(self) -> torch.Tensor:
        """Token ids [T]."""
        return torch.cat([block.ids for block in self.blocks])

    @property
    def start(self) -> int:
        """Position of the first token."""
        return self.blocks[0].start

    @property
    def long_rope(self) -> bool:
        """With a longrope model's frequencies for long prompts."""
        return self.blocks[0].long_rope

    @property
    def in_memory(self) -> bool:
        """True."""
        return True

    def like(self, layer: int) -> KVShape:
        """Shapes and type of a layer's K/V."""
        one, num_tokens = self.blocks[0].like(layer), sum(block.num_tokens for block in self.blocks)
        keys, values = ((*shape[:2], num_tokens, shape[3]) for shape in (one.keys, one.values))
        return KVShape(keys, values, one.dtype)

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, [1, H_kv, T, D] each."""
        if len(self.blocks) == 1:
            return self.blocks[0].layer(layer)
        keys, values = zip(*(block.layer(layer) for block in self.blocks), strict=True)
        return torch.cat(keys, dim=2), torch.cat(values, dim=2)

    def load(self) -> ChunkKV:
        """All layers, joined."""
        keys, values = zip(*(self.layer(layer) for layer in range(len(self.blocks[0].keys))), strict=True)
        return ChunkKV(self.ids, self.start, keys, values, self.long_rope)

    def close(self) -> None:
        """Nothing to let go of: the handle is released in the cache."""


def check_blocks(blocks: Mapping[str, Block], held: Mapping[str, int], free: Collection[str]) -> None:
    """Raise `IntegrityError` unless ``held`` (handles per block) and the ``free`` queue agree with the blocks."""
    for key, block in blocks.items():
        if block.refs != held.get(key, 0):
            raise IntegrityError(f"block {key[:8]} counts {block.refs} references, {held.get(key, 0)} handles hold it")
        if (block.refs == 0) != (key in free):
            raise IntegrityError(f"block {key[:8]} has {block.refs} references and is on the wrong side")
    if held.keys() | set(free) != blocks.keys():
        raise IntegrityError("a handle or the free queue names a block that is not there")
