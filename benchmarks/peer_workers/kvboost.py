"""kvboost: chunk-level reuse on Hugging Face models, with the recompute strategy that it calls cacheblend."""

from __future__ import annotations

import threading
from typing import Any

import torch

from benchmarks.peer_workers import hf
from benchmarks.peer_workers.protocol import Answer, Prompt, Worker, serve


class KVBoost(Worker):
    """Its engine on the float32 model. It takes text: a prompt's ids are decoded, and must come back the same.

    The first token is known when it is streamed (``on_token``); what the engine stores behind it is not waited for.
    """

    packages = ("kvboost", "transformers", "torch")

    def load(self, model: str, context: int) -> list[str]:
        from kvboost import KVBoost as Engine
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        self.engine = Engine(
            model=hf.load_float32(model),
            tokenizer=self.tokenizer,
            max_cache_bytes=4 << 30,
            max_chunks=1024,  # of 128 tokens
            recompute_strategy="cacheblend",
            recompute_ratio=0.15,
            device="cpu",
        )
        return ["cacheblend 0.15"]

    def first(self, method: str, prompt: Prompt) -> None:
        self.ids, self.text = prompt.ids, self.tokenizer.decode(prompt.ids)
        self.result: Any = None
        known = threading.Event()
        self.request = threading.Thread(target=self._generate, args=(known,))
        self.request.start()
        known.wait()

    def answer(self, method: str, max_new_tokens: int) -> Answer:
        self.request.join()
        if self.tokenizer.encode(self.text) != self.ids:
            raise RuntimeError("this prompt's text is tokenized otherwise than its ids")
        logits = torch.as_tensor(self.result.first_token_logits)[None]
        text = self.engine.generate(self.text, max_new_tokens=max_new_tokens).output_text
        return Answer(text=text, logprobs=hf.logprobs_of(logits), reported_s=self.result.ttft_ms / 1e3)

    def _generate(self, known: threading.Event) -> None:
        try:
            self.result = self.engine.generate(self.text, max_new_tokens=1, on_token=lambda token: known.set())
        finally:
            known.set()


if __name__ == "__main__":
    serve(KVBoost())
