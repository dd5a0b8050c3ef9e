"""One method on one case: TTFT, answer, divergence from full recompute, likelihood of the gold answer."""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import kvreuse as kr
from experiments.datasets import Case
from experiments.stored import OnDevice
from kvreuse.metrics import answer_nll, kl_divergence

STORE_BYTES = "64GiB"  # a bound for one case's chunks; it never takes more than they need


@dataclass(frozen=True)
class Measurement:
    """A case ready to be measured: its prompt, and how its answer is made and scored.

    ``others``: prompts that run in one batch with it; TTFT is then that of all, what else is recorded the case's own.
    """

    case: Case
    prompt: kr.RagPrompt
    gold: list[int]
    max_new_tokens: int
    stop: str | None
    score_tokens: int
    others: tuple[kr.RagPrompt, ...] = ()

    def prefill(self, method: kr.ReuseMethod, model: kr.ReuseModel, store: kr.KVStore) -> kr.Prefill:
        """The prompt's result, from a batch if there are others."""
        if not self.others:
            return method.prefill(model, self.prompt, store)
        if not isinstance(method, kr.ChunkReuse | kr.FullRecompute):
            raise TypeError(f"{method!r} takes one prompt at a time: leave it out of a run with batches")
        return method.prefill(model, [self.prompt, *self.others], store).row(0)


@dataclass(frozen=True)
class Reference:
    """Full recompute's greedy answer (its first tokens) and the log-probabilities [T, V] it gives them."""

    token_ids: list[int]
    logprobs: torch.Tensor


def gold_ids(model: kr.ReuseModel, prompt: kr.RagPrompt, answer: str) -> list[int]:
    """The gold answer's token ids as they follow this prompt.

    With a space before it, as in running text, unless the prompt's last token is special or ends in white space (chat
    templates end in "assistant" and a newline).
    """
    last = model.decode(prompt.question[-1:])
    space = " " if last and not last[-1].isspace() else ""
    return [int(t) for t in model.tokenize(space + answer.strip())]


def method_names(methods: Sequence[kr.ReuseMethod]) -> dict[str, str]:
    """From a method's repr to a name for tables and plots: label and encoder context.

    Where that is the same for several, with those settings in which they differ.
    """
    groups: dict[tuple[str, str | None], list[kr.ReuseMethod]] = {}
    for method in methods:
        groups.setdefault((method.label, getattr(method, "context", None)), []).append(method)
    names = {}
    for (label, context), group in groups.items():
        settings = [vars(method) for method in group]
        differ = [name for name in settings[0] if len({repr(s.get(name)) for s in settings}) > 1]
        for method, values in zip(group, settings, strict=True):
            notes = [context] if context else []
            notes += [f"{name}={values[name]}" for name in differ if values.get(name) is not None]
            names[repr(method)] = f"{label} ({', '.join(notes)})" if notes else label
    count = Counter(names.values())
    return {repr(m): names[repr(m)] if count[names[repr(m)]] == 1 else repr(m) for m in methods}


def measure_case(
    methods: Sequence[kr.ReuseMethod],
    model: kr.ReuseModel,
    measurement: Measurement,
    number: int = 0,
    repeats: int = 1,
    warm: bool = True,
) -> Iterator[dict[str, Any]]:
    """Records of one case, one per method, as they come.

    Chunks are encoded before anything is timed, each kind of encoding into its own store: methods that reuse the
    same chunks share them and their encoding time. The order of methods rotates from case to case, behind full
    recompute, whose answer the others are compared with. Unless ``warm``, each runs once unrecorded before that.
    """
    stores: dict[Hashable, kr.KVStore] = {}
    encode_s: dict[Hashable, float] = {}
    for method in methods:
        kind = method.encoding
        if kind not in stores:
            stores[kind] = method.open_store() if isinstance(method, OnDevice) else kr.KVStore(STORE_BYTES)
            prompts = (measurement.prompt, *measurement.others)
            encode_s[kind] = sum(method.encode(model, prompt, stores[kind]) for prompt in prompts)
    first = [m for m in methods if isinstance(m, kr.FullRecompute)]  # its answer is what the others are compared with
    rest = [m for m in methods if m not in first]
    turn = number % max(1, len(rest))
    order = [*first, *rest[turn:], *rest[:turn]]
    timed: dict[str, list[float]] = {repr(m): [] for m in order}
    for round_ in range(0 if warm else -1, repeats - 1):
        for method in order:
            seconds = ttft(method, model, measurement, stores[method.encoding])
            if round_ >= 0:
                timed[repr(method)].append(seconds)
    names = method_names(methods)
    reference: Reference | None = None
    for method in order:
        kind = method.encoding
        record, scored = measure(method, model, measurement, stores[kind], reference)
        reference = reference or scored
        runs = [*timed[repr(method)], record["ttft_s"]]
        record |= {"label": names[repr(method)], "encode_s": encode_s[kind]}
        yield record | {"ttft_s": statistics.median(runs), "ttft_runs_s": runs}
    del stores, reference
    gc.collect()
    if model.device.type == "cuda":
        torch.cuda.empty_cache()


