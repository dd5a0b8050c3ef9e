"""Both at once: the tree's exact prefix, then stored chunks, blended (CacheBlend behind RAGCache; in neither paper)."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvreuse.blend.deviation import Metric
from kvreuse.blend.plan import Segment, chunk_segments, look_up
from kvreuse.blend.schedule import Schedule
from kvreuse.blend.selectors import Selector
from kvreuse.kv import ChunkEncoder, EncoderContext
from kvreuse.methods.base import ReuseMethod, check_types, closing, encode_missing, promote_read
from kvreuse.methods.cacheblend import CacheBlend
from kvreuse.prompt import RagPrompt
from kvreuse.ragcache.kv import TreeCache
from kvreuse.results import Prefill
from kvreuse.store import KVStore
from kvreuse.timing import StageTimer

if TYPE_CHECKING:
    from kvreuse.model import ReuseModel
    from kvreuse.ragcache.node import Match


@dataclass(frozen=True, eq=False)
class HybridStore:
    """What `HybridReuse` reuses: ``tree``, exact document sequences, and ``chunks``, every chunk by its content."""

    tree: TreeCache
    chunks: KVStore


@dataclass(frozen=True)
class HybridReuse(ReuseMethod):
    """Reuse the longest document sequence the tree has, exactly; blend the documents behind it from the chunk store.

    The exact prefix has deviation 0, so it is outside the recompute budget and runs through no layer. What a blend has
    computed never enters the tree: the tree gets leading documents that were computed whole behind exact ones, and
    behind the first token ``grow`` documents more, computed for it (stage ``encode_s``, not in the TTFT).

    Its store is a `HybridStore`: ``kr.HybridStore(kr.TreeCache(model, prompt.prefix), kr.KVStore())``.

    Args:
        ratio, schedule, metric, context, selector: of the blend, see `CacheBlend`.
        grow: by how many documents a request's sequence becomes longer in the tree. 0 leaves the tree to others.
    """

    ratio: float = 0.15
    schedule: str | Schedule = "gradual"
    metric: Metric = "kv"
    context: EncoderContext = "prefix"
    selector: Selector | None = None
    grow: int = 1

    def __post_init__(self) -> None:
        self._blend()
        if self.grow < 0:
            raise ValueError(f"grow={self.grow}: give the number of documents the tree learns per request, 0 or more")

    def encode(self, model: ReuseModel, prompt: RagPrompt, store: HybridStore) -> float:  # type: ignore[override]
        """Offline: every chunk into the chunk store, the first ``grow`` documents into the tree; seconds."""
        store = self._check(model, prompt, store)
        started = time.perf_counter()
        encode_missing(model, chunk_segments(model, prompt, ChunkEncoder(self.context)), store.chunks)
        self._grow(prompt, store.tree, 0)
        return time.perf_counter() - started

    def prefill(self, model: ReuseModel, prompt: RagPrompt, store: HybridStore) -> Prefill:  # type: ignore[override]
        """Prefill: exact from the tree, blended from the chunk store, recomputed what neither has."""
        store = self._check(model, prompt, store)
        if not store.tree.serves(prompt):
            return self._blend().prefill(model, prompt, store.chunks)
        fingerprint = model.fingerprint()
        timer = StageTimer(model.device)
        match = store.tree.acquire(prompt)
        try:
            store.tree.tree.promote(match)
            segments = self._segments(model, prompt, store, match, fingerprint)
            timer.mark("lookup_s")
            result = self._fuse(model, prompt, store, segments, fingerprint, timer)
            started = time.perf_counter()
            self._learn(prompt, store.tree, match, segments, result)
            store.tree.tree.update(match, prompt.question.numel())
        finally:
            store.tree.tree.release(match)
        missing = [s for s in segments if s.stored is None]
        if missing:
            encode_missing(model, missing, store.chunks)
        result.trace.stages["encode_s"] = time.perf_counter() - started
        return result

    # -- inside -------------------------------------------------------------------------------------------------------

    def _blend(self) -> CacheBlend:
        return CacheBlend(self.ratio, self.schedule, self.metric, self.context, self.selector)

    def _segments(
        self, model: ReuseModel, prompt: RagPrompt, store: HybridStore, match: Match, fingerprint: str
    ) -> list[Segment]:
        """The tree's segments as far as its match goes, chunks as the store has them behind it."""
        exact = [s for s in store.tree.segments(prompt, match) if s.stored is not None]
        chunks = chunk_segments(model, prompt, ChunkEncoder(self.context))[len(exact) :]
        if store.chunks.kv_dtype is not None:  # compressed K/V are never exact
            chunks = [replace(s, exact=False) for s in chunks]
        return exact + look_up(chunks, fingerprint, store.chunks)

    def _fuse(
        self,
        model: ReuseModel,
        prompt: RagPrompt,
        store: HybridStore,
        segments: list[Segment],
        fingerprint: str,
        timer: StageTimer,
    ) -> Prefill:
        """Blend; chunks that were read from disk are kept in memory, as `ChunkReuse` does."""
        chunks = store.chunks
        with closing(segments):
            result = self._blend().fusor().prefill(model, prompt, segments, timer, promote=chunks.promotes)
            promote_read(segments, fingerprint, chunks, result, result.trace.stages)
        return result

    def _learn(
        self, prompt: RagPrompt, cache: TreeCache, match: Match, segments: list[Segment], result: Prefill
    ) -> None:
        """Documents before the first approximate one are exact in the result: into the tree, and ``grow`` more."""
        exact = next((i for i, s in enumerate(segments) if s.stored is not None and not s.exact), len(segments))
        known = exact - bool(prompt.prefix.numel())
        if known > match.cached_documents or not cache.tree.root.has_kv:
            longer = cache.tree.acquire(cache.documents(prompt)[:known])
            cache.tree.release(cache.keep(prompt, longer, result))
        self._grow(prompt, cache, known)

    def _grow(self, prompt: RagPrompt, cache: TreeCache, known: int) -> None:
        """Compute ``grow`` documents exactly behind the first ``known``, for the tree alone."""
        count = min(known + self.grow, len(prompt.chunks))
        if count > known:
            part = RagPrompt(prompt.prefix, prompt.chunks[:count], prompt.question[:1])
            if cache.serves(part) and cache.tree.match(cache.documents(part)).uncached:
                cache.prefill(part, update=False)

    def _check(self, model: ReuseModel, prompt: RagPrompt, store: object) -> HybridStore:
        check_types(model, prompt)
        if not isinstance(store, HybridStore):
            raise TypeError(
                f"{self!r} reuses a tree and stored chunks and was given {store!r}: pass "
                "kr.HybridStore(kr.TreeCache(model, prompt.prefix), kr.KVStore())"
            )
        if store.tree.model is not model:
            raise ValueError(
                f"the tree holds K/V of {store.tree.model!r}, not of {model!r}: make a TreeCache for this model"
            )
        model.require_supported()
        model.check_prompt(prompt)
        return store
