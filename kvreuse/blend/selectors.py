"""Which reused tokens are recomputed: every rule scores the candidates, the highest scores are recomputed first.

A rule of your own is a frozen dataclass with one function, ``scores(view)``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvreuse.blend.deviation import METRICS, Metric


@dataclass(frozen=True, eq=False)
class SelectionView:
    """What a selector sees, all about the ``n`` candidates (reused, inexact context tokens, sorted by position).

    ``positions`` [n]; ``chunk`` [n], the index of the candidate's chunk; ``offset`` [n], its place inside the chunk.
    ``deviation(metric)`` -> [n]: of fresh against stored K/V on the check layer (only with ``needs_fresh_kv``).
    ``question_attention()`` -> [L, n]: attention from the question over the reused K/V, averaged over heads and
    question tokens. ``true_deviation(metric)`` -> [L, n]: against full recompute's K/V (costs a full prefill;
    analysis only). With ``needs_fresh_kv`` the choice falls in the middle of a pass, and these two raise, except
    attention that ``needs_question_attention`` asked for.
    """

    positions: torch.Tensor
    chunk: torch.Tensor
    offset: torch.Tensor
    deviation: Callable[[Metric], torch.Tensor]
    question_attention: Callable[[], torch.Tensor]
    true_deviation: Callable[[Metric], torch.Tensor]


@dataclass(frozen=True)
class Selector(ABC):
    """Scores candidates once; a gradual schedule then narrows them by their deviation on each layer.

    ``needs_question_attention``: the question's pass over the reused K/V runs before anything else, so that
    ``view.question_attention()`` is known in the middle of a pass as well.
    ``needs_fresh_kv``: layer 0 runs on all tokens and the choice falls on layer 1, the check layer, where the fresh
    K/V of all candidates are known and kept. Otherwise the chosen tokens alone go from layer 0 on.
    """

    needs_fresh_kv: ClassVar[bool] = False
    needs_question_attention: ClassVar[bool] = False

    @abstractmethod
    def scores(self, view: SelectionView) -> torch.Tensor:
        """One score per candidate, [n]; higher is recomputed first."""

    def count(self, view: SelectionView, ratio: float) -> int:
        """How many candidates to choose at this ratio."""
        return round(ratio * view.positions.numel())


def _check_metric(metric: str) -> None:
    if metric not in METRICS:
        raise ValueError(f"metric={metric!r}: choose one of {', '.join(METRICS)}")


@dataclass(frozen=True)
class HKVD(Selector):
    """High KV deviation on the check layer (CacheBlend, 4.3), measured on K, V or both."""

    metric: Metric = "kv"
    needs_fresh_kv: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_metric(self.metric)

    def scores(self, view: SelectionView) -> torch.Tensor:
        """Squared L2 deviation on layer 1."""
        return view.deviation(self.metric)


@dataclass(frozen=True)
class FirstTokens(Selector):
    """The first tokens of every chunk (EPIC's LegoLink): ``k`` of each, or as many as the ratio allows (``k=None``)."""

    k: int | None = None

    def __post_init__(self) -> None:
        if self.k is not None and self.k < 0:
            raise ValueError(
                f"k={self.k}: give the number of tokens to recompute at the start of each chunk, 0 or more"
            )

    def scores(self, view: SelectionView) -> torch.Tensor:
        """The earlier in its chunk, the higher."""
        return -view.offset.float()

    def count(self, view: SelectionView, ratio: float) -> int:
        """All tokens whose offset is below ``k``."""
        return super().count(view, ratio) if self.k is None else int((view.offset < self.k).sum())


@dataclass(frozen=True)
class RandomTokens(Selector):
    """Uniformly random tokens, the same for the same seed and prompt shape."""

    seed: int = 0

    def scores(self, view: SelectionView) -> torch.Tensor:
        """Uniform noise."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.rand(view.positions.numel(), generator=generator).to(view.positions.device)


@dataclass(frozen=True)
class Windows(Selector):
    """Windows of ``size`` candidates in a row, in random order."""

    size: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size={self.size}: a window holds at least one token")

    def scores(self, view: SelectionView) -> torch.Tensor:
        """Every token has its window's random rank; inside a window the earlier come first."""
        n = view.positions.numel()
        window = torch.arange(n) // self.size
        rank = torch.randperm(int(window[-1]) + 1 if n else 0, generator=torch.Generator().manual_seed(self.seed))
        scores = -(rank[window] * self.size + torch.arange(n) % self.size).float()
        return scores.to(view.positions.device)


def _check_from_layer(from_layer: float) -> None:
    if not 0 <= from_layer < 1:
        raise ValueError(f"from_layer={from_layer}: give a fraction in [0, 1)")


def _upper(attention: torch.Tensor, from_layer: float) -> torch.Tensor:
    """Mean [n] of ``attention`` [L, n] over the layers above the fraction ``from_layer``."""
    return attention[int(from_layer * attention.shape[0]) :].mean(dim=0)


@dataclass(frozen=True)
class QuestionAttention(Selector):
    """Attention from the question to the context over the reused K/V; needs no full layer 0.

    ``from_layer`` is the fraction of layers left out at the bottom (1/3: the upper two thirds).
    """

    from_layer: float = 1 / 3

    def __post_init__(self) -> None:
        _check_from_layer(self.from_layer)

    def scores(self, view: SelectionView) -> torch.Tensor:
        """Mean attention over heads, question tokens and the upper layers."""
        return _upper(view.question_attention(), self.from_layer)


@dataclass(frozen=True)
class AttendedDeviation(Selector):
    """HKVD's deviation times `QuestionAttention`'s attention: tokens that changed and that the question looks at."""

    metric: Metric = "kv"
    from_layer: float = 1 / 3
    needs_fresh_kv: ClassVar[bool] = True
    needs_question_attention: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_metric(self.metric)
        _check_from_layer(self.from_layer)

    def scores(self, view: SelectionView) -> torch.Tensor:
        """Squared L2 deviation on layer 1, times mean attention over heads, question tokens and the upper layers."""
        return view.deviation(self.metric) * _upper(view.question_attention(), self.from_layer)


@dataclass(frozen=True)
class OracleDeviation(Selector):
    """Deviation from full recompute's own K/V, averaged over layers: what a perfect check would choose.

    For analysis.
    """

    metric: Metric = "kv"

    def __post_init__(self) -> None:
        _check_metric(self.metric)

    def scores(self, view: SelectionView) -> torch.Tensor:
        """Each layer's deviation as a share of that layer's total, so that no layer outweighs the others."""
        deviation = view.true_deviation(self.metric)
        return (deviation / deviation.sum(dim=1, keepdim=True).clamp_min(1e-30)).mean(dim=0)
