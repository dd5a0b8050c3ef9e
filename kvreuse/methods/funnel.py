"""Funnel: recompute what the question looks at, many tokens on the first layers, few on the last (our own method)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from kvreuse.blend.deviation import Metric
from kvreuse.blend.fusor import Drop, Fusor
from kvreuse.blend.schedule import Narrowing
from kvreuse.blend.selectors import HKVD, QuestionAttention
from kvreuse.kv import ChunkEncoder, EncoderContext
from kvreuse.methods.base import ChunkReuse, check_ratio


@dataclass(frozen=True)
class Funnel(ChunkReuse):
    """Reuse every chunk and recompute a narrowing set of tokens, chosen by the question's attention.

    One pass of the question over the reused K/V gives its attention to every reused token. The tokens it attends to
    most on the upper layers run from layer 0 on; before each further layer those that matter least drop out. No layer
    runs on all tokens, so ``ratio`` is all that is recomputed.

    Args:
        ratio: average fraction of the reused, inexact context tokens recomputed per layer, all layers counted. 0
            equals full reuse, 1 full recompute.
        start: layer 0 begins with ``start * ratio``; the ratio falls linearly, to ``(2 - start) * ratio``.
        drop: what decides who drops out before a layer: the deviation on the layer before times the question's mean
            attention on the layers still to come (``ahead``), times its attention there (``attended``), or that
            ``deviation`` alone.
        question_tokens: of a longer question only the last ones are run over the reused K/V; None takes all.
        from_layer: fraction of the layers, from the bottom, whose attention does not count in the first choice.
        metric: deviation of keys, values or both, squared L2.
        context: what stands before a chunk while it is encoded (`ChunkEncoder`).
    """

    ratio: float = 0.15
    start: float = 1.4
    drop: Drop = "ahead"
    question_tokens: int | None = 24
    from_layer: float = 1 / 3
    metric: Metric = "kv"
    context: EncoderContext = "prefix"

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        Narrowing(self.start)
        if self.question_tokens is not None and self.question_tokens < 1:
            raise ValueError(f"question_tokens={self.question_tokens}: ask with at least one token, or None for all")
        if self.drop not in get_args(Drop):
            raise ValueError(f"drop={self.drop!r}: choose one of {', '.join(get_args(Drop))}")
        QuestionAttention(self.from_layer)
        HKVD(self.metric)
        ChunkEncoder(self.context)

    def fusor(self) -> Fusor:
        """Question attention first, then a narrowing schedule."""
        return Fusor(
            QuestionAttention(self.from_layer),
            self.ratio,
            Narrowing(self.start),
            self.metric,
            drop=self.drop,
            question_tokens=self.question_tokens,
        )
