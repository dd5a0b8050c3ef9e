"""Full KV recompute: the reference every other method is measured against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

from kvreuse.blend.full import full_prefill_batch
from kvreuse.methods.base import ReuseMethod, as_batch, check_batch, check_types
from kvreuse.prompt import RagPrompt
from kvreuse.results import BatchPrefill, Prefill
from kvreuse.timing import StageTimer

if TYPE_CHECKING:
    from kvreuse.model import ReuseModel
    from kvreuse.store import KVStore


@dataclass(frozen=True)
class FullRecompute(ReuseMethod):
    """Prefill of the whole prompt on the model's own best path; reuses nothing and needs no store."""

    def encode(self, model: ReuseModel, prompt: RagPrompt | Sequence[RagPrompt], store: KVStore | None = None) -> float:
        """Nothing to do."""
        return 0.0

    @overload
    def prefill(self, model: ReuseModel, prompt: RagPrompt, store: KVStore | None = None) -> Prefill: ...

    @overload
    def prefill(self, model: ReuseModel, prompt: Sequence[RagPrompt], store: KVStore | None = None) -> BatchPrefill: ...

    def prefill(
        self, model: ReuseModel, prompt: RagPrompt | Sequence[RagPrompt], store: KVStore | None = None
    ) -> Prefill | BatchPrefill:
        """Run every token through every layer; a list of prompts is packed into one pass (`full_prefill_batch`)."""
        prompts = as_batch(prompt)
        for one in prompts:
            check_types(model, one)
            model.check_prompt(one)
        check_batch(model, prompts)
        result = full_prefill_batch(model, prompts, StageTimer(model.device))
        return result.row(0) if isinstance(prompt, RagPrompt) else result