def measure(
    method: kr.ReuseMethod,
    model: kr.ReuseModel,
    m: Measurement,
    store: kr.KVStore,
    reference: Reference | None,
) -> tuple[dict[str, Any], Reference | None]:
    """One raw record (JSON values), and what other methods are compared with if this is full recompute.

    ``kl`` is nats per token over the reference's answer (over its first token's place if that answer is empty), ``nll``
    nats per token of the first gold answer. ``recomputed_tokens`` is the mean over layers of the context tokens whose
    K/V were recomputed, ``cpu_s`` the processor time of the prefill, which other processes on a busy machine change
    less than the TTFT. What a method does not have is None.
    """
    record: dict[str, Any] = {
        "case_id": m.case.case_id,
        "method": repr(method),
        "gold": list(m.case.answers),
        "prompt_tokens": m.prompt.num_tokens,
        "question_tokens": m.prompt.question.numel(),
        "num_chunks": len(m.prompt.chunks),
        **dict.fromkeys(_UNKNOWN),
        "error": None,
    }
    if not method.has_prefill:  # no logits to compare
        answer = method.answer(model, m.prompt, store, m.max_new_tokens, m.stop)
        return record | _answer_fields(answer), None
    started = time.process_time()
    result = m.prefill(method, model, store)
    record["cpu_s"] = time.process_time() - started
    record["nll"] = answer_nll(model.score(result, m.gold), m.gold)
    if reference is None or isinstance(method, kr.FullRecompute):
        answer = model.generate(result, m.max_new_tokens, m.stop)
    else:
        scored = _score_reference(model, result, reference)
        record["kl"] = kl_divergence(reference.logprobs, scored[: len(reference.token_ids)])
        answer = _answer(model, result, m, reference, scored)
    record |= _answer_fields(answer) | _trace_fields(result, m.prompt)
    if isinstance(method, kr.FullRecompute):
        ids = (answer.token_ids or [result.first_token])[: m.score_tokens]
        return record | {"kl": 0.0}, Reference(ids, model.score(result, ids))
    return record, None


def _score_reference(model: kr.ReuseModel, result: kr.Prefill, reference: Reference) -> torch.Tensor:
    """Log-probabilities of the reference's answer, and of what follows it if that is still inside the context."""
    ids = reference.token_ids
    room = result.prompt.num_tokens + len(ids) < model.max_context
    return model.score(result, [*ids, ids[-1]] if room else ids)  # what the last id is makes no difference


def _answer(
    model: kr.ReuseModel, result: kr.Prefill, m: Measurement, reference: Reference, scored: torch.Tensor
) -> kr.Answer:
    """The greedy answer. As far as it is the reference's, ``scored`` has shown it: that part is not decoded again."""
    picks, ids, same = scored.argmax(dim=-1).tolist(), reference.token_ids, 0
    ends = model.eos_token_ids
    most = 0 if m.stop is not None else min(len(ids), m.max_new_tokens - 1)
    while same < most and picks[same] == ids[same] and picks[same] not in ends:
        same += 1
    if 0 < same == len(ids) < len(picks) and picks[same] in ends:  # the whole answer, and its end
        return kr.Answer(model.decode(ids).strip(), list(ids), result.ttft_s, dict(result.trace.stages))
    return model.generate(result, m.max_new_tokens, m.stop, ids[:same])


def ttft(method: kr.ReuseMethod, model: kr.ReuseModel, m: Measurement, store: kr.KVStore) -> float:
    """One more TTFT measurement, in seconds."""
    if not method.has_prefill:
        return method.answer(model, m.prompt, store, m.max_new_tokens, m.stop).ttft_s
    return m.prefill(method, model, store).ttft_s


_UNKNOWN = ("kl", "nll", "num_reused", "num_exact", "recomputed_tokens", "hits", "misses", "budget", "cpu_s")


def _answer_fields(answer: kr.Answer) -> dict[str, Any]:
    return {
        "ttft_s": answer.ttft_s,
        "stages": answer.stages,
        "answer": answer.text,
        "answer_tokens": len(answer.token_ids),
    }


def _trace_fields(result: kr.Prefill, prompt: kr.RagPrompt) -> dict[str, Any]:
    if result.prompt is not prompt:  # MapReduce goes on from a shorter prompt: a share of this one has no meaning
        return {}
    trace = result.trace
    question = prompt.question.numel()
    return {
        "num_reused": trace.num_reused,
        "num_exact": trace.num_exact,
        "recomputed_tokens": statistics.fmean(len(s) - question for s in trace.selected),
        "hits": trace.hits,
        "misses": trace.misses,
        "budget": trace.budget if trace.num_reused else None,
    }
