"""Prefix caching: the longest prefix seen before is reused, exactly; everything behind it is recomputed."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from kvreuse.blend.fusor import Fusor
from kvreuse.blend.plan import Segment
from kvreuse.kv import ChunkKV
from kvreuse.methods.base import ReuseMethod, encode_missing
from kvreuse.results import Prefill
from kvreuse.store import KVStore
from kvreuse.timing import StageTimer

if TYPE_CHECKING:
    from kvreuse.model import ReuseModel
    from kvreuse.prompt import RagPrompt


@dataclass(frozen=True)
class PrefixCaching(ReuseMethod):
    """Reuse the exact prefix: system prefix, then chunk by chunk as long as the whole text before is the same.

    In memory and idealised as in the paper (7.1): nothing is loaded from a slower device.

    Args:
        insert: keep the prefixes of the prompts it has served, so that a repeated prompt hits further.
        offline_chunks: how many leading chunks `encode` computes behind the prefix. In the paper's setting chunks
            meet in any order, so the first is what a prefix cache can hope for.
    """

    insert: bool = True
    offline_chunks: int = 1

    def __post_init__(self) -> None:
        if self.offline_chunks < 0:
            raise ValueError(
                f"offline_chunks={self.offline_chunks}: give the number of leading chunks to encode, 0 or more"
            )

    def encode(self, model: ReuseModel, prompt: RagPrompt, store: KVStore) -> float:
        """Compute and store the prefix and the first ``offline_chunks`` chunks behind it; seconds."""
        store = self.check_request(model, prompt, store)
        chain = _chain(model, prompt)
        keep = len(chain) - len(prompt.chunks) + self.offline_chunks
        return encode_missing(model, chain[:keep], store)

    def prefill(self, model: ReuseModel, prompt: RagPrompt, store: KVStore) -> Prefill:
        """Prefill what follows the longest stored prefix."""
        store = self.check_request(model, prompt, store)
        fingerprint = model.fingerprint()
        timer = StageTimer(model.device)
        segments: list[Segment] = []
        hit = True
        for segment in _chain(model, prompt):
            stored = store.get(segment.key(fingerprint), segment.ids, fingerprint) if hit else None
            hit = stored is not None
            segments.append(replace(segment, stored=stored))
        timer.mark("lookup_s")
        try:
            result = Fusor().prefill(model, prompt, segments, timer)
        finally:
            for segment in segments:
                if segment.stored is not None:
                    segment.stored.close()
        if self.insert:
            started = time.perf_counter()
            for segment in segments:
                if segment.stored is None:
                    store.put(segment.key(fingerprint), _cut_out(result, segment), fingerprint)
            result.trace.stages["encode_s"] = time.perf_counter() - started
        return result


def _chain(model: ReuseModel, prompt: RagPrompt) -> list[Segment]:
    """Prefix and chunks, each behind all that stands before it: exact wherever it hits."""
    before = torch.empty(0, dtype=torch.long)
    segments = []
    for ids in (prompt.prefix, *prompt.chunks):
        if ids.numel():
            segments.append(
                Segment(ids, before.numel(), before, before.numel(), True, model.long_rope(prompt.num_tokens))
            )
            before = torch.cat([before, ids])
    return segments


def _cut_out(result: Prefill, segment: Segment) -> ChunkKV:
    """A segment's exact K/V out of a prefilled prompt."""
    part = slice(segment.place, segment.stop)
    keys = tuple(layer.keys[:, :, part].clone() for layer in result.cache.layers)
    values = tuple(layer.values[:, :, part].clone() for layer in result.cache.layers)
    return ChunkKV(segment.ids, segment.place, keys, values, segment.long_rope)
