"""`BlockPrefixCache`: full blocks of prompts by chained hash, reference counted (vLLM's automatic prefix caching)."""

from __future__ import annotations

import threading
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvreuse.errors import IntegrityError, LostEntryError
from kvreuse.kv import ChunkKV
from kvreuse.prefix.block_hash import block_hashes, root_hash
from kvreuse.prefix.blocks import Block, BlockMatch, BlockRoot, check_blocks
from kvreuse.store import KVStore
from kvreuse.store.tiers import parse_bytes

if TYPE_CHECKING:
    from kvreuse.model import ReuseModel

Cut = Callable[[int, int], ChunkKV]


class BlockPrefixCache:
    """Exact K/V of prompt prefixes, in full blocks. Safe to share between threads.

    A block is found by its chained hash, and its token ids are compared. Blocks are reference counted; a prompt's are
    freed in reverse, tails first; a free block stays matchable until its memory is needed, least recently freed first.

    Args:
        memory: capacity in (device) memory; None keeps nothing there beyond what a request holds.
        disk, disk_capacity: a folder below it, that outlives the process; or a `KVStore` of yours, which makes room
            by its own rule. Whatever is wrong with a file is a miss.
        block_size: tokens per block; a prompt's last, incomplete block is not kept.
        salt: tenants with different salts never share a block.
    """

    def __init__(
        self,
        memory: str | int | None = "2GiB",
        disk: str | Path | KVStore | None = None,
        disk_capacity: str | int | None = None,
        *,
        block_size: int = 16,
        salt: str = "",
    ) -> None:
        if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
            raise ValueError(f"block_size={block_size!r}: a block is a whole number of tokens, 1 or more")
        if memory is None and disk is None:
            raise ValueError("memory=None without disk=: the cache has nowhere to keep anything")
        if isinstance(disk, KVStore) and disk_capacity is not None:
            raise ValueError(f"disk_capacity={disk_capacity!r}: the KVStore given as disk= has its own")
        if isinstance(disk, KVStore) and disk.kv_dtype is not None:
            raise ValueError(
                f"{disk!r} keeps K/V as {disk.kv_dtype}: a prefix cache is exact; give it a KVStore without kv_dtype="
            )
        self.block_size, self.salt = block_size, salt
        self.capacity_bytes = None if memory is None else parse_bytes(memory)
        if disk is None or isinstance(disk, KVStore):
            self.store = disk
        else:
            self.store = KVStore(memory=None, disk=disk, disk_capacity=disk_capacity, write="back")
        self.num_bytes = self.free_bytes = self.hits = self.misses = self.evictions = 0
        self._blocks: dict[str, Block] = {}
        self._free: OrderedDict[str, None] = OrderedDict()  # the next to be overwritten comes first
        self._held: dict[int, BlockMatch] = {}
        self._warned = False
        self._lock = threading.RLock()

    def root(self, model: ReuseModel, num_tokens: int) -> BlockRoot:
        """What stands before the first block of this model's prompts of ``num_tokens`` tokens."""
        fingerprint = model.fingerprint()
        return BlockRoot(
            root_hash(fingerprint, self.salt, {"long_rope": str(model.long_rope(num_tokens))}), fingerprint
        )

    # -- a request's way: match, insert, release ----------------------------------------------------------------------

    def match(self, root: BlockRoot, ids: torch.Tensor, whole: bool = False) -> BlockMatch:
        """The longest chain of cached blocks that ``ids`` [S] starts with; hold it until `release`.

        The last token is never matched, for its logits are needed; ``whole=True`` matches it too.

        Raises:
            ValueError: ``ids`` is empty.
        """
        if ids.numel() == 0:
            raise ValueError("ids is empty: a prompt has at least one token, whose logits are wanted")
        known: list[tuple[str, torch.Tensor, ChunkKV | None]] = []
        with self._lock:
            for key, block_ids in block_hashes(root.hash, ids if whole else ids[:-1], self.block_size):
                block = self._blocks.get(key)
                if block is not None and torch.equal(block.kv.ids, block_ids):
                    self._take(key)
                    known.append((key, block_ids, block.kv))
                elif block is None and self.store is not None and key in self.store:
                    known.append((key, block_ids, None))
                else:
                    break
            read = {key: self._read(root, key, wanted) for key, wanted, kv in reversed(known) if kv is None}
            found: dict[str, ChunkKV] = {}
            for number, (key, _, kv) in enumerate(known):
                below = read.get(key)
                if kv is None and (below is None or not self._add(root, key, below)):
                    self._let_go([later for later, _, kv in known[number + 1 :] if kv is not None])
                    break
                found[key] = self._blocks[key].kv
            self.hits += len(found)
            self.misses += (ids.numel() - (not whole)) // self.block_size - len(found)
            return self._hold(root, found, sum(key in read for key in found))

    def insert(self, match: BlockMatch, ids: torch.Tensor, cut: Cut) -> BlockMatch:
        """Keep the full blocks of a prompt behind what it matched; the least recently freed make room.

        Where all other blocks are held and no room can be made nothing changes, and the rest is not kept.

        Args:
            match: a held handle for the same ids.
            cut: ``cut(start, stop)`` gives K/V of these tokens of the prompt, as copies.

        Returns:
            The handle to go on with: it holds the new blocks too. The one given is used up.
        """
        with self._lock:
            self._check_held(match)
            found = dict(zip(match.keys, match.blocks, strict=True))
            new: list[str] = []
            for number, (key, block_ids) in enumerate(block_hashes(match.root.hash, ids, self.block_size)):
                if key in found:
                    continue
                block = self._blocks.get(key)
                if block is not None:
                    if not torch.equal(block.kv.ids, block_ids):
                        break
                    self._take(key)
                else:
                    kv = cut(number * self.block_size, (number + 1) * self.block_size)
                    if not self._add(match.root, key, kv):
                        break
                    new.append(key)
                found[key] = self._blocks[key].kv
            if self.store is not None:
                for key in reversed(new):  # heads go last and stay longest: a tail without its head is worth nothing
                    self.store.put(key, self._blocks[key].kv, match.root.model)
            del self._held[id(match)]
            return self._hold(match.root, found, match.num_read)

    def release(self, match: BlockMatch) -> None:
        """Let a handle's blocks go, tails first."""
        with self._lock:
            self._check_held(match)
            del self._held[id(match)]
            self._let_go(match.keys)

    def __contains__(self, key: str) -> bool:
        with self._lock:
            return key in self._blocks or (self.store is not None and key in self.store)

    def __len__(self) -> int:
        return len(self._blocks)

    def flush(self) -> None:
        """Wait until everything kept is in the store below, if there is one."""
        if self.store is not None:
            self.store.flush()

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless references, the free queue and the byte counts agree with the blocks."""
        with self._lock:
            held = Counter(key for match in self._held.values() for key in match.keys)
            check_blocks(self._blocks, held, self._free)
            sizes = {key: block.kv.num_bytes for key, block in self._blocks.items()}
            used, free = sum(sizes.values()), sum(sizes[key] for key in self._free)
            if (self.num_bytes, self.free_bytes) != (used, free):
                raise IntegrityError(
                    f"{self!r} counts {self.free_bytes} free bytes; its blocks take {used}, {free} free"
                )
            if self.capacity_bytes is not None and used > self.capacity_bytes:
                raise IntegrityError(f"{self!r} holds more than its {self.capacity_bytes:,} bytes")

    # -- inside -------------------------------------------------------------------------------------------------------

    def _hold(self, root: BlockRoot, found: dict[str, ChunkKV], num_read: int) -> BlockMatch:
        match = BlockMatch(root, tuple(found), tuple(found.values()), num_read)
        self._held[id(match)] = match
        return match

    def _check_held(self, match: BlockMatch) -> None:
        if self._held.get(id(match)) is not match:
            raise ValueError("this handle is not held: match again, or go on with the one that insert returned")

    def _take(self, key: str) -> None:
        block = self._blocks[key]
        block.refs += 1
        if key in self._free:
            del self._free[key]
            self.free_bytes -= block.kv.num_bytes

    def _let_go(self, keys: Sequence[str]) -> None:
        for key in reversed(keys):
            block = self._blocks[key]
            block.refs -= 1
            if block.refs == 0 and self.capacity_bytes is None:
                self._drop(key)
            elif block.refs == 0:
                self._free[key] = None
                self.free_bytes += block.kv.num_bytes

    def _add(self, root: BlockRoot, key: str, kv: ChunkKV) -> bool:
        """Put a held block into memory; False if no room can be made."""
        if self.capacity_bytes is not None:
            if self.num_bytes - self.free_bytes + kv.num_bytes > self.capacity_bytes:
                self._warn_if_useless(kv)
                return False
            while self.num_bytes + kv.num_bytes > self.capacity_bytes:
                victim, _ = self._free.popitem(last=False)
                self.free_bytes -= self._blocks[victim].kv.num_bytes
                self.evictions += 1
                self._drop(victim)
        self._blocks[key] = Block(kv, refs=1)
        self.num_bytes += kv.num_bytes
        return True

    def _warn_if_useless(self, kv: ChunkKV) -> None:
        if kv.num_bytes > (self.capacity_bytes or 0) and not self._warned:
            self._warned = True
            warnings.warn(
                f"a block of {self.block_size} tokens takes {kv.num_bytes:,} bytes, {self!r} has room for "
                f"{self.capacity_bytes:,}: nothing is kept; give BlockPrefixCache(memory=...) more",
                stacklevel=5,
            )

    def _drop(self, key: str) -> None:
        self.num_bytes -= self._blocks.pop(key).kv.num_bytes

    def _read(self, root: BlockRoot, key: str, ids: torch.Tensor) -> ChunkKV | None:
        """A block from the store below; None if it turns out not to be there."""
        assert self.store is not None
        stored = self.store.get(key, ids, root.model)
        if stored is None:
            return None
        try:
            return stored.load()
        except LostEntryError:
            return None
        finally:
            stored.close()

    def __repr__(self) -> str:
        return f"BlockPrefixCache({len(self)} blocks of {self.block_size} tokens, {self.num_bytes:,} bytes)"
