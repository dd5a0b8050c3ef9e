"""CacheBlend: selective recompute of the tokens whose K/V deviate most (https://arxiv.org/abs/2405.16444)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvreuse.blend.deviation import Metric
from kvreuse.blend.fusor import Fusor
from kvreuse.blend.plan import Segment
from kvreuse.blend.schedule import Constant, Schedule, parse_schedule
from kvreuse.blend.selectors import HKVD, Selector
from kvreuse.kv import ChunkEncoder, EncoderContext
from kvreuse.methods.base import ChunkReuse, check_ratio

if TYPE_CHECKING:
    from kvreuse.model import ReuseModel
    from kvreuse.prompt import RagPrompt


@dataclass(frozen=True)
class CacheBlend(ChunkReuse):
    """Reuse every chunk and recompute the high-KV-deviation tokens on each layer (CacheBlend, 4).

    Layer 0 runs on all tokens that are not exact; layer 1 is the check layer, where K/V of all of them are projected
    and kept, deviations ranked, and only the selected tokens go on.

    Args:
        ratio: average fraction of the reused, inexact context tokens recomputed per layer behind layer 0. 0 equals
            full reuse, 1 full recompute.
        schedule: ``gradual`` (4.3: the ratio falls from layer to layer, tokens drop out by their deviation there),
            ``constant`` (one check layer, as in the released code), or a schedule object.
        metric: deviation of keys, values or both, squared L2.
        context: what stands before a chunk while it is encoded (`ChunkEncoder`).
        selector: another selection rule in HKVD's place (``FirstTokens(k)`` counts by k, not by ratio).
        as_released: reproduce the released code's faults, for comparison: a mask by rank, which lets selected tokens
            see the future, only the question's last token forced (the others reused as a chunk of their own), V
            ranked on one check layer.
    """

    ratio: float = 0.15
    schedule: str | Schedule = "gradual"
    metric: Metric = "kv"
    context: EncoderContext = "prefix"
    selector: Selector | None = None
    as_released: bool = False

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        parse_schedule(self.schedule)
        HKVD(self.metric)
        if self.selector is not None and not isinstance(self.selector, Selector):
            raise TypeError(f"selector={self.selector!r}: give a selector object, such as kr.HKVD()")
        ChunkEncoder(self.context)

    @property
    def encoding(self) -> str:
        """As released, the question is stored as well."""
        return f"{super().encoding}, question too" if self.as_released else super().encoding

    def segments(self, model: ReuseModel, prompt: RagPrompt) -> list[Segment]:
        """Prefix and chunks; as released, the question too."""
        segments = super().segments(model, prompt)
        if self.as_released:
            context = ChunkEncoder(self.context).context_ids(model, prompt.prefix)
            segments = [replace(s, exact=False) for s in segments]
            long_rope = model.long_rope(prompt.num_tokens)
            segments.append(Segment(prompt.question, prompt.num_context, context, context.numel(), False, long_rope))
        return segments

    def fusor(self) -> Fusor:
        """HKVD (or the given selector) at the given ratio."""
        if self.as_released:
            return Fusor(self.selector or HKVD("v"), self.ratio, Constant(), "v", as_released=True)
        return Fusor(self.selector or HKVD(self.metric), self.ratio, parse_schedule(self.schedule), self.metric)
