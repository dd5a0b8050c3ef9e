"""transformers: full prefill, and its own way to reuse a prefix, a cache cut back to what two prompts share."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import torch

from benchmarks.peer_workers import hf
from benchmarks.peer_workers.protocol import Answer, Prompt, Worker, serve

FULL, PREFIX = "full prefill", "prefix reuse"


class Transformers(Worker):
    """The last prompt's cache stays; the next one cuts it back to the common beginning and continues from there."""

    packages = ("transformers", "torch")

    def load(self, model: str, context: int) -> list[str]:
        from transformers import DynamicCache

        self.model, self.new_cache = hf.load_float32(model), DynamicCache
        self.caches: dict[str, Any] = {}
        self.ids: dict[str, list[int]] = {FULL: [], PREFIX: []}
        self.logits: dict[str, torch.Tensor] = {}
        return [FULL, PREFIX]

    @torch.inference_mode()
    def first(self, method: str, prompt: Prompt) -> None:
        ids, known = prompt.ids, self.ids[method] if method == PREFIX else []
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids[:-1], known, strict=False)))
        cache = self.caches[method] if common else self.new_cache()
        if common:
            hf.cut_back(cache, common)
        out = self.model(torch.tensor([ids[common:]]), past_key_values=cache, logits_to_keep=1)
        self.caches[method], self.ids[method], self.logits[method] = cache, ids, out.logits[:, -1]

    def answer(self, method: str, max_new_tokens: int) -> Answer:
        position = len(self.ids[method])
        return hf.continue_greedily(self.model, self.caches[method], self.logits[method], position, max_new_tokens)


if __name__ == "__main__":
    serve(Transformers())
