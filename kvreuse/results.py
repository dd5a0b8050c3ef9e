"""What a method returns: the prefilled prompt with its trace, and the answer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from kvreuse import compat

if TYPE_CHECKING:
    from kvreuse.model import ReuseModel
    from kvreuse.prompt import RagPrompt
    from kvreuse.timing import StageTimer

TTFT_STAGES = (
    "lookup_s",
    "load_s",
    "rotate_s",
    "check_s",
    "map_prefill_s",
    "map_decode_s",
    "recompute_s",
    "first_token_s",
)


def ttft(stages: dict[str, float]) -> float:
    """Seconds to the first token: the sum of those stages that come before it."""
    return sum(stages.get(name, 0.0) for name in TTFT_STAGES)


@dataclass
class Trace:
    """What a prefill did.

    ``selected``: per layer, the sorted positions that ran through it (question included) [n_l]. On HKVD's check layer
    K/V of all other inexact tokens are fresh as well.
    ``stages``: seconds per stage; those of `TTFT_STAGES` make up the TTFT. With pipelined loading ``load_s`` is what
    was waited for; ``read_s`` is how long the readers took, hidden or not. ``encode_s`` (chunks computed for next time)
    and ``promote_s`` (read from disk, kept in memory) come after the first token.
    ``hits`` / ``misses``: chunks found in the store or not. ``num_exact``: context tokens whose K/V are exact.
    ``num_reused``: context tokens whose stored K/V are approximate, the recompute ratio's denominator;
    ``reused`` has their positions. ``read_bytes``: bytes read from disk.
    ``ratio``: the recompute ratio, whoever chose it; None where none counts.
    ``num_forced``: tokens that run on every layer (the question, and what the store missed). ``num_checked``: reused
    tokens of which the check layer computed K/V and no more.
    """

    selected: list[torch.Tensor] = field(default_factory=list)
    stages: dict[str, float] = field(default_factory=dict)
    hits: int = 0
    misses: int = 0
    num_exact: int = 0
    num_reused: int = 0
    read_bytes: int = 0
    ratio: float | None = None
    num_forced: int = 0
    num_checked: int = 0
    reused: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))

    @property
    def budget(self) -> float:
        """Share of the reused tokens' K/V that was computed anew, mean over layers; NaN where nothing was reused."""
        if not self.num_reused:
            return math.nan
        anew = sum(rows.numel() - self.num_forced for rows in self.selected) + self.num_checked
        return anew / (self.num_reused * len(self.selected))


@dataclass
class Prefill:
    """A prompt that is ready to be continued.

    ``logits`` [B, V]: for the first new token. ``cache``: a transformers Cache of the whole prompt; hand it on
    with ``model.hf.generate(**model.generate_inputs(result))``. ``read_layers``: per segment the packed layers that
    were read from disk, until the store has taken them.
    """

    logits: torch.Tensor
    cache: Cache
    trace: Trace
    prompt: RagPrompt
    read_layers: list[dict[int, list[torch.Tensor]]] | None = field(default=None, repr=False)

    @property
    def ttft_s(self) -> float:
        """Seconds from "prompt and chunk ids known" to "first token known"."""
        return ttft(self.trace.stages)

    @property
    def first_token(self) -> int:
        """The greedy first token."""
        return int(self.logits[0].argmax())


@dataclass
class BatchPrefill:
    """Several prompts, prefilled in one pass, that are ready to be continued; every row is as the prompt run alone.

    ``logits`` [B, V]. ``cache``: a transformers Cache of the batch, [B, H_kv, longest prompt, D], padded on the left;
    hand it on with ``model.hf.generate(**model.generate_inputs(result))``. ``traces``: one per prompt, in its own
    positions; their ``stages``, the time of the whole batch, are shared, and bytes that prompts share count in each.
    """

    logits: torch.Tensor
    cache: Cache
    traces: list[Trace]
    prompts: tuple[RagPrompt, ...]
    read_layers: list[dict[int, list[torch.Tensor]]] | None = field(default=None, repr=False)

    @property
    def stages(self) -> dict[str, float]:
        """Seconds per stage, of all prompts together."""
        return self.traces[0].stages

    @property
    def ttft_s(self) -> float:
        """Seconds from "prompts and chunk ids known" to "all first tokens known"."""
        return ttft(self.stages)

    @property
    def lengths(self) -> list[int]:
        """Tokens of every prompt."""
        return [p.num_tokens for p in self.prompts]

    @property
    def first_tokens(self) -> list[int]:
        """The greedy first tokens."""
        return [int(token) for token in self.logits.argmax(dim=-1)]

    def row(self, index: int) -> Prefill:
        """One prompt's result; its cache [1, H_kv, S, D] looks into the batch's."""
        trace, prompt = self.traces[index], self.prompts[index]
        if len(self.prompts) == 1:
            return Prefill(self.logits, self.cache, trace, prompt, self.read_layers)
        index = range(len(self.prompts))[index]
        stop = max(self.lengths)
        layers = []
        for held in self.cache.layers:
            own = (t[index : index + 1, :, stop - prompt.num_tokens : stop] for t in (held.keys, held.values))
            layer = DynamicLayer()
            compat.fill_layer(layer, *own)
            layers.append(layer)
        return Prefill(self.logits[index : index + 1], compat.new_cache(layers), trace, prompt)

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True)
class Answer:
    """A greedy answer: ``text``, ``token_ids`` (without the end token), ``ttft_s``, and seconds per stage."""

    text: str
    token_ids: list[int]
    ttft_s: float
    stages: dict[str, float]


def full_prefill(model: ReuseModel, prompt: RagPrompt, timer: StageTimer) -> Prefill:
    """Prefill the whole prompt on the model's own path; nothing is reused."""
    logits, cache = model.prefill(prompt.input_ids)
    timer.mark("recompute_s")
    trace = Trace([torch.arange(prompt.num_tokens)] * model.num_layers, timer.stages)
    return model.prefilled(Prefill(logits, cache, trace, prompt))
