"""What a simulated figure's server is made of: costs, capacities, and how long its documents are.

Published-hardware scale stands for the machines of RAGCache's evaluation (`kvreuse.ragcache.published`): nothing of it
is measured here. ``measured`` is the demo model on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvreuse.ragcache import published
from kvreuse.ragcache.cost_models import CostModel, MeasuredCosts
from kvreuse.ragcache.published import PublishedCosts

# Two documents, the default, are then the 4,000 tokens at which the paper's text (figure 2) puts a second. The passages
# of our corpus have about 110; all are stretched by one factor, so that they stay as unequal as they are.
PUBLISHED_DOCUMENT_TOKENS = 2000


@dataclass(frozen=True)
class Scale:
    """One server.

    Args:
        title: for panels; says where the costs are from.
        costs: what takes how long.
        gpu, host: bytes for cached K/V.
        mean_document_tokens: documents are stretched so that the corpus has this mean; None takes them as they are.
    """

    title: str
    costs: CostModel
    gpu: int
    host: int
    mean_document_tokens: int | None = None

    @property
    def token_capacities(self) -> tuple[int, int]:
        """What the tiers hold, in tokens."""
        return self.gpu // self.costs.bytes_per_token, self.host // self.costs.bytes_per_token

    def describe(self) -> dict[str, object]:
        """For headers."""
        gpu, host = self.token_capacities
        measured = {"measured": self.costs.record()} if isinstance(self.costs, MeasuredCosts) else {}
        return {
            "title": self.title,
            "costs": self.costs.name,
            "gpu_tokens": gpu,
            "host_tokens": host,
            "bytes_per_token": self.costs.bytes_per_token,
            "mean_document_tokens": self.mean_document_tokens,
            "search_s": sum(self.costs.search_stage_s),
            **measured,
        }


def published_scale(costs: PublishedCosts) -> Scale:
    """All GPU memory that vLLM would give to K/V, and the text's host memory."""
    title = f"{costs.model.name} on {costs.hardware.name}"
    return Scale(title, costs, costs.cache_bytes, costs.hardware.host_bytes, PUBLISHED_DOCUMENT_TOKENS)


def _a10g() -> tuple[Scale, ...]:
    return published_scale(published.A10G_MISTRAL_7B), published_scale(published.A10G_LLAMA2_7B)


def _h800() -> tuple[Scale, ...]:
    return published_scale(published.H800_MIXTRAL_8X7B), published_scale(published.H800_LLAMA2_70B)


_PUBLISHED: Mapping[str, Callable[[], tuple[Scale, ...]]] = {"a10g": _a10g, "h800": _h800}
MEASURED = "measured"
SCALE_NAMES = (*_PUBLISHED, MEASURED)


def scales_named(name: str, model: str = "demo", small: bool = False) -> tuple[Scale, ...]:
    """The servers of one ``--costs``; figures about one model take the first.

    ``model`` is the one that is measured, up to the prompts of the ``small`` sets or of the real ones.
    """
    if name == MEASURED:
        from experiments.ragcache.measured import measured_scale

        return (measured_scale(model, small),)
    if name not in _PUBLISHED:
        raise ValueError(f"costs {name!r} is unknown: choose one of {', '.join(SCALE_NAMES)}")
    return _PUBLISHED[name]()
