"""kvpress: the context's K/V, computed in full, are compressed to half; more questions read what was kept."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.peer_workers import hf
from benchmarks.peer_workers.protocol import Answer, Prompt, Worker, serve


class KVPress(Worker):
    """The press of its README, as the context manager that its README shows: the pipeline takes text only.

    The question runs behind the press, at its true positions, as in the pipeline.
    """

    packages = ("kvpress", "transformers", "torch")

    def load(self, model: str, context: int) -> list[str]:
        from kvpress import ExpectedAttentionPress
        from transformers import DynamicCache

        self.model, self.new_cache = hf.load_float32(model), DynamicCache
        self.press = ExpectedAttentionPress(compression_ratio=0.5)
        self.context: list[int] = []
        self.cache: Any = None
        return ["ExpectedAttentionPress, half kept"]

    @torch.inference_mode()
    def first(self, method: str, prompt: Prompt) -> None:
        if self.context != prompt.context:
            self.cache, self.context = self.new_cache(), prompt.context
            with self.press(self.model):
                self.model(torch.tensor([self.context]), past_key_values=self.cache, logits_to_keep=1)
            self.kept = self.cache.get_seq_length()
        hf.cut_back(self.cache, self.kept)
        start = len(self.context)
        self.position = start + len(prompt.question)
        positions = torch.arange(start, self.position)[None]
        out = self.model(torch.tensor([prompt.question]), position_ids=positions, past_key_values=self.cache)
        self.logits = out.logits[:, -1]

    def answer(self, method: str, max_new_tokens: int) -> Answer:
        return hf.continue_greedily(self.model, self.cache, self.logits, self.position, max_new_tokens)


if __name__ == "__main__":
    serve(KVPress())
