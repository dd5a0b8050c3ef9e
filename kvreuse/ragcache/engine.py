"""`Engine`: the model behind the server. Prefills a suffix behind the tree's exact K/V, decodes the running batch.

What computes is apart from what records: an iteration whose thread died or ran into its timeout has changed nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from transformers import Cache, DynamicCache

from kvreuse import compat
from kvreuse.blend.fusor import Fusor
from kvreuse.blend.plan import Segment
from kvreuse.prompt import RagPrompt
from kvreuse.ragcache.batch import DecodeBatch
from kvreuse.ragcache.kv import TreeCache
from kvreuse.ragcache.node import KVBackend, Match
from kvreuse.ragcache.segments import MakePayload
from kvreuse.ragcache.speculative import Generation
from kvreuse.results import Prefill
from kvreuse.timing import StageTimer

A = TypeVar("A")
B = TypeVar("B")


@dataclass(eq=False)
class Sequence:
    """A generation with its tokens. ``stored``: the K/V of its prompt and of ``stored_tokens`` tokens in all."""

    generation: Generation
    prompt: RagPrompt
    max_new_tokens: int
    tokens: list[int] = field(default_factory=list)
    stored: Cache | None = field(default=None, repr=False)
    stored_tokens: int = 0
    done: bool = False

    @property
    def num_emitted(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return self.prompt.num_tokens + len(self.tokens)


class Engine:
    """Sequences of one model. `prefill`, `continued` and `step` compute; the rest keeps the books.

    Args:
        cache: the tree, and the model that computes.
        max_batch: sequences that decode together.
    """

    def __init__(self, cache: TreeCache, max_batch: int) -> None:
        self.cache, self.model = cache, cache.model
        self._max_batch = max_batch
        self.moving = Stopwatch()  # of copying K/V between tiers
        self.restart()

    def restart(self) -> list[Sequence]:
        """Forget the batch, as a lost thread does; returns the sequences that were in it."""
        lost = list(getattr(self, "rows", []))
        self.batch = DecodeBatch(self.model, self._max_batch)
        self.rows: list[Sequence] = []
        return lost

    @property
    def has_room(self) -> bool:
        """Whether another sequence may join."""
        return len(self.rows) < self.batch.max_rows

    # -- computing ----------------------------------------------------------------------------------------------------

    def prepare(self, sequence: Sequence, match: Match) -> tuple[RagPrompt, list[Segment]]:
        """What a prefill needs; tokens that were emitted before their K/V were lost count as question."""
        prompt = sequence.prompt
        if sequence.tokens:
            emitted = torch.tensor(sequence.tokens, dtype=torch.long)
            prompt = RagPrompt(prompt.prefix, prompt.chunks, torch.cat([prompt.question, emitted]))
        return prompt, self.cache.segments(prompt, match)

    def prefill(self, prompt: RagPrompt, segments: list[Segment]) -> Prefill:
        """Prefill what the tree does not have."""
        return Fusor().prefill(self.model, prompt, segments, StageTimer(self.model.device))

    @torch.inference_mode()
    def continued(self, sequence: Sequence) -> Cache:
        """K/V of prompt and answer from the stored ones: only the answer's tokens run again, in one pass."""
        assert sequence.stored is not None
        cache = DynamicCache()
        for index, layer in enumerate(sequence.stored.layers):
            cache.update(
                layer.keys[:, :, : sequence.stored_tokens], layer.values[:, :, : sequence.stored_tokens], index
            )
        missing = sequence.tokens[sequence.stored_tokens - sequence.prompt.num_tokens : -1]
        if missing:
            ids = torch.tensor([missing], device=self.model.device)
            positions = torch.arange(len(missing), device=self.model.device)[None] + sequence.stored_tokens
            compat.run_model(self.model.hf, ids, positions, cache)
        return cache

    def step(self) -> torch.Tensor:
        """One more token's logits for every sequence of the batch [B, V]."""
        return self.batch.step([s.tokens[-1] for s in self.rows])

    # -- keeping the books --------------------------------------------------------------------------------------------

    def admit(self, sequence: Sequence, result: Prefill) -> None:
        """Record a prefill: its first token, its K/V; it joins the batch unless that was all."""
        sequence.stored, sequence.stored_tokens = result.cache, result.prompt.num_tokens
        self._emit(sequence, result.first_token)
        if not sequence.done:
            self.batch.join(result.cache, sequence.stored_tokens)
            self.rows.append(sequence)

    def payloads(self, sequence: Sequence, result: Prefill) -> MakePayload:
        """Cuts the documents' K/V out of a prefill, on the stopwatch."""
        return self.moving.timed(self.cache.cutter(sequence.prompt, result))

    def rejoin(self, sequence: Sequence, cache: Cache) -> None:
        """Back into the batch with what `continued` returned."""
        self.batch.join(cache, sequence.num_tokens - 1)
        self.rows.append(sequence)

    def record(self, logits: torch.Tensor) -> list[Sequence]:
        """Record a step; returns the sequences that are done, which have left the batch."""
        for sequence, token in zip(self.rows, logits.argmax(dim=-1).tolist(), strict=True):
            self._emit(sequence, token)
        done = [s for s in self.rows if s.done]
        for sequence in done:
            self.drop(sequence)
        return done

    def drop(self, sequence: Sequence) -> None:
        """Out of the batch, if it is in."""
        if sequence in self.rows:
            row = self.rows.index(sequence)
            moved = self.batch.leave(row)
            self.rows[row] = self.rows[moved]
            self.rows.pop()

    def _emit(self, sequence: Sequence, token: int) -> None:
        """One more token; the rules of `ReuseModel.generate`."""
        if token in self.model.eos_token_ids:
            sequence.done = True
            return
        sequence.tokens.append(token)
        full = sequence.num_tokens - 1 >= self.model.max_context
        sequence.done = full or len(sequence.tokens) >= sequence.max_new_tokens


class Stopwatch:
    """Adds up the seconds of the functions it has wrapped."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[[A], B]) -> Callable[[A], B]:
        """The function, timed."""

        def call(argument: A) -> B:
            started = time.perf_counter()
            try:
                return function(argument)
            finally:
                self.seconds += time.perf_counter() - started

        return call


class TimedBackend:
    """A tree's backend, on a stopwatch."""

    def __init__(self, backend: KVBackend, watch: Stopwatch) -> None:
        self.to_host, self.to_gpu = watch.timed(backend.to_host), watch.timed(backend.to_gpu)
        self.drop, self.num_bytes = backend.drop, backend.num_bytes
