"""`ReuseMethod`: the one interface of all methods; `ChunkReuse`: the methods that put stored chunk K/V anywhere."""

from __future__ import annotations

import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, ClassVar, overload

from kvreuse.blend.fusor import Fusor, blend_batch
from kvreuse.blend.plan import Segment, chunk_segments, look_up
from kvreuse.blend.request import Request
from kvreuse.errors import LostEntryError
from kvreuse.kv import ChunkEncoder, ChunkKV, EncoderContext, encode_chunk
from kvreuse.prompt import RagPrompt
from kvreuse.results import Answer, BatchPrefill, Prefill
from kvreuse.store import KVStore
from kvreuse.timing import StageTimer

if TYPE_CHECKING:
    from kvreuse.model import ReuseModel


class ReuseMethod(ABC):
    """A way to prefill a RAG prompt.

    Subclasses are frozen dataclasses: the object is the configuration, its repr the name. ``has_prefill``: False where
    a method only answers and has no prefilled prompt to continue or to score.
    """

    has_prefill: ClassVar[bool] = True

    @property
    def encoding(self) -> str:
        """Names what `encode` stores; methods of the same encoding share it."""
        return repr(self)

    @property
    def label(self) -> str:
        """A short name for plots."""
        return type(self).__name__

    @abstractmethod
    def encode(self, model: ReuseModel, prompt: RagPrompt, store: KVStore) -> float:
        """Offline: compute and store what `prefill` will reuse. Returns the seconds it took."""

    @abstractmethod
    def prefill(self, model: ReuseModel, prompt: RagPrompt, store: KVStore) -> Prefill:
        """Prefill the prompt, up to the logits of the first new token."""

    def answer(
        self,
        model: ReuseModel,
        prompt: RagPrompt,
        store: KVStore,
        max_new_tokens: int = 32,
        stop: str | None = None,
    ) -> Answer:
        """Prefill and continue greedily (see `ReuseModel.generate`)."""
        return model.generate(self.prefill(model, prompt, store), max_new_tokens, stop)

    def check_request(self, model: ReuseModel, prompt: RagPrompt, store: KVStore | None) -> KVStore:
        """Raise for a model, prompt or store that cannot be served; returns the store."""
        check_types(model, prompt)
        if not isinstance(store, KVStore):
            raise TypeError(f"{self!r} reuses stored K/V and was given store={store!r}: pass kr.KVStore()")
        model.require_supported()
        model.check_prompt(prompt)
        return store


def check_types(model: object, prompt: object) -> None:
    """Raise for a bare Hugging Face model or a text where a wrapped model and a prompt belong."""
    from kvreuse.model import ReuseModel

    if not isinstance(model, ReuseModel):
        raise TypeError(f"model is a {type(model).__name__}: wrap it as kr.ReuseModel(hf_model, tokenizer)")
    if isinstance(prompt, list | tuple):
        raise TypeError("this method takes one prompt at a time; lists go to FullRecompute and to chunk reuse")
    if not isinstance(prompt, RagPrompt):
        raise TypeError(f"prompt is a {type(prompt).__name__}: make one with kr.RagPrompt.from_texts(model, ...)")


def as_batch(prompt: RagPrompt | Sequence[RagPrompt]) -> list[RagPrompt]:
    """The prompts of a list; one of its own otherwise."""
    return list(prompt) if isinstance(prompt, list | tuple) else [prompt]  # type: ignore[list-item]


def check_batch(model: ReuseModel, prompts: list[RagPrompt]) -> None:
    """Raise for prompts that cannot run in one pass."""
    if not prompts:
        raise ValueError("the list of prompts is empty: a batch has at least one")
    if model.is_recorded and len(prompts) > 1:
        raise ValueError(f"{len(prompts)} prompts inside model.record(...): recorders look at one prompt at a time")
    regimes = [model.long_rope(p.num_tokens) for p in prompts]
    if any(regimes) and not all(regimes):
        long, short = (next(i for i, regime in enumerate(regimes) if regime is which) for which in (True, False))
        raise ValueError(
            f"prompt {long} has {prompts[long].num_tokens} tokens and prompt {short} {prompts[short].num_tokens}: "
            f"{model.name} rotates prompts of {model.long_rope_length} tokens and more with other factors, and all of "
            "a batch alike: split the batch at that length"
        )


def encode_segment(model: ReuseModel, segment: Segment) -> ChunkKV:
    """Compute one segment's K/V."""
    return encode_chunk(model, segment.context, segment.ids, segment.start, segment.long_rope)


def encode_missing(model: ReuseModel, segments: list[Segment], store: KVStore) -> float:
    """Compute and store K/V of the segments the store does not have; seconds."""
    started = time.perf_counter()
    fingerprint = model.fingerprint()
    keys = [segment.key(fingerprint) for segment in segments]
    kept = True
    for key, segment in zip(keys, segments, strict=True):
        if key not in store:
            kept &= store.put(key, encode_segment(model, segment), fingerprint)
    if kept and not all(key in store for key in keys):
        warnings.warn(
            f"{store!r} is too small for this prompt's K/V: chunks push each other out and are recomputed in every "
            "request; give KVStore(memory=...) more room",
            stacklevel=3,
        )
    return time.perf_counter() - started


