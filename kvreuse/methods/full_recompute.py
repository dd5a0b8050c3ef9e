"""Full KV recompute: the reference every other method is measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvreuse.methods.base import ReuseMethod, check_types
from kvreuse.results import Prefill, full_prefill
from kvreuse.timing import StageTimer

if TYPE_CHECKING:
    from kvreuse.model import ReuseModel
    from kvreuse.prompt import RagPrompt
    from kvreuse.store import KVStore


@dataclass(frozen=True)
class FullRecompute(ReuseMethod):
    """Prefill of the whole prompt on the model's own best path; reuses nothing and needs no store."""

    def encode(self, model: ReuseModel, prompt: RagPrompt, store: KVStore | None = None) -> float:
        """Nothing to do."""
        return 0.0

    def prefill(self, model: ReuseModel, prompt: RagPrompt, store: KVStore | None = None) -> Prefill:
        """Run every token through every layer."""
        check_types(model, prompt)
        model.check_prompt(prompt)
        return full_prefill(model, prompt, StageTimer(model.device))
