"""How good an answer is, how far it moved from full recompute, and how sure we are of a mean.

Text metrics follow the papers: word-level F1 as SQuAD defines it, ROUGE-L with `rouge-score` and stemming.
Two more say more with a small model: the KL divergence to full recompute and the likelihood of the gold
answer, both in nats. Intervals are 95% percentile bootstraps over cases, seeded.
"""

from __future__ import annotations

import importlib.util
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvreuse.intervals import (
    Interval,
    Values,
    bootstrap_interval,
    gap_recovered,
    gap_recovered_interval,
    paired_interval,
)

__all__ = [
    "Interval",
    "Values",
    "answer_nll",
    "bootstrap_interval",
    "gap_recovered",
    "gap_recovered_interval",
    "kl_divergence",
    "normalize_answer",
    "paired_interval",
    "rouge_l",
    "word_f1",
]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """SQuAD's normal form: lower case, no ASCII punctuation, no a/an/the, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def word_f1(prediction: str, answers: str | Sequence[str]) -> float:
    """Word-level F1 in [0, 1], the best over the gold answers.

    As in SQuAD, a side that is empty after normalisation scores 1 against an empty one, 0 against any other.

    Raises:
        ValueError: there is no gold answer.
    """
    return max(_f1(prediction, answer) for answer in _as_references(answers, "answers"))


def _f1(prediction: str, answer: str) -> float:
    predicted, gold = normalize_answer(prediction).split(), normalize_answer(answer).split()
    if not predicted or not gold:
        return float(predicted == gold)
    common = (Counter(predicted) & Counter(gold)).total()
    return 2 * common / (len(predicted) + len(gold))


def rouge_l(prediction: str, references: str | Sequence[str]) -> float:
    """ROUGE-L F-measure in [0, 1] with Porter stemming, the best over the references.

    Goes through `evaluate` where that is installed and has its rouge module on this machine already, else
    straight to `rouge-score`, which `evaluate` calls too: the numbers are the same. Nothing is downloaded.

    Raises:
        ValueError: there is no reference.
        ImportError: rouge-score is not installed.
    """
    return _rouge_scorer()(prediction, _as_references(references, "references"))


@lru_cache(maxsize=1)
def _rouge_scorer() -> Callable[[str, list[str]], float]:
    if importlib.util.find_spec("rouge_score") is None:
        raise ImportError("rouge_l needs rouge-score: pip install 'kvreuse[experiments]'")
    metric = _local_evaluate_rouge()
    if metric is not None:

        def through_evaluate(prediction: str, references: list[str]) -> float:
            texts = {"predictions": [prediction], "references": [references]}
            scores = metric.compute(**texts, rouge_types=["rougeL"], use_stemmer=True, use_aggregator=False)
            return float(scores["rougeL"][0])

        return through_evaluate

    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    return lambda prediction, references: float(scorer.score_multi(references, prediction)["rougeL"].fmeasure)


def _local_evaluate_rouge() -> Any | None:
    """`evaluate`'s rouge metric if it can be had without a network, else None."""
    if importlib.util.find_spec("evaluate") is None:
        return None
    import evaluate

    # evaluate.load asks the hub first and waits for it: call it only where an earlier load left its module.
    module = Path(evaluate.config.HF_MODULES_CACHE, "evaluate_modules", "metrics", "evaluate-metric--rouge")
    if not module.is_dir():
        return None
    try:
        local = evaluate.DownloadConfig(local_files_only=True)
        return evaluate.load("rouge", keep_in_memory=True, download_config=local)
    except Exception:  # whatever is wrong with that copy, rouge-score gives the same numbers
        return None


def _as_references(texts: str | Sequence[str], name: str) -> list[str]:
    listed = [texts] if isinstance(texts, str) else list(texts)
    if not listed:
        raise ValueError(f"{name} is empty: give at least one gold text to compare with")
    return listed


def kl_divergence(reference_logprobs: Tensor, logprobs: Tensor) -> float:
    """KL(reference || method) in nats, averaged over the `T` teacher-forced tokens; computed in fp64.

    Args:
        reference_logprobs: [T, V] log-probabilities of full recompute.
        logprobs: [T, V] log-probabilities of the method, for the same tokens.

    Raises:
        ValueError: the shapes differ, there is no token, or the rows are not log-probabilities.
    """
    _check_logprobs(reference_logprobs, "reference_logprobs")
    _check_logprobs(logprobs, "logprobs")
    if reference_logprobs.shape != logprobs.shape:
        raise ValueError(
            f"reference_logprobs {tuple(reference_logprobs.shape)} and logprobs {tuple(logprobs.shape)} "
            "differ in shape: score the same answer tokens with the same vocabulary"
        )
    reference = reference_logprobs.double()
    probability = reference.exp()
    terms = torch.where(probability > 0, probability * (reference - logprobs.double()), 0.0)
    # Rounded log-probabilities can leave a sum a hair below zero, which no divergence is.
    return float(terms.sum(dim=-1).clamp(min=0).mean())


def answer_nll(logprobs: Tensor, token_ids: Tensor | Sequence[int]) -> float:
    """Negative log-likelihood of an answer, in nats per token.

    Args:
        logprobs: [T, V] log-probabilities, row t those of the answer's token t.
        token_ids: the answer's T token ids.

    Raises:
        ValueError: the lengths differ, an id is not in the vocabulary, or the rows are not log-probabilities.
    """
    _check_logprobs(logprobs, "logprobs")
    ids = torch.as_tensor(token_ids, dtype=torch.long, device=logprobs.device)
    length, vocabulary = logprobs.shape
    if ids.shape != (length,):
        raise ValueError(f"token_ids has shape {tuple(ids.shape)}, but logprobs has {length} rows: one id a row")
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise ValueError(f"token_ids has ids outside the vocabulary of {vocabulary} tokens")
    return float(-logprobs.double().gather(1, ids[:, None]).mean())


def _check_logprobs(logprobs: Tensor, name: str) -> None:
    if logprobs.ndim != 2 or logprobs.numel() == 0:
        raise ValueError(f"{name} has shape {tuple(logprobs.shape)}, expected [T, V] with at least one token")
    total = logprobs.float().logsumexp(dim=-1)
    if not bool((total.abs() < 0.05).all()):  # NaN fails this too; loose enough for bf16
        raise ValueError(f"{name} is not log-probabilities (a row does not sum to 1): apply log_softmax to logits")
