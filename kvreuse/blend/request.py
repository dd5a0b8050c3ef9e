"""One batch on its way through the layers: stored K/V placed, rows chosen, the pass narrowed (CacheBlend, 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from kvreuse.blend.cache import new_blend_cache
from kvreuse.blend.choice import Choice
from kvreuse.blend.deviation import Metric, squared_deviation
from kvreuse.blend.packing import Packing
from kvreuse.blend.placement import Placement
from kvreuse.blend.plan import Segment
from kvreuse.blend.row_pass import Project, RowPass
from kvreuse.blend.schedule import Constant
from kvreuse.blend.selectors import SelectionView
from kvreuse.blend.signals import question_attention, true_deviation
from kvreuse.timing import StageTimer

if TYPE_CHECKING:
    from kvreuse.blend.fusor import Fusor
    from kvreuse.model import ReuseModel
    from kvreuse.prompt import RagPrompt


@dataclass(eq=False)
class Request:
    """One prompt of a batch: what blends it, and its looked-up segments (changed where an entry turns out lost)."""

    fusor: Fusor
    prompt: RagPrompt
    segments: list[Segment]

    @property
    def hits(self) -> int:
        """Segments with stored K/V."""
        return sum(s.stored is not None for s in self.segments)


class Blend:
    """A batch of requests on its way through the layers, their rows packed into one pass. Usually the batch is one."""

    def __init__(self, model: ReuseModel, requests: Sequence[Request], timer: StageTimer) -> None:
        self.fusor, self.model, self.timer = requests[0].fusor, model, timer
        self.prompts = [r.prompt for r in requests]
        self.choices = [Choice(r.fusor, model, r.prompt, r.segments) for r in requests]
        self.packing = Packing.of([p.num_tokens for p in self.prompts])
        self.input_ids = self.packing.ids([p.input_ids for p in self.prompts])
        self.first = max(c.first for c in self.choices)
        self._placed, self._stage = 0, "check_s"
        self._attention: list[torch.Tensor] | None = None

    @property
    def asks_question(self) -> bool:
        """Whether the questions are run over the reused K/V before anything is chosen."""
        return any(c.asks_question for c in self.choices)

    @property
    def skips_first_layer(self) -> list[bool]:
        """Whether layer 0's stored, inexact K/V are never looked at, per prompt.

        So it is where all inexact tokens run through that layer, and nothing before it.
        """
        return [choice.first == 1 and not self.asks_question for choice in self.choices]

    def run(self) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
        """Logits [B, V], and for every prompt the positions that ran through each layer."""
        if self.asks_question:
            self._question_attention()
        for b, choice in enumerate(self.choices):
            if choice.selector is not None and choice.first == 0:
                choice.choose(self._view(b))
        self.timer.mark("check_s")
        if self.first == 0:
            self._stage = "recompute_s"
        narrows = any(c.selector is not None for c in self.choices)
        gradual = not isinstance(self.fusor.schedule, Constant)
        if narrows and gradual:  # have the cache measure the deviation of what it overwrites
            for held in self.cache.layers[1:-1]:
                held.measure = self.fusor.measure
        row_pass = RowPass(
            self.model,
            self.cache,
            self.packing.join([c.rows for c in self.choices]),
            self.packing,
            narrow=self._narrow if narrows else None,
            bottom_right_from=1 if self.fusor.as_released else None,
            on_layer_start=self._place_until,
            on_layer_end=self._layer_end,
        )
        logits = row_pass.run(self.input_ids)
        self.timer.mark("first_token_s")
        by_layer = [self.packing.split(rows) for rows in row_pass.selected]
        return logits, [[rows[b] for rows in by_layer] for b in range(len(self.choices))]

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

    def _layer_end(self, layer: int) -> None:
        if layer == 0 and self.first == 1:
            self.timer.mark("check_s")
        if layer == self.model.num_layers - 1:
            self.timer.mark("recompute_s")

    # -- narrowing, before every layer --------------------------------------------------------------------------------

    def _narrow(self, layer: int, slots: torch.Tensor, project: Project) -> torch.Tensor | None:
        if layer < max(self.first, 1):
            return None  # chosen before the pass, or by the check to come
        rows = self.packing.split(slots.cpu())
        if layer == self.first:
            return self._check(layer, rows, project)
        measured: list[torch.Tensor] = []

        def deviation(b: int) -> torch.Tensor:
            if not measured:
                whole = self.cache.layers[layer - 1].deviation
                assert whole is not None
                measured.extend(whole.cpu().split([own.numel() for own in rows]))
            return measured[b]

        dropped = [
            choice.narrow(layer, rows[b], self._view(b), partial(deviation, b), partial(self._attention_of, b))
            for b, choice in enumerate(self.choices)
        ]
        return self.packing.join([c.rows for c in self.choices]) if any(dropped) else None

    def _check(self, layer: int, rows: list[torch.Tensor], project: Project) -> torch.Tensor:
        """The check layer: fresh K/V of all candidates are compared with the stored ones."""
        fresh = project()
        known: dict[Metric, list[torch.Tensor]] = {}

        def deviations(metric: Metric) -> list[torch.Tensor]:
            if metric not in known:
                parts = (fresh.keys, fresh.values, fresh.stored_keys, fresh.stored_values)
                known[metric] = list(squared_deviation(metric, *parts).cpu().split([own.numel() for own in rows]))
            return known[metric]

        def deviation(b: int, metric: Metric) -> torch.Tensor:
            return deviations(metric)[b][torch.searchsorted(rows[b], self.choices[b].positions)]

        for b, choice in enumerate(self.choices):
            if choice.selector is not None:
                attention = None if self._attention is None else partial(self._attention_of, b)
                choice.choose(choice.view(partial(deviation, b), attention, None))
        self.timer.mark("check_s")
        self._stage = "recompute_s"
        # The pass overwrites this layer's K/V with themselves: keep the deviation the check has seen.
        held = self.cache.layers[layer]
        held.measure, held.deviation = None, None
        if not isinstance(self.fusor.schedule, Constant):
            seen = zip(deviations(self.fusor.measure), rows, self.choices, strict=True)
            held.deviation = torch.cat([own[torch.searchsorted(ran, c.rows)] for own, ran, c in seen])
        return self.packing.join([c.rows for c in self.choices])

    # -- what selectors may ask for ---------------------------------------------------------------------------------

    def _view(self, b: int) -> SelectionView:
        """What prompt ``b``'s selector sees before the pass."""
        attention, true = partial(self._attention_of, b), partial(self._true_deviation, b)
        return self.choices[b].view(None, attention, true)

    def _attention_of(self, b: int) -> torch.Tensor:
        """[L, n] of prompt ``b``."""
        return self._question_attention()[b]

    def _question_attention(self) -> list[torch.Tensor]:
        """[L, n] per prompt; asked once in a request."""
        if self._attention is None:
            self._attention = question_attention(
                self.model, self.cache, self.packing, self.prompts, self.choices, self._place_until
            )
        return self._attention

    def _true_deviation(self, b: int, metric: Metric) -> torch.Tensor:
        """[L, n] of prompt ``b``."""
        self.place_all()
        ids, start = self.prompts[b].input_ids, self.packing.starts[b]
        return true_deviation(self.model, self.cache, ids, self.choices[b].positions, metric, start)
