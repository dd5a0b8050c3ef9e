"""How long a request occupies a server, measured: by method, and by how many of its chunks were cached."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from tqdm import tqdm

import kvreuse as kr
from experiments.dataset_types import seeded_order
from kvreuse.methods.base import ChunkReuse, encode_segment

FULL, PREFIX, REUSE, BLEND = "FullRecompute()", "PrefixCaching()", "FullReuse()", "CacheBlend()"
CACHING = (PREFIX, REUSE, BLEND)


def measure_service(model: kr.ReuseModel, prompt: kr.RagPrompt, repeats: int) -> Iterator[dict[str, Any]]:
    """Interleaved rounds of every method and number of cached chunks, behind a warm-up round of two.

    ``ttft_s``: up to the first token. ``after_s``: what the server does behind it before it is free: K/V that the cache
    did not have are encoded (chunk reuse) or put into the tree (prefix caching).
    """
    cases = _Cases(model, prompt)
    number = len(prompt.chunks)
    points = [(FULL, 0), *((method, hits) for method in CACHING for hits in range(number + 1))]
    for round_ in tqdm(range(-1, repeats), desc="rounds"):
        shift = max(0, round_) * len(points) // max(1, repeats)
        rows = []
        for method, hits in [(BLEND, number), (PREFIX, number)] if round_ < 0 else points[shift:] + points[:shift]:
            result = cases.run(method, hits, round_)
            after = result.trace.stages.get("encode_s", 0.0) + result.trace.stages.get("insert_s", 0.0)
            record = {"case_id": f"round-{round_}", "method": f"{method}, {hits} cached", "kind": method, "hits": hits}
            rows.append(record | {"ttft_s": result.ttft_s, "after_s": after, "tokens": prompt.num_tokens})
        if round_ >= 0:
            yield from rows


class _Cases:
    """A prompt whose chunks can be in a cache or not, in any number."""

    def __init__(self, model: kr.ReuseModel, prompt: kr.RagPrompt) -> None:
        self._model, self._prompt = model, prompt
        self._methods: Mapping[str, ChunkReuse] = {REUSE: kr.FullReuse(), BLEND: kr.CacheBlend()}
        fingerprint = model.fingerprint()
        segments = self._methods[BLEND].segments(model, prompt)
        self._stored = [(s.key(fingerprint), encode_segment(model, s)) for s in segments]
        self._fingerprint = fingerprint
        self._system = len(segments) - len(prompt.chunks)  # segments before the first chunk

    def run(self, method: str, hits: int, seed: int) -> kr.Prefill:
        """One request of which ``hits`` chunks were cached: the first ones (prefix caching), or any."""
        if method == FULL:
            return kr.FullRecompute().prefill(self._model, self._prompt, kr.KVStore())
        if method == PREFIX:
            return self._prefix(hits)
        store = kr.KVStore("64GiB")
        chunks = range(len(self._prompt.chunks))
        cached = set(seeded_order(chunks, seed, method, str(hits))[:hits])
        for place, (key, kv) in enumerate(self._stored):
            if place < self._system or place - self._system in cached:
                store.put(key, kv, self._fingerprint)
        return self._methods[method].prefill(self._model, self._prompt, store)

    def _prefix(self, hits: int) -> kr.Prefill:
        """A tree that has the system prompt and the first chunks; the chunks behind are new to it."""
        tree = kr.TreeCache(self._model, self._prompt.prefix, "32GiB", 0)
        chunks = self._prompt.chunks[:hits] or [self._prompt.chunks[0].roll(1)]  # or another one: no chunk is found
        held = kr.RagPrompt(self._prompt.prefix, chunks, self._prompt.question)
        kr.RagCache().encode(self._model, held, tree)
        return kr.RagCache().prefill(self._model, self._prompt, tree)


def service_table(records: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], torch.Tensor]:
    """(method, cached chunks) -> rounds [rounds, 2] of (ttft_s, after_s)."""
    found: dict[tuple[str, int], list[list[float]]] = {}
    for record in records:
        found.setdefault((record["kind"], record["hits"]), []).append([record["ttft_s"], record["after_s"]])
    return {key: torch.tensor(rows, dtype=torch.float64) for key, rows in found.items()}
