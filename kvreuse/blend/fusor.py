"""The fusor: stored K/V of all chunks and a few recomputed tokens become one prompt's cache (CacheBlend, 4)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from kvreuse.blend.cache import new_blend_cache
from kvreuse.blend.deviation import Metric, squared_deviation
from kvreuse.blend.placement import Placement
from kvreuse.blend.plan import Segment, reused_positions
from kvreuse.blend.row_pass import Project, RowPass
from kvreuse.blend.schedule import Constant, Schedule
from kvreuse.blend.selectors import SelectionView, Selector
from kvreuse.errors import LostEntryError
from kvreuse.results import Prefill, Trace, full_prefill
from kvreuse.store.loader import LayerLoader
from kvreuse.timing import StageTimer

if TYPE_CHECKING:
    from kvreuse.model import ReuseModel
    from kvreuse.prompt import RagPrompt


@dataclass(frozen=True)
class Fusor:
    """Blends stored K/V into a prompt.

    Args:
        selector: which reused tokens are recomputed; None recomputes none of them (full reuse).
        ratio: average fraction of the reused, inexact tokens recomputed per layer. 0 is full reuse, 1 full recompute.
        schedule: how the ratio falls over the layers; the tokens with the least deviation on a layer drop out.
        measure: the deviation by which they drop out.
        as_released: the released code's faults, for comparison: nothing counts as exact, only the question's last
            token is forced, and the mask is a triangle by rank, which shows selected tokens the future.

    Forced, outside the budget: the question, and every segment the store does not have.
    """

    selector: Selector | None = None
    ratio: float = 0.0
    schedule: Schedule = field(default_factory=Constant)
    measure: Metric = "kv"
    as_released: bool = False

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
        blend = _Blend(self, model, prompt, segments, timer)
        first_choice = blend.first  # not the blend itself: the loader would hold it, and its K/V, in a cycle

        def wanted(layer: int, index: int) -> bool:
            # Before a check layer all tokens that are not exact run through layer 0: nothing of theirs is loaded there.
            return layer > 0 or first_choice == 0 or segments[index].exact

        devices = [model.layer_device(layer) for layer in range(model.num_layers)]
        with LayerLoader([s.stored for s in segments], wanted, devices, keep=promote) as loader:
            blend.place_into(Placement(model, segments, prompt.num_tokens, loader))
            if not pipelined:
                loader.wait_all()
            timer.mark("load_s")
            if not pipelined:
                blend.place_all()
            logits, selected = blend.run()
        trace = Trace(selected, timer.stages, num_exact=blend.num_exact, num_reused=blend.positions.numel())
        if loader.read_bytes:
            trace.stages["read_s"], trace.read_bytes = loader.read_s, loader.read_bytes
        return Prefill(logits, blend.cache, trace, prompt, read_layers=loader.read_layers)


class _Blend:
    """One request on its way through the layers."""

    def __init__(
        self,
        fusor: Fusor,
        model: ReuseModel,
        prompt: RagPrompt,
        segments: list[Segment],
        timer: StageTimer,
    ) -> None:
        self.fusor, self.model, self.timer = fusor, model, timer
        self._placed, self._stage = 0, "check_s"
        self.input_ids, self.num_question = prompt.input_ids, prompt.question.numel()
        self.num_tokens = prompt.num_tokens
        positions, chunk, offset = reused_positions(segments)
        if fusor.as_released:  # the last token is forced, all others are candidates
            inside = positions < self.num_tokens - 1
            positions, chunk, offset = positions[inside], chunk[inside], offset[inside]
        self.positions, self._chunk, self._offset = positions, chunk, offset
        is_forced = torch.ones(self.num_tokens, dtype=torch.bool)
        for segment in segments:
            if segment.stored is not None:
                is_forced[segment.place : segment.stop] = False
        is_forced[-1] = True
        self.forced = is_forced.nonzero()[:, 0]
        self.num_exact = self.num_tokens - self.forced.numel() - positions.numel()
        selects = fusor.selector is not None and fusor.ratio > 0 and positions.numel() > 0
        self.selector = fusor.selector if selects else None
        self.first = 1 if self.selector is not None and self.selector.needs_fresh_kv else 0
        self.chosen = positions[:0]

    def run(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Logits [1, V], and the rows that ran through each layer."""
        rows = self.forced
        if self.selector is not None:
            if self.selector.needs_fresh_kv:
                self.chosen = self.positions
            else:
                self._choose(self.view)
            rows = self._rows()
        self.timer.mark("check_s")
        if self.first == 0:
            self._stage = "recompute_s"
        self._measure_deviation()
        row_pass = RowPass(
            self.model,
            self.cache,
            rows,
            self.num_tokens,
            narrow=None if self.selector is None else self._narrow,
            bottom_right_from=1 if self.fusor.as_released else None,
            on_layer_start=self._place_until,
            on_layer_end=self._layer_end,
        )
        logits = row_pass.run(self.input_ids)
        self.timer.mark("first_token_s")
        return logits, row_pass.selected

    def place_into(self, placement: Placement) -> None:
        """Give the blend its buffers."""
        self._placement, self.cache = placement, new_blend_cache(placement.buffers)

    def place_all(self) -> None:
        """Put all stored K/V into the buffers."""
        for layer in range(self.model.num_layers):
            self._place_until(layer)

    def _place_until(self, layer: int) -> None:
        """Have stored K/V in the buffers up to ``layer``."""
        if self._placed <= layer:
            self.timer.mark(self._stage, wait=False)
        while self._placed <= layer:
            self._placement.place(self._placed, self.timer)
            self._placed += 1

    @property
    def view(self) -> SelectionView:
        """Made anew when asked for: kept, it would hold this request, and its K/V, in a reference cycle."""
        return SelectionView(
            self.positions,
            self._chunk,
            self._offset,
            self._no_fresh_kv,
            self._question_attention,
            self._true_deviation,
        )

    # -- choosing rows ----------------------------------------------------------------------------------------------

    def _rows(self) -> torch.Tensor:
        return torch.cat([self.forced, self.chosen]).sort().values

    def _count(self, layer: int) -> int:
        assert self.selector is not None
        # Layer 0 is outside the schedule for every selector: nothing deviates there by which tokens could drop out.
        ratio = self.fusor.schedule.ratio(self.fusor.ratio, max(0, layer - 1), self.model.num_layers - 1)
        return min(self.selector.count(self.view, ratio), self.positions.numel())

    def _choose(self, view: SelectionView) -> None:
        """The first choice, by the selector's scores."""
        assert self.selector is not None
        scores = self.selector.scores(view).cpu()
        if scores.shape != self.positions.shape:
            raise ValueError(
                f"{self.selector!r} returned scores of shape {tuple(scores.shape)}, expected "
                f"{tuple(self.positions.shape)}: one per candidate"
            )
        best = torch.topk(scores, self._count(self.first)).indices
        self.chosen = self.positions[best.sort().values]

    def _narrow(self, layer: int, rows: torch.Tensor, project: Project) -> torch.Tensor | None:
        if layer < self.first:
            return None
        if layer == self.first:
            if self.first == 0:
                return None  # chosen before the pass
            fresh = project()
            is_candidate = torch.isin(rows.cpu(), self.positions)

            def deviation(metric: Metric) -> torch.Tensor:
                parts = (fresh.keys, fresh.values, fresh.stored_keys, fresh.stored_values)
                return squared_deviation(metric, *parts).cpu()[is_candidate]

            too_late = self._too_late
            self._choose(replace(self.view, deviation=deviation, question_attention=too_late, true_deviation=too_late))
            self.timer.mark("check_s")
            self._stage = "recompute_s"
            kept = self._rows()
            # The pass overwrites this layer's K/V with themselves: keep the deviation the check has seen.
            held = self.cache.layers[layer]
            held.measure, held.deviation = None, None
            if not isinstance(self.fusor.schedule, Constant):
                by_position = torch.zeros(self.num_tokens)
                by_position[self.positions] = deviation(self.fusor.measure)
                held.deviation = by_position[kept]
            return kept
        count = self._count(layer)
        if count >= self.chosen.numel():
            return None
        measured = self.cache.layers[layer - 1].deviation
        assert measured is not None
        of_chosen = measured.cpu()[torch.isin(rows.cpu(), self.chosen)]
        self.chosen = self.chosen[torch.topk(of_chosen, count).indices.sort().values]
        return self._rows()

    def _measure_deviation(self) -> None:
        """Have the cache measure the deviation of what it overwrites, where a schedule will ask for it."""
        if self.selector is not None and not isinstance(self.fusor.schedule, Constant):
            for held in self.cache.layers[1:-1]:
                held.measure = self.fusor.measure

    def _layer_end(self, layer: int) -> None:
        if layer == 0 and self.first == 1:
            self.timer.mark("check_s")
        if layer == self.model.num_layers - 1:
            self.timer.mark("recompute_s")

    # -- what selectors may ask for ---------------------------------------------------------------------------------

    def _no_fresh_kv(self, metric: Metric) -> torch.Tensor:
        raise ValueError(
            f"{self.selector!r} asks for the deviation without needs_fresh_kv = True: nothing is computed yet"
        )

    def _too_late(self, *_: object) -> torch.Tensor:
        raise ValueError(
            f"{self.selector!r} has needs_fresh_kv = True and chooses in the middle of a pass: only deviation() is "
            "known there; question_attention() and true_deviation() need needs_fresh_kv = False"
        )

    def _question_attention(self) -> torch.Tensor:
        """[L, n]; one pass of the question (and what the store missed) over the reused K/V."""
        seen: list[torch.Tensor] = []

        def collect(layer: int, weights: torch.Tensor) -> None:
            seen.append(weights[0, :, -self.num_question :].float().mean(dim=(0, 1)).cpu())

        RowPass(
            self.model,
            self.cache,
            self.forced,
            self.num_tokens,
            trim_last=False,
            on_layer_start=self._place_until,
            on_attention=collect,
        ).run(self.input_ids)
        return torch.stack(seen)[:, self.positions]

    def _true_deviation(self, metric: Metric) -> torch.Tensor:
        """[L, n]; against a full prefill."""
        self.place_all()
        _, full = self.model.prefill(self.input_ids)
        rows = []
        for held, true in zip(self.cache.layers, full.layers, strict=True):
            at = self.positions.to(held.keys.device)
            parts = (true.keys[:, :, at], true.values[:, :, at], held.keys[:, :, at], held.values[:, :, at])
            rows.append(squared_deviation(metric, *parts).cpu())
        return torch.stack(rows)
