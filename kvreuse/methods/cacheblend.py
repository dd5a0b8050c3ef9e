"""CacheBlend: selective recompute of the tokens whose K/V deviate most (https://arxiv.org/abs/2405.16444)."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal

from kvreuse.blend.deviation import Metric
from kvreuse.blend.fusor import Fusor
from kvreuse.blend.plan import Segment
from kvreuse.blend.schedule import Constant, Schedule, parse_schedule
from kvreuse.blend.selectors import HKVD, Selector
from kvreuse.kv import ChunkEncoder, EncoderContext
from kvreuse.methods.base import ChunkReuse, check_ratio
from kvreuse.store.controller import R_STAR, LoadingController

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
            full reuse, 1 full recompute. "auto": the ``controller`` chooses it for every request, by what has to be
            loaded from disk (5); from memory it is r*.
        schedule: ``gradual`` (4.3: the ratio falls from layer to layer, tokens drop out by their deviation there),
            ``constant`` (one check layer, as in the released code), or a schedule object.
        metric: deviation of keys, values or both, squared L2.
        context: what stands before a chunk while it is encoded (`ChunkEncoder`).
        selector: another selection rule in HKVD's place (``FirstTokens(k)`` counts by k, not by ratio).
        as_released: reproduce the released code's faults, for comparison: a mask by rank, which lets selected tokens
            see the future, only the question's last token forced (the others reused as a chunk of their own), V
            ranked on one check layer.
        controller: the profile that "auto" decides by.
    """

    ratio: float | Literal["auto"] = 0.15
    schedule: str | Schedule = "gradual"
    metric: Metric = "kv"
    context: EncoderContext = "prefix"
    selector: Selector | None = None
    as_released: bool = False
    controller: LoadingController | None = None

    def __post_init__(self) -> None:
        if self.ratio != "auto":
            check_ratio(self.ratio)
            if self.controller is not None:
                raise ValueError(f"ratio={self.ratio!r} with a controller: it decides only for ratio='auto'")
        elif self.controller is not None and not isinstance(self.controller, LoadingController):
            raise TypeError(f"controller={self.controller!r}: give a kr.LoadingController")
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
        """HKVD (or the given selector) at the given ratio; r* for "auto"."""
        least = R_STAR if self.controller is None else self.controller.min_ratio
        ratio = least if self.ratio == "auto" else self.ratio
        if self.as_released:
            return Fusor(self.selector or HKVD("v"), ratio, Constant(), "v", as_released=True)
        return Fusor(self.selector or HKVD(self.metric), ratio, parse_schedule(self.schedule), self.metric)

    def request_fusor(self, model: ReuseModel, prompt: RagPrompt, segments: list[Segment], fingerprint: str) -> Fusor:
        """With "auto": at the controller's ratio for this request."""
        if self.ratio != "auto":
            return self.fusor()
        if self.controller is not None:
            ratio = self.controller.request_ratio(model, prompt, segments, fingerprint)
            return replace(self.fusor(), ratio=ratio)
        if any(s.stored is not None and not s.stored.in_memory for s in segments):
            raise ValueError(
                "ratio='auto' has chunks to load from disk and no controller=: give it "
                "kr.LoadingController.profile(model, store.devices), or one that was saved"
            )
        return self.fusor()

    def __repr__(self) -> str:
        """As a dataclass's; without a controller nothing of it, as in records from before there was one."""
        shown = (f.name for f in fields(self) if f.name != "controller" or self.controller is not None)
        return f"CacheBlend({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"
