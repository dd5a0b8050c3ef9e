"""The fusor: stored K/V of all chunks and a few recomputed tokens become one prompt's cache (CacheBlend, 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch

from kvreuse.blend.cache import new_blend_cache
from kvreuse.blend.deviation import Metric
from kvreuse.blend.full import full_prefill_batch
from kvreuse.blend.placement import Placed, Placement
from kvreuse.blend.plan import Segment
from kvreuse.blend.request import Blend, Request
from kvreuse.blend.schedule import Constant, Schedule
from kvreuse.blend.selectors import FirstTokens, Selector
from kvreuse.errors import LostEntryError
from kvreuse.kv import StoredKV
from kvreuse.results import BatchPrefill, Prefill, Trace
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
        return blend_batch(model, [Request(self, prompt, segments)], timer, pipelined, promote).row(0)


def blend_batch(
    model: ReuseModel,
    requests: Sequence[Request],
    timer: StageTimer,
    pipelined: bool = True,
    promote: bool = False,
) -> BatchPrefill:
    """Prefill all prompts in one pass, each with its own selection; arguments as in `Fusor.prefill`.

    The fusors may differ in their ratios alone. K/V that prompts share are loaded once.
    """
    first = requests[0].fusor
    if any(replace(r.fusor, ratio=first.ratio) != first for r in requests):
        raise ValueError("the fusors of one batch differ in more than their ratios: run these prompts in batches apart")
    while True:
        hits = [r.hits for r in requests]
        try:
            if not any(hits):
                result = full_prefill_batch(model, [r.prompt for r in requests], timer)
            else:
                result = _blend(model, requests, timer, pipelined, promote)
            break
        except LostEntryError as lost:
            timer.mark("load_s")
            stored = _sources(requests)[lost.index]
            for request in requests:
                request.segments[:] = [replace(s, stored=None) if s.stored is stored else s for s in request.segments]
            stored.close()
    for trace, request, count in zip(result.traces, requests, hits, strict=True):
        trace.hits, trace.misses = count, len(request.segments) - count
    return result


def _sources(requests: Sequence[Request]) -> list[StoredKV]:
    """The stored entries of a batch, each once, in prompt order."""
    return list({id(s.stored): s.stored for r in requests for s in r.segments if s.stored is not None}.values())


def _blend(
    model: ReuseModel, requests: Sequence[Request], timer: StageTimer, pipelined: bool, promote: bool
) -> BatchPrefill:
    blend = Blend(model, requests, timer)
    sources = _sources(requests)
    number = {id(stored): i for i, stored in enumerate(sources)}
    wanted_at_first = {  # not the blend in `wanted`: the loader would hold it, and its K/V, in a cycle
        number[id(s.stored)]
        for r, skips in zip(requests, blend.skips_first_layer, strict=True)
        for s in r.segments
        if s.stored is not None and (s.exact or not skips)
    }
    parts = [
        Placed(s.stored, number[id(s.stored)], s.place, start + s.place)
        for r, start in zip(requests, blend.packing.starts, strict=True)
        for s in r.segments
        if s.stored is not None
    ]

    def wanted(layer: int, index: int) -> bool:
        return layer > 0 or index in wanted_at_first

    devices = [model.layer_device(layer) for layer in range(model.num_layers)]
    with LayerLoader(sources, wanted, devices, keep=promote) as loader:
        blend.place_into(Placement(model, parts, blend.packing, loader))
        if not pipelined:
            loader.wait_all()
        timer.mark("load_s")
        if not pipelined:
            blend.place_all()
        logits, selected = blend.run()
    traces = []
    for request, choice, rows in zip(requests, blend.choices, selected, strict=True):
        own = {number[id(s.stored)] for s in request.segments if s.stored is not None}
        trace = Trace(
            rows,
            timer.stages,
            num_exact=choice.num_exact,
            num_reused=choice.positions.numel(),
            reused=choice.positions,
            num_forced=choice.forced.numel(),
            num_checked=choice.num_checked,
            ratio=None if isinstance(request.fusor.selector, FirstTokens) else request.fusor.ratio,
            read_bytes=sum(loader.source_bytes[i] for i in own),
        )
        traces.append(trace)
    if loader.read_bytes:
        timer.stages["read_s"] = loader.read_s
    cache = blend.cache
    if len(requests) > 1:
        batch = blend.packing.batch
        cache = new_blend_cache([(batch(layer.keys), batch(layer.values)) for layer in cache.layers])
    read = None if loader.read_layers is None else _by_segment(requests, number, loader.read_layers)
    result = BatchPrefill(logits, cache, traces, tuple(r.prompt for r in requests), read_layers=read)
    if len(requests) == 1:
        model.prefilled(result.row(0))
    return result


def _by_segment(
    requests: Sequence[Request], number: dict[int, int], read: list[dict[int, list[torch.Tensor]]]
) -> list[dict[int, list[torch.Tensor]]]:
    """What was read, at the first segment it stands for."""
    left = dict(enumerate(read))
    return [left.pop(number.get(id(s.stored), -1), {}) for r in requests for s in r.segments]