def check_ratio(ratio: float) -> None:
    """Raise unless ``ratio`` is a fraction in [0, 1]."""
    if not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
        raise ValueError(
            f"ratio={ratio!r}: the recompute ratio is a fraction in [0, 1] (0 reuses all, 1 recomputes all)"
        )


class ChunkReuse(ReuseMethod):
    """Reuses chunk K/V at any place of the prompt. A new method overrides `fusor`, and that is all.

    A chunk the store does not have is recomputed with the prompt, whole, and then computed and stored for the next
    request, behind the first token (stage ``encode_s``).
    """

    context: EncoderContext

    @property
    def encoding(self) -> str:
        """Chunks encoded in the same context."""
        return f"chunks, {self.context}"

    @abstractmethod
    def fusor(self) -> Fusor:
        """What is recomputed, and how."""

    def request_fusor(self, model: ReuseModel, prompt: RagPrompt, segments: list[Segment], fingerprint: str) -> Fusor:
        """`fusor` for one request, whose segments have been looked up; what adapts to them overrides this."""
        return self.fusor()

    def segments(self, model: ReuseModel, prompt: RagPrompt) -> list[Segment]:
        """The parts of the prompt that may be reused."""
        return chunk_segments(model, prompt, ChunkEncoder(self.context))

    def encode(self, model: ReuseModel, prompt: RagPrompt | Sequence[RagPrompt], store: KVStore) -> float:
        """Compute and store K/V of prefix and chunks of a prompt or several, each on its own; seconds."""
        prompts = as_batch(prompt)
        for one in prompts:
            self.check_request(model, one, store)
        return encode_missing(model, [s for one in prompts for s in self.segments(model, one)], store)

    @overload
    def prefill(self, model: ReuseModel, prompt: RagPrompt, store: KVStore, *, pipelined: bool = True) -> Prefill: ...

    @overload
    def prefill(
        self, model: ReuseModel, prompt: Sequence[RagPrompt], store: KVStore, *, pipelined: bool = True
    ) -> BatchPrefill: ...

    def prefill(
        self,
        model: ReuseModel,
        prompt: RagPrompt | Sequence[RagPrompt],
        store: KVStore,
        *,
        pipelined: bool = True,
    ) -> Prefill | BatchPrefill:
        """Prefill from stored chunk K/V; what is recomputed is in ``result.trace``.

        A list of prompts runs as one batch (`BatchPrefill`): each has its own selection, and equals the prompt run
        alone within rounding.

        ``pipelined``: read the next layers from disk while a layer is recomputed (5); False reads everything first.

        Raises:
            ValueError: no prompts, or on both sides of the length at which a longrope model changes its factors.
        """
        prompts = as_batch(prompt)
        for one in prompts:
            self.check_request(model, one, store)
        check_batch(model, prompts)
        fingerprint = model.fingerprint()
        timer = StageTimer(model.device)
        by_prompt = [self.segments(model, one) for one in prompts]
        found = look_up([s for own in by_prompt for s in own], fingerprint, store)
        requests: list[Request] = []
        with closing(found):
            left = iter(found)
            for one, own in zip(prompts, by_prompt, strict=True):
                segments = [next(left) for _ in own]
                requests.append(Request(self.request_fusor(model, one, segments, fingerprint), one, segments))
            timer.mark("lookup_s")
            result = blend_batch(model, requests, timer, pipelined, store.promotes)
            promote_read([s for r in requests for s in r.segments], fingerprint, store, result, timer.stages)
        missing = [s for r in requests for s in r.segments if s.stored is None]
        if missing:
            timer.stages["encode_s"] = encode_missing(model, missing, store)
        return result.row(0) if isinstance(prompt, RagPrompt) else result


def promote_read(
    segments: list[Segment],
    fingerprint: str,
    store: KVStore,
    result: Prefill | BatchPrefill,
    stages: dict[str, float],
) -> None:
    """Keep in memory what was read from disk (stage ``promote_s``, behind the first token)."""
    if result.read_layers and any(result.read_layers):
        started = time.perf_counter()
        for segment, known in zip(segments, result.read_layers, strict=True):
            if known and segment.stored is not None:
                with suppress(LostEntryError):
                    store.promote(segment.key(fingerprint), segment.stored, known)
        stages["promote_s"] = time.perf_counter() - started
    result.read_layers = None


@contextmanager
def closing(segments: list[Segment]) -> Iterator[None]:
    """Close what the segments hold open, also after an error."""
    try:
        yield
    finally:
        for segment in segments:
            if segment.stored is not None:
                segment.stored.close()
