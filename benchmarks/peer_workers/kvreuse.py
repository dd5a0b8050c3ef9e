"""This project's own methods, in the project's environment."""

from __future__ import annotations

import torch

import kvreuse as kr
from benchmarks.peer_workers.protocol import Answer, Prompt, Worker, serve


class KVReuse(Worker):
    """Chunks are encoded once, in the first order; prefix caching serves that order as a request."""

    packages = ("torch", "transformers")

    def load(self, model: str, context: int) -> list[str]:
        torch.set_num_threads(1)
        self.model = kr.load_model(model)
        methods = (kr.FullRecompute(), kr.PrefixCaching(), kr.CacheBlend(ratio=0.15), kr.FullReuse())
        self.methods: dict[str, kr.ReuseMethod] = {type(method).__name__: method for method in methods}
        self.stores: dict[str, object] = {name: kr.KVStore("4GiB") for name in self.methods}
        self.stores["PrefixCaching"] = kr.BlockPrefixCache("4GiB")
        self.results: dict[str, kr.Prefill] = {}
        return list(self.methods)

    def prepare(self, method: str, prompt: Prompt) -> None:
        self.methods[method].encode(self.model, _rag(prompt), self.stores[method])  # type: ignore[arg-type]
        self.first(method, prompt)

    def first(self, method: str, prompt: Prompt) -> None:
        store = self.stores[method]
        self.results[method] = self.methods[method].prefill(self.model, _rag(prompt), store)  # type: ignore[arg-type]

    def answer(self, method: str, max_new_tokens: int) -> Answer:
        result = self.results[method]
        tokens = self.model.generate(result, max_new_tokens).token_ids
        logprobs = result.logits[0].float().log_softmax(dim=-1).tolist()
        return Answer(token_ids=tokens, logprobs=logprobs, reported_s=result.ttft_s)


def _rag(prompt: Prompt) -> kr.RagPrompt:
    return kr.RagPrompt(prompt.prefix, prompt.chunks, prompt.question)


if __name__ == "__main__":
    serve(KVReuse())
