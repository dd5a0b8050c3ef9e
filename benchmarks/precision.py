"""How far fp16 and bf16 are from fp32: the same method, model and prompts in each type.

    python -m benchmarks.precision [--model demo] [--cases 5] [--dtypes float16,bfloat16]

Per type and method: the largest logit error of the first token relative to the largest logit, and the KL divergence
(nats per token) from fp32's distribution over fp32's own greedy answer; means over cases of the small MuSiQue set.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import kvreuse as kr
from benchmarks.arguments import save
from experiments.datasets import load_dataset, paragraph_chunks
from kvreuse.metrics import kl_divergence

METHODS = (kr.FullRecompute(), kr.FullReuse(), kr.CacheBlend(), kr.CacheBlend(ratio=1.0))


@dataclass(frozen=True)
class Reference:
    """What fp32 gives: logits [1, V], greedy answer, its log-probabilities [T, V]."""

    logits: torch.Tensor
    answer: list[int]
    logprobs: torch.Tensor


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device")
    parser.add_argument("--cases", type=int, default=5)
    parser.add_argument("--dtypes", default="float16,bfloat16")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/precision.json"))
    args = parser.parse_args()
    dataset = load_dataset("musique", data_dir="small", limit=args.cases)

    def prompts(model: kr.ReuseModel) -> list[kr.RagPrompt]:
        questions = [dataset.task.question_template.format(question=case.question) for case in dataset.cases]
        return [
            kr.RagPrompt.from_texts(model, system=dataset.task.system, chunks=paragraph_chunks(case), question=question)
            for case, question in zip(dataset.cases, questions, strict=True)
        ]

    exact = kr.load_model(args.model, device=args.device, dtype="float32")
    references: dict[tuple[int, kr.ReuseMethod], Reference] = {}
    for number, prompt in enumerate(tqdm(prompts(exact), desc="float32")):
        for method in METHODS:
            result = _prefill(exact, method, prompt)
            answer = exact.generate(result, max_new_tokens=16).token_ids or [result.first_token]
            references[number, method] = Reference(result.logits, answer, exact.score(result, answer))
    saved: dict[str, list[dict[str, float]]] = {}
    print("| type | method | logit error | KL to fp32 |\n|---|---|---|---|")
    for dtype in args.dtypes.split(","):
        model = kr.load_model(args.model, device=args.device, dtype=dtype)
        found: dict[kr.ReuseMethod, list[tuple[float, float]]] = {method: [] for method in METHODS}
        for number, prompt in enumerate(tqdm(prompts(model), desc=dtype)):
            for method in METHODS:
                reference = references[number, method]
                result = _prefill(model, method, prompt)
                error = (result.logits.float() - reference.logits).abs().max() / reference.logits.abs().max()
                kl = kl_divergence(reference.logprobs, model.score(result, reference.answer))
                found[method].append((float(error), kl))
        for method, pairs in found.items():
            errors, kls = zip(*pairs, strict=True)
            saved[f"{dtype}, {method!r}"] = [{"logit_error": e, "kl": k} for e, k in pairs]
            print(f"| {dtype} | {method!r} | {statistics.mean(errors):.1e} | {statistics.mean(kls):.1e} |")

    save(args.out, {"model": args.model, "cases": saved})


def _prefill(model: kr.ReuseModel, method: kr.ReuseMethod, prompt: kr.RagPrompt) -> kr.Prefill:
    store = kr.KVStore("8GiB")
    method.encode(model, prompt, store)
    return method.prefill(model, prompt, store)


if __name__ == "__main__":
    main()
