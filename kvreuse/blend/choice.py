"""One prompt's rows on every layer: which are forced, which are chosen, and who drops out (CacheBlend, 4.3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from kvreuse.blend.deviation import Metric
from kvreuse.blend.plan import Segment, reused_positions
from kvreuse.blend.schedule import layer_ratio
from kvreuse.blend.selectors import SelectionView

if TYPE_CHECKING:
    from kvreuse.blend.fusor import Fusor
    from kvreuse.model import ReuseModel
    from kvreuse.prompt import RagPrompt


class Choice:
    """One prompt's rows, in its own positions.

    ``positions``: the candidates. ``forced``: the question, and what the store does not have. ``first``: the layer
    before which is chosen; 1 for a selector that needs fresh K/V.
    """

    def __init__(self, fusor: Fusor, model: ReuseModel, prompt: RagPrompt, segments: list[Segment]) -> None:
        self.fusor, self.num_layers = fusor, model.num_layers
        self.num_tokens, self.num_context = prompt.num_tokens, prompt.num_context
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
        self.chosen = positions if self.first else positions[:0]
        self.num_checked = 0
        self._scores = positions[:0]

    @property
    def asks_question(self) -> bool:
        """Whether the question is run over the reused K/V before anything is chosen."""
        return self.selector is not None and (self.fusor.drop != "deviation" or self.selector.needs_question_attention)

    @property
    def rows(self) -> torch.Tensor:
        """Forced and chosen, sorted; until layer 1 has been checked, all candidates are chosen."""
        return torch.cat([self.forced, self.chosen]).sort().values if self.chosen.numel() else self.forced

    def asked(self, model: ReuseModel) -> int:
        """Of how many tokens, the question's last, the attention is learnt."""
        question = self.num_tokens - self.num_context
        if self.fusor.as_released:
            return question
        asked = min(self.fusor.question_tokens or question, question)
        # A longrope model would rotate the shorter prompt in another way.
        same = model.long_rope(self.num_context + asked) == model.long_rope(self.num_tokens)
        return asked if same else question

    def view(
        self,
        deviation: Callable[[Metric], torch.Tensor] | None,
        question_attention: Callable[[], torch.Tensor] | None,
        true_deviation: Callable[[Metric], torch.Tensor] | None,
    ) -> SelectionView:
        """What the selector sees; what is None raises where it is asked for.

        Made anew every time: kept, it would hold its request, and that one's K/V, in a reference cycle.
        """
        return SelectionView(
            self.positions,
            self._chunk,
            self._offset,
            deviation or self._no_fresh_kv,
            question_attention or self._too_late,
            true_deviation or self._too_late,
        )

    def choose(self, view: SelectionView) -> None:
        """The first choice, by the selector's scores."""
        assert self.selector is not None
        scores = self.selector.scores(view).cpu()
        if scores.shape != self.positions.shape:
            raise ValueError(
                f"{self.selector!r} returned scores of shape {tuple(scores.shape)}, expected "
                f"{tuple(self.positions.shape)}: one per candidate"
            )
        self._scores = scores
        best = torch.topk(scores, self._count(self.first, view)).indices
        self.chosen = self.positions[best.sort().values]
        self.num_checked = self.positions.numel() - self.chosen.numel() if self.first else 0

    def narrow(
        self,
        layer: int,
        rows: torch.Tensor,
        view: SelectionView,
        deviation: Callable[[], torch.Tensor],
        attention: Callable[[], torch.Tensor],
    ) -> bool:
        """Have as many go on to ``layer`` as the schedule allows; whether any dropped out.

        ``deviation()`` of the ``rows`` that ran through the layer before, [rows]; ``attention()`` [L, n] of the
        question to the candidates.
        """
        if self.selector is None:
            return False
        count = self._count(layer, view)
        if count >= self.chosen.numel():
            return False
        if layer == 1:  # nothing deviates on layer 0
            scores = self._scores[torch.searchsorted(self.positions, self.chosen)]
        else:
            scores = deviation()[torch.searchsorted(rows, self.chosen)]
            if self.fusor.drop != "deviation":
                layers = slice(layer - 1, layer) if self.fusor.drop == "attended" else slice(layer, None)
                index = torch.searchsorted(self.positions, self.chosen)
                scores = scores * attention()[layers, index].mean(dim=0)
        best = torch.topk(scores, count).indices
        self.chosen = self.chosen[best.sort().values]
        return True

    def _count(self, layer: int, view: SelectionView) -> int:
        assert self.selector is not None
        ratio = layer_ratio(self.fusor.schedule, self.fusor.ratio, layer, self.num_layers)
        return min(self.selector.count(view, ratio), self.positions.numel())

    def _no_fresh_kv(self, metric: Metric) -> torch.Tensor:
        raise ValueError(
            f"{self.selector!r} asks for the deviation without needs_fresh_kv = True: nothing is computed yet"
        )

    def _too_late(self, *_: object) -> torch.Tensor:
        raise ValueError(
            f"{self.selector!r} has needs_fresh_kv = True and chooses in the middle of a pass: only deviation() is "
            "known there; question_attention() and true_deviation() need needs_fresh_kv = False"
        )
