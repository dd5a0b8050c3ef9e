"""Prefix caching: the longest prefix seen before is reused, exactly, in blocks; everything behind it is recomputed."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvreuse.blend.fusor import Fusor
from kvreuse.blend.plan import Segment
from kvreuse.kv import cut_out, encode_chunk
from kvreuse.methods.base import ReuseMethod, check_types
from kvreuse.prefix.block_cache import BlockPrefixCache
from kvreuse.prefix.blocks import BlockMatch, JoinedBlocks
from kvreuse.results import Prefill
from kvreuse.store import KVStore
from kvreuse.timing import StageTimer

if TYPE_CHECKING:
    from kvreuse.model import ReuseModel
    from kvreuse.prompt import RagPrompt


@dataclass(frozen=True)
class PrefixCaching(ReuseMethod):
    """Reuse the exact prefix: the longest chain of cached blocks that the prompt starts with.

    Its store is a `BlockPrefixCache`, which keeps blocks as vLLM does, or any `KVStore`: then blocks of 16 tokens are
    entries of that store, under its capacities, in memory or on disk.

    ``trace.hits`` counts the prefix and the chunks of which at least one token was reused, ``trace.num_exact`` tokens.

    Args:
        insert: keep the full blocks of the prompts it has served, question included.
        offline_chunks: how many leading chunks `encode` computes behind the prefix. In CacheBlend's setting (7.1)
            chunks meet in any order, so the first is what a prefix cache can hope for.
    """

    insert: bool = True
    offline_chunks: int = 1

    def __post_init__(self) -> None:
        if self.offline_chunks < 0:
            raise ValueError(
                f"offline_chunks={self.offline_chunks}: give the number of leading chunks to encode, 0 or more"
            )

    def encode(self, model: ReuseModel, prompt: RagPrompt, store: KVStore | BlockPrefixCache) -> float:
        """Compute and keep the full blocks of the prefix and the first ``offline_chunks`` chunks behind it; seconds."""
        cache = self._cache(model, prompt, store)
        started = time.perf_counter()
        ids = torch.cat([prompt.prefix, *prompt.chunks[: self.offline_chunks]])
        ids = ids[: ids.numel() // cache.block_size * cache.block_size]
        if ids.numel():
            match = cache.match(cache.root(model, prompt.num_tokens), ids, whole=True)
            try:
                if match.num_tokens < ids.numel():
                    encoded = encode_chunk(model, ids[:0], ids, 0, model.long_rope(prompt.num_tokens))
                    match = cache.insert(match, ids, encoded.part)
            finally:
                cache.release(match)
            if match.num_tokens < ids.numel() or not all(key in cache for key in match.keys):
                warnings.warn(
                    f"{store!r} is too small for this prompt's prefix: its blocks push each other out and are "
                    "recomputed in every request; give it more room",
                    stacklevel=2,
                )
        return time.perf_counter() - started

    def prefill(self, model: ReuseModel, prompt: RagPrompt, store: KVStore | BlockPrefixCache) -> Prefill:
        """Prefill what follows the longest cached chain of blocks."""
        cache = self._cache(model, prompt, store)
        ids, long_rope = prompt.input_ids, model.long_rope(prompt.num_tokens)
        timer = StageTimer(model.device)
        match = cache.match(cache.root(model, ids.numel()), ids)
        timer.mark("load_s" if match.num_read else "lookup_s")
        try:
            result = Fusor().prefill(model, prompt, _segments(match, ids, long_rope), timer)
            result.trace.hits, result.trace.misses = _count(prompt, match.num_tokens)
            if self.insert:
                started = time.perf_counter()
                match = cache.insert(match, ids, lambda a, b: cut_out(result.cache, ids[a:b], a, long_rope))
                result.trace.stages["encode_s"] = time.perf_counter() - started
        finally:
            cache.release(match)
        return result

    def _cache(self, model: ReuseModel, prompt: RagPrompt, store: KVStore | BlockPrefixCache) -> BlockPrefixCache:
        if not isinstance(store, BlockPrefixCache):
            return BlockPrefixCache(memory=None, disk=self.check_request(model, prompt, store))
        check_types(model, prompt)
        model.require_supported()
        model.check_prompt(prompt)
        return store


def _segments(match: BlockMatch, ids: torch.Tensor, long_rope: bool) -> list[Segment]:
    """The matched blocks as one exact segment."""
    if not match.blocks:
        return []
    return [Segment(ids[: match.num_tokens], 0, ids[:0], 0, True, long_rope, JoinedBlocks(match.blocks))]


def _count(prompt: RagPrompt, num_tokens: int) -> tuple[int, int]:
    """How many of prefix and chunks the first ``num_tokens`` tokens reach into, and how many not."""
    starts = ([0] if prompt.prefix.numel() else []) + prompt.chunk_starts
    hits = sum(start < num_tokens for start in starts)
    return hits, len(starts) - hits
