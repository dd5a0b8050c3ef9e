"""kvboost: chunk-level reuse on Hugging Face models, with the recompute strategy that it calls cacheblend."""

from __future__ import annotations

from typing import Any

from benchmarks.peer_workers import hf
from benchmarks.peer_workers.protocol import Answer, Prompt, Worker, serve


class KVBoost(Worker):
    """Its engine on the float32 model. It takes text: a prompt's ids are decoded, and must come back the same."""

    packages = ("kvboost", "transformers", "torch")

    def load(self, model: str, context: int) -> list[str]:
        from kvboost import KVBoost as Engine
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        self.engine = Engine(
            model=hf.load_float32(model),
            tokenizer=self.tokenizer,
            recompute_strategy="cacheblend",
            recompute_ratio=0.15,
            device="cpu",
        )
        return ["cacheblend 0.15"]

    def first(self, method: str, prompt: Prompt) -> float:
        self.ids, self.text = prompt.ids, self.tokenizer.decode(prompt.ids)
        self.result: Any = self.engine.generate(self.text, max_new_tokens=1)
        return self.result.ttft_ms / 1e3

    def answer(self, method: str, max_new_tokens: int) -> Answer:
        import torch

        if self.tokenizer.encode(self.text) != self.ids:
            raise RuntimeError("this prompt's text is tokenized otherwise than its ids")
        logprobs = torch.as_tensor(self.result.first_token_logits).float().log_softmax(dim=-1).tolist()
        text = self.engine.generate(self.text, max_new_tokens=max_new_tokens).output_text
        return Answer(text=text, logprobs=logprobs)


if __name__ == "__main__":
    serve(KVBoost())
