"""RAGCache: exact K/V of document sequences from a knowledge tree over two tiers (arXiv:2404.12457)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvreuse.methods.base import ReuseMethod, check_types
from kvreuse.ragcache.kv import TreeCache
from kvreuse.results import Prefill

if TYPE_CHECKING:
    from kvreuse.model import ReuseModel
    from kvreuse.prompt import RagPrompt


@dataclass(frozen=True)
class RagCache(ReuseMethod):
    """Reuse the longest document prefix in a knowledge tree; prefill what follows, and insert its documents.

    Its store is a `TreeCache`, which brings capacities, policy and costs: ``kr.TreeCache(model, prompt.prefix)``.

    Args:
        insert: keep the documents of the prompts it has served.
    """

    insert: bool = True

    def encode(self, model: ReuseModel, prompt: RagPrompt, store: TreeCache) -> float:  # type: ignore[override]
        """Compute and keep the prompt's documents, without counting a retrieval; seconds."""
        cache = self._check(model, prompt, store)
        started = time.perf_counter()
        if cache.tree.match(cache.documents(prompt)).uncached:
            cache.prefill(prompt, update=False)
        return time.perf_counter() - started

    def prefill(self, model: ReuseModel, prompt: RagPrompt, store: TreeCache) -> Prefill:  # type: ignore[override]
        """Prefill what follows the tree's longest match."""
        return self._check(model, prompt, store).prefill(prompt, insert=self.insert)

    def _check(self, model: ReuseModel, prompt: RagPrompt, store: object) -> TreeCache:
        check_types(model, prompt)
        if not isinstance(store, TreeCache):
            raise TypeError(
                f"{self!r} reuses a knowledge tree and was given {store!r}: pass kr.TreeCache(model, prefix)"
            )
        if store.model is not model:
            raise ValueError(
                f"the tree holds K/V of {store.model!r}, not of {model!r}: make a TreeCache for this model"
            )
        return store
