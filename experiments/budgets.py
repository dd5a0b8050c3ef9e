"""A method at a given budget: `experiments.selectors` compares rules that recompute equally much."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import kvreuse as kr
from kvreuse.blend.budget import ratio_for_budget

if TYPE_CHECKING:
    from kvreuse import KVStore, Prefill, RagPrompt, ReuseModel


@dataclass(frozen=True)
class AtBudget(kr.ReuseMethod):
    """``method`` with the ratio that makes it recompute the fraction ``budget`` of the reused tokens' K/V.

    Full layers are counted (`kvreuse.blend.budget`), so the ratio depends on the model's depth. Where HKVD's two do not
    fit into the budget, the check layer is left out of the count, then layer 0: what was spent is in the record.

    Args:
        rule: a name for tables and pictures.
        method: a `ChunkReuse` with a ``ratio``; what it has there is replaced.
    """

    rule: str
    method: Any
    budget: float

    def __post_init__(self) -> None:
        if not isinstance(self.method, kr.ChunkReuse) or not hasattr(self.method, "ratio"):
            raise TypeError(f"method={self.method!r}: give a method with a ratio, such as kr.CacheBlend()")

    @property
    def context(self) -> str:
        """The encoder context."""
        return str(self.method.context)

    @property
    def encoding(self) -> str:
        """That of the method."""
        return str(self.method.encoding)

    @property
    def label(self) -> str:
        """Rule and budget."""
        return f"{self.rule} @ {self.budget:.0%}"

    def at(self, model: ReuseModel) -> Any:
        """The method at its ratio for ``model``."""
        fusor = self.method.fusor()
        fresh = fusor.selector is not None and fusor.selector.needs_fresh_kv
        full_layers = 2 if fresh else 0
        while full_layers > self.budget * model.num_layers:
            full_layers -= 1
        ratio = ratio_for_budget(self.budget, model.num_layers, fusor.schedule, full_layers)
        return replace(self.method, ratio=ratio)

    def encode(self, model: ReuseModel, prompt: RagPrompt, store: KVStore) -> float:
        """As the method does; seconds."""
        return float(self.method.encode(model, prompt, store))

    def prefill(self, model: ReuseModel, prompt: RagPrompt, store: KVStore) -> Prefill:
        """As the method does, at its ratio."""
        result: Prefill = self.at(model).prefill(model, prompt, store)
        return result
