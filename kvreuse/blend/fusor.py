"""The fusor: stored K/V of all chunks and a few recomputed tokens become one prompt's cache (CacheBlend, 4)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from kvreuse.blend.deviation import Metric
from kvreuse.blend.placement import Placement
from kvreuse.blend.plan import Segment
from kvreuse.blend.request import Blend
from kvreuse.blend.schedule import Constant, Schedule
from kvreuse.blend.selectors import FirstTokens, Selector
from kvreuse.errors import LostEntryError
from kvreuse.results import Prefill, Trace, full_prefill
from kvreuse.store.loader import LayerLoader
from kvreuse.timing import StageTimer

if TYPE_CHECKING:
    from kvreuse.model import ReuseModel
    from kvreuse.prompt import RagPrompt

Drop = Literal["deviation", "attended", "ahead"]


@dataclass(frozen=True)
class Fusor:
    """Blends stored K/V into a prompt.

    Args:
        selector: which reused tokens are recomputed; None recomputes none of them (full reuse).
        ratio: average fraction of the reused, inexact tokens recomputed per layer. 0 is full reuse, 1 full recompute.
        schedule: how the ratio falls over the layers; the tokens with the least deviation on a layer drop out.
        measure: the deviation by which they drop out.
        drop: they drop out by that ``deviation`` alone, by it times the question's attention to them on the same layer
            (``attended``), or times the mean of that attention on the layers still to come (``ahead``).
        question_tokens: only so many of the question's last tokens are run to learn its attention; None: all.
        as_released: the released code's faults, for comparison: nothing counts as exact, only the question's last
            token is forced, and the mask is a triangle by rank, which shows selected tokens the future.

    Forced, outside the budget: the question, and every segment the store does not have.
    """

    selector: Selector | None = None
    ratio: float = 0.0
    schedule: Schedule = field(default_factory=Constant)
    measure: Metric = "kv"
    as_released: bool = False
    drop: Drop = "deviation"
    question_tokens: int | None = None

    def prefill(
        self,
        model: ReuseModel,
        prompt: RagPrompt,
        segments: list[Segment],
        timer: StageTimer,
        pipelined: bool = True,
        promote: bool = False,
    ) -> Prefill:
        """Prefill ``prompt`` from its looked-up ``segments`` (those without stored K/V are recomputed).

        An entry that turns out damaged while it is loaded becomes a miss, in ``segments`` too, and the blend starts
        again.

        Args:
            pipelined: load layer i + 1 while layer i is recomputed (5); False loads everything first.
            promote: hand what was read from disk to ``result.read_layers``, for the memory tier.
        """
        while True:
            hits = sum(s.stored is not None for s in segments)
            try:
                if not hits:
                    result = full_prefill(model, prompt, timer)
                else:
                    result = self._blend(model, prompt, segments, timer, pipelined, promote)
                break
            except LostEntryError as lost:
                timer.mark("load_s")
                stored = segments[lost.index].stored
                segments[lost.index] = replace(segments[lost.index], stored=None)
                if stored is not None:
                    stored.close()
        result.trace.hits, result.trace.misses = hits, len(segments) - hits
        return result

    def _blend(
        self,
        model: ReuseModel,
        prompt: RagPrompt,
        segments: list[Segment],
        timer: StageTimer,
        pipelined: bool,
        promote: bool,
    ) -> Prefill:
        blend = Blend(self, model, prompt, segments, timer)
        skips_first = blend.skips_first_layer  # not the blend: the loader would hold it, and its K/V, in a cycle

        def wanted(layer: int, index: int) -> bool:
            return layer > 0 or not skips_first or segments[index].exact

        devices = [model.layer_device(layer) for layer in range(model.num_layers)]
        with LayerLoader([s.stored for s in segments], wanted, devices, keep=promote) as loader:
            blend.place_into(Placement(model, segments, prompt.num_tokens, loader))
            if not pipelined:
                loader.wait_all()
            timer.mark("load_s")
            if not pipelined:
                blend.place_all()
            logits, selected = blend.run()
        trace = Trace(
            selected,
            timer.stages,
            num_exact=blend.num_exact,
            num_reused=blend.positions.numel(),
            reused=blend.positions,
            num_forced=blend.forced.numel(),
            num_checked=blend.num_checked,
            ratio=None if isinstance(self.selector, FirstTokens) else self.ratio,
        )
        if loader.read_bytes:
            trace.stages["read_s"], trace.read_bytes = loader.read_s, loader.read_bytes
        return model.prefilled(Prefill(logits, blend.cache, trace, prompt, read_layers=loader.read_layers))
