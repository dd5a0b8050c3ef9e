"""One request on its way through the layers: stored K/V placed, rows chosen, the pass narrowed (CacheBlend, 4)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kvreuse.blend.cache import new_blend_cache
from kvreuse.blend.deviation import Metric, squared_deviation
from kvreuse.blend.placement import Placement
from kvreuse.blend.plan import Segment, reused_positions
from kvreuse.blend.row_pass import Project, RowPass
from kvreuse.blend.schedule import Constant, layer_ratio
from kvreuse.blend.selectors import SelectionView
from kvreuse.blend.signals import question_attention, true_deviation
from kvreuse.timing import StageTimer

if TYPE_CHECKING:
    from kvreuse.blend.fusor import Fusor
    from kvreuse.model import ReuseModel
    from kvreuse.prompt import RagPrompt


class Blend:
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
        self.chosen = self._scores = positions[:0]
        self.num_checked = 0
        self._attention: torch.Tensor | None = None

    @property
    def asks_question(self) -> bool:
        """Whether the question is run over the reused K/V before anything is chosen."""
        return self.selector is not None and (self.fusor.drop != "deviation" or self.selector.needs_question_attention)

    @property
    def skips_first_layer(self) -> bool:
        """Whether layer 0's stored K/V are never looked at: all inexact tokens run through it, and none before it."""
        return self.first == 1 and not self.asks_question

    def run(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Logits [1, V], and the rows that ran through each layer."""
        rows = self.forced
        if self.selector is not None:
            if self.asks_question:
                self._question_attention()
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
        ratio = layer_ratio(self.fusor.schedule, self.fusor.ratio, layer, self.model.num_layers)
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
        self._scores = scores
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
            attention = too_late if self._attention is None else self._question_attention
            self._choose(replace(self.view, deviation=deviation, question_attention=attention, true_deviation=too_late))
            self.timer.mark("check_s")
            self._stage = "recompute_s"
            self.num_checked = self.positions.numel() - self.chosen.numel()
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
        best = torch.topk(self._scores_before(layer, rows), count).indices
        self.chosen = self.chosen[best.sort().values]
        return self._rows()

    def _scores_before(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """What decides who of the chosen goes on to ``layer``, [number chosen]."""
        index = torch.searchsorted(self.positions, self.chosen)
        if layer == 1:  # nothing deviates on layer 0
            return self._scores[index]
        measured = self.cache.layers[layer - 1].deviation
        assert measured is not None
        scores = measured.cpu()[torch.isin(rows.cpu(), self.chosen)]
        if self.fusor.drop == "deviation":
            return scores
        layers = slice(layer - 1, layer) if self.fusor.drop == "attended" else slice(layer, None)
        return scores * self._question_attention()[layers, index].mean(dim=0)

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
        """[L, n]; asked once in a request."""
        if self._attention is None:
            attention = question_attention(
                self.model,
                self.cache,
                self.input_ids,
                self.forced,
                self.num_question,
                None if self.fusor.as_released else self.fusor.question_tokens,
                self._place_until,
            )
            self._attention = attention[:, self.positions]
        return self._attention

    def _true_deviation(self, metric: Metric) -> torch.Tensor:
        """[L, n]."""
        self.place_all()
        return true_deviation(self.model, self.cache, self.input_ids, self.positions, metric)
