"""`Recording`: what `model.record(...)` gives, filled by every prefill inside its block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import Cache

from kvreuse.record.capture import Capture, LayerCall, Rows, attention_weights

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from kvreuse.model import ReuseModel
    from kvreuse.prompt import RagPrompt
    from kvreuse.record.recorders import Recorder
    from kvreuse.results import Prefill


@dataclass
class Observed:
    """One prefill as recorders see it: the method's, or the full recompute it is compared with."""

    model: ReuseModel
    prompt: RagPrompt
    cache: Cache
    selected: list[torch.Tensor]
    reused: torch.Tensor
    calls: dict[int, LayerCall]
    _weights: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    @torch.inference_mode()
    def attention(self, layer: int, tokens: int) -> torch.Tensor:
        """Attention weights [H, tokens, S] (fp32, CPU) of the prompt's last ``tokens``; NaN where a row did not run.

        Kept: a reference is asked again for every method.
        """
        if (layer, tokens) not in self._weights:
            self._weights[layer, tokens] = self._attention(layer, tokens)
        return self._weights[layer, tokens]

    def _attention(self, layer: int, tokens: int) -> torch.Tensor:
        rows = Rows.of_layer(self.selected, layer)
        first = self.prompt.num_tokens - tokens
        wanted = rows.ran[rows.ran >= first]
        found = attention_weights(self.model, layer, self.calls[layer], rows, wanted, self.cache).cpu()
        out = torch.full((found.shape[0], tokens, self.prompt.num_tokens), float("nan"))
        out[:, wanted - first] = found
        return out


@contextmanager
def recording_of(model: ReuseModel, recorders: Sequence[Recorder]) -> Iterator[Recording]:
    """`ReuseModel.record`."""
    if model._recording is not None:
        raise RuntimeError("this model is being recorded already: give all recorders to one model.record(...)")
    recording = Recording(model, recorders)
    with ExitStack() as stack:
        recording.open(stack)
        yield recording


class Recording:
    """What recorders saw of the last prefill inside the block, each under the recorder's name.

    ``rec.kv_deviation`` [L, N], ``rec.attention_deviation`` [L], ... are tensors; ``rec.frame(name)`` is the same as
    a pandas frame in long form (the only quantity, or all of them, without a name), ``rec.plot(name)`` as a picture.

    The reference is full recompute of the same prompt, on the model's own path, run once per prompt behind the first
    prefill; its time is in no stage. Hooks only look, so outputs are the same bits with and without.
    """

    def __init__(self, model: ReuseModel, recorders: Sequence[Recorder]) -> None:
        self.model, self.recorders = model, tuple(recorders)
        names = [r.name for r in self.recorders]
        if not names:
            raise ValueError("model.record() was given no recorder: give at least one, such as kr.KVDeviation()")
        if len(set(names)) < len(names):
            raise ValueError(f"two recorders write {next(n for n in names if names.count(n) > 1)}: give one of each")
        layers = sorted({i for r in self.recorders for i in r.attention_layers(model.num_layers)})
        self._capture = Capture(model, tuple(layers))
        self._reference: Observed | None = None
        self._busy = False
        self._values: dict[str, torch.Tensor] = {}
        self._prompt: RagPrompt | None = None

    # -- filling, by the model --------------------------------------------------------------------------------------

    def open(self, stack: ExitStack) -> None:
        """Register hooks; they go when ``stack`` closes, and so does what they held."""
        stack.callback(self._close)
        self._capture.hooks(stack)
        self.model._recording = self

    def _close(self) -> None:
        self.model._recording = self._reference = None
        self._capture.take()

    def prefilled(self, result: Prefill) -> None:
        """A method has just prefilled: record it."""
        if self._busy:
            return
        trace, calls = result.trace, self._capture.take()
        self._busy = True
        try:
            reference = self._full_recompute(result.prompt) if any(r.needs_reference for r in self.recorders) else None
            run = Observed(self.model, result.prompt, result.cache, trace.selected, trace.reused, calls)
            self._values = {r.name: r.record(run, reference) for r in self.recorders}
            self._prompt = result.prompt
        finally:
            self._busy = False

    def _full_recompute(self, prompt: RagPrompt) -> Observed:
        known = self._reference
        if known is None or not torch.equal(known.prompt.input_ids, prompt.input_ids):
            _, cache = self.model.prefill(prompt.input_ids)
            every = [torch.arange(prompt.num_tokens)] * self.model.num_layers
            known = Observed(self.model, prompt, cache, every, every[0][:0], self._capture.take())
            self._reference = known
        known.prompt = prompt  # the same tokens may be split into context and question elsewhere
        return known

    # -- reading ----------------------------------------------------------------------------------------------------

    @property
    def prompt(self) -> RagPrompt:
        """The prompt that was prefilled last."""
        if self._prompt is None:
            raise ValueError("nothing was prefilled inside this `with model.record(...)` block: there is no recording")
        return self._prompt

    def __getitem__(self, name: str) -> torch.Tensor:
        assert self.prompt is not None
        if name not in self._values:
            raise KeyError(f"{name} was not recorded; this recording has {', '.join(self._values)}")
        return self._values[name]

    @property
    def kv_deviation(self) -> torch.Tensor:
        """[L, N], see `KVDeviation`."""
        return self["kv_deviation"]

    @property
    def attention_deviation(self) -> torch.Tensor:
        """[L], see `AttentionDeviation`."""
        return self["attention_deviation"]

    @property
    def attention_matrix(self) -> torch.Tensor:
        """[layers, H, T, S], see `AttentionMatrix`."""
        return self["attention_matrix"]

    @property
    def rank_correlation(self) -> torch.Tensor:
        """[L - 1], see `RankCorrelation`."""
        return self["rank_correlation"]

    @property
    def selected_tokens(self) -> torch.Tensor:
        """[L, S], true where the token ran through the layer; see `SelectedTokens`."""
        return self["selected_tokens"]

    def frame(self, name: str | None = None) -> pd.DataFrame:
        """A recorded quantity in long form, a row per number; all of them, with a column ``quantity``, by default."""
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("frames need pandas: pip install 'kvreuse[experiments]'") from error
        found = {r.name: r.frame(self[r.name], self.prompt) for r in self._named(name)}
        if len(found) == 1:
            return next(iter(found.values()))
        return pd.concat([frame.assign(quantity=key) for key, frame in found.items()], ignore_index=True)

    def plot(self, name: str | None = None) -> Figure:
        """A picture of one recorded quantity; of all of them, a panel each, by default."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("plots need matplotlib: pip install 'kvreuse[experiments]'") from error
        recorders = self._named(name)
        figure = Figure(figsize=(8.0, 3.4 * len(recorders)), layout="constrained")
        panels: Any = figure.subplots(len(recorders), 1, squeeze=False)
        for recorder, axes in zip(recorders, panels[:, 0], strict=True):
            recorder.plot(self[recorder.name], self.prompt, axes)
        return figure

    def _named(self, name: str | None) -> tuple[Recorder, ...]:
        chosen = tuple(r for r in self.recorders if name in (None, r.name))
        if not chosen:
            raise KeyError(f"{name} was not recorded; this recording has {', '.join(r.name for r in self.recorders)}")
        return chosen

    def __repr__(self) -> str:
        return f"Recording({', '.join(map(repr, self.recorders))})"
