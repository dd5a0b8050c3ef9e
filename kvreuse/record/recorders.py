"""The recorders: frozen dataclasses that say what to look at, and turn a prefill into one tensor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from kvreuse.blend.deviation import METRICS, Metric, squared_deviation
from kvreuse.record import plots
from kvreuse.record.rank import spearman

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from kvreuse.prompt import RagPrompt
    from kvreuse.record.recording import Observed

Tokens = int | Literal["question", "all"]


@dataclass(frozen=True)
class Recorder(ABC):
    """One quantity. ``name`` is where the recording has it; ``needs_reference``: whether full recompute is run."""

    name: ClassVar[str]
    needs_reference: ClassVar[bool] = True

    def attention_layers(self, num_layers: int) -> tuple[int, ...]:
        """The layers whose attention is looked at; none by default."""
        return ()

    @abstractmethod
    def record(self, run: Observed, reference: Observed | None) -> torch.Tensor:
        """The quantity of one prefill, on the CPU."""

    @abstractmethod
    def frame(self, value: torch.Tensor, prompt: RagPrompt) -> pd.DataFrame:
        """The same in long form, a row per number."""

    @abstractmethod
    def plot(self, value: torch.Tensor, prompt: RagPrompt, axes: Axes) -> None:
        """Draw it."""


@torch.inference_mode()
def _deviation(metric: Metric, run: Observed, reference: Observed) -> torch.Tensor:
    """[L, N] of a run's context K/V against the reference's."""
    n = run.prompt.num_context
    rows = []
    for ours, full in zip(run.cache.layers, reference.cache.layers, strict=True):
        parts = [t[:, :, :n] for t in (ours.keys, ours.values, full.keys, full.values)]
        rows.append(squared_deviation(metric, *parts).cpu())
    return torch.stack(rows)


def _check_metric(metric: str) -> None:
    if metric not in METRICS:
        raise ValueError(f"metric={metric!r}: choose one of {', '.join(METRICS)}")


def _check_tokens(tokens: Tokens) -> None:
    if tokens not in ("question", "all") and (not isinstance(tokens, int) or tokens < 1):
        raise ValueError(f"tokens={tokens!r}: give 'question', 'all', or how many of the prompt's last tokens")


def _count(tokens: Tokens, prompt: RagPrompt) -> int:
    if tokens == "question":
        return prompt.question.numel()
    return prompt.num_tokens if tokens == "all" else min(int(tokens), prompt.num_tokens)


@dataclass(frozen=True)
class KVDeviation(Recorder):
    """KV deviation from full recompute (CacheBlend, 4.1): [L, N], squared L2 over heads and dimensions, fp32.

    Of the K/V the prefill ended with, on K, V or the sum of both (``metric``). Layer 0 is zero within rounding: its K/V
    depend on token and position alone.
    """

    metric: Metric = "kv"
    name: ClassVar[str] = "kv_deviation"

    def __post_init__(self) -> None:
        _check_metric(self.metric)

    def record(self, run: Observed, reference: Observed | None) -> torch.Tensor:
        """[L, N]."""
        assert reference is not None
        return _deviation(self.metric, run, reference)

    def frame(self, value: torch.Tensor, prompt: RagPrompt) -> pd.DataFrame:
        """Columns ``layer``, ``position``, ``chunk`` (-1 is the prefix), ``kv_deviation``."""
        return plots.by_token(self.name, value, prompt)

    def plot(self, value: torch.Tensor, prompt: RagPrompt, axes: Axes) -> None:
        """A map of layers by positions."""
        plots.token_map(axes, value, prompt, f"KV deviation ({self.metric}, squared L2)", log=True)


@dataclass(frozen=True)
class AttentionDeviation(Recorder):
    """Attention deviation from full recompute (CacheBlend, 4.1): [L].

    Per layer the L2 norm of the difference of the forward attention matrices [H, T, N]: attention weights from the
    prompt's last tokens (``tokens``: "question", "all", or a number) to the N context tokens. A row that did not run on
    the layer (the released code's question) is left out.
    """

    tokens: Tokens = "question"
    name: ClassVar[str] = "attention_deviation"

    def __post_init__(self) -> None:
        _check_tokens(self.tokens)

    def attention_layers(self, num_layers: int) -> tuple[int, ...]:
        """All of them."""
        return tuple(range(num_layers))

    def record(self, run: Observed, reference: Observed | None) -> torch.Tensor:
        """[L]."""
        assert reference is not None
        count, n = _count(self.tokens, run.prompt), run.prompt.num_context
        norms = []
        for layer in range(run.model.num_layers):
            difference = run.attention(layer, count)[..., :n] - reference.attention(layer, count)[..., :n]
            norms.append(difference.nan_to_num(0.0).norm())
        return torch.stack(norms)

    def frame(self, value: torch.Tensor, prompt: RagPrompt) -> pd.DataFrame:
        """Columns ``layer``, ``attention_deviation``."""
        return plots.by_layer(self.name, value)

    def plot(self, value: torch.Tensor, prompt: RagPrompt, axes: Axes) -> None:
        """A line over layers."""
        plots.layer_line(axes, value, "attention deviation (L2)")


@dataclass(frozen=True)
class AttentionMatrix(Recorder):
    """Attention weights [layers, H, T, S], fp32: of the last ``tokens`` over the whole prompt, on ``layers``.

    With ``tokens="all"`` rows that did not run are NaN: their attention was never computed in this prefill.
    """

    layers: tuple[int, ...] | None = None
    tokens: Tokens = "question"
    name: ClassVar[str] = "attention_matrix"
    needs_reference: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_tokens(self.tokens)
        if self.layers is not None and (not self.layers or len(set(self.layers)) < len(self.layers)):
            raise ValueError(f"layers={self.layers!r}: give some layers, each once, or None for all")

    def attention_layers(self, num_layers: int) -> tuple[int, ...]:
        """Those asked for; negative ones count from the end."""
        if self.layers is None:
            return tuple(range(num_layers))
        wrong = [i for i in self.layers if not -num_layers <= i < num_layers]
        if wrong:
            raise ValueError(f"layers={self.layers!r}: the model has layers 0 to {num_layers - 1}")
        return tuple(i % num_layers for i in self.layers)

    def record(self, run: Observed, reference: Observed | None) -> torch.Tensor:
        """[layers, H, T, S]."""
        count = _count(self.tokens, run.prompt)
        return torch.stack([run.attention(i, count) for i in self.attention_layers(run.model.num_layers)])

    def frame(self, value: torch.Tensor, prompt: RagPrompt) -> pd.DataFrame:
        """Columns ``layer``, ``head``, ``position`` (of the query), ``key``, ``attention_matrix``; rows that ran."""
        return plots.by_attention(self.name, value, prompt, self.layers)

    def plot(self, value: torch.Tensor, prompt: RagPrompt, axes: Axes) -> None:
        """The mean over layers and heads as a map of queries by keys."""
        plots.attention_map(axes, value.mean(dim=(0, 1)), prompt)


@dataclass(frozen=True)
class RankCorrelation(Recorder):
    """Spearman's rank correlation [L - 1] of the KV deviation of neighbouring layers (CacheBlend, 4.3, figure 8).

    Over the reused tokens that are not exact: exact ones deviate nowhere, and would agree for nothing. NaN beside layer
    0, whose K/V do not deviate, and where fewer than two tokens are reused.
    """

    metric: Metric = "kv"
    name: ClassVar[str] = "rank_correlation"

    def __post_init__(self) -> None:
        _check_metric(self.metric)

    def record(self, run: Observed, reference: Observed | None) -> torch.Tensor:
        """[L - 1]."""
        assert reference is not None
        deviation = _deviation(self.metric, run, reference)[:, run.reused[run.reused < run.prompt.num_context]]
        pairs = [spearman(a, b) for a, b in pairwise(deviation[1:])]
        return torch.tensor([float("nan"), *pairs])

    def frame(self, value: torch.Tensor, prompt: RagPrompt) -> pd.DataFrame:
        """Columns ``layer`` (the lower of the two), ``rank_correlation``."""
        return plots.by_layer(self.name, value)

    def plot(self, value: torch.Tensor, prompt: RagPrompt, axes: Axes) -> None:
        """A line over layers."""
        plots.layer_line(axes, value, "rank correlation with the next layer")
        axes.set_ylim(min(0.0, float(value.nan_to_num(0.0).min())) - 0.02, 1.02)


@dataclass(frozen=True)
class SelectedTokens(Recorder):
    """Which tokens ran through each layer: [L, S], boolean (the question's are true everywhere)."""

    name: ClassVar[str] = "selected_tokens"
    needs_reference: ClassVar[bool] = False

    def record(self, run: Observed, reference: Observed | None) -> torch.Tensor:
        """[L, S]."""
        out = torch.zeros(len(run.selected), run.prompt.num_tokens, dtype=torch.bool)
        for layer, rows in enumerate(run.selected):
            out[layer, rows] = True
        return out

    def frame(self, value: torch.Tensor, prompt: RagPrompt) -> pd.DataFrame:
        """Columns ``layer``, ``position``, ``chunk`` (-1: prefix, number of chunks: question), ``selected_tokens``."""
        return plots.by_token(self.name, value, prompt)

    def plot(self, value: torch.Tensor, prompt: RagPrompt, axes: Axes) -> None:
        """A map of layers by positions."""
        plots.token_map(axes, value.float(), prompt, "recomputed (1) or reused (0)", log=False)
