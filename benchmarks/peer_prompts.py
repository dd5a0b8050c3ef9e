"""The prompts that every peer gets: known chunks in a new order, and then more questions about the same chunks."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

import kvreuse as kr
from benchmarks.peer_workers.protocol import Prompt
from experiments.datasets import load_dataset
from experiments.timed import equal_chunks

BLOCK = 128  # tokens; the coarsest block in which a peer cuts prompts


@dataclass(frozen=True)
class Workload:
    """``first`` introduces the chunks; ``rounds[r]`` are the prompts of round r, which differ in the question only."""

    first: Prompt
    rounds: list[list[Prompt]]
    source: str

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(prompt.ids) for prompts in [[self.first], *self.rounds] for prompt in prompts)


def workload(
    model: kr.ReuseModel, chunks: int, chunk_tokens: int, rounds: int, questions: int, data_dir: str | None = None
) -> Workload:
    """Equal chunks in ``rounds`` new orders, ``questions`` questions each.

    No two orders begin with the same chunk, so that an exact prefix is no more than what every prompt begins with. That
    is filled up to whole blocks of 128 tokens, for peers that know chunks by their blocks; and the chunks are cut
    between words, so that a peer that takes text gets the same tokens.

    Raises:
        ValueError: more rounds than other orders, or more questions than the data set has.
    """
    if not 1 <= rounds < chunks:
        raise ValueError(
            f"rounds={rounds}: with {chunks} chunks give 1 to {chunks - 1}, each begins with another chunk"
        )
    data = load_dataset("musique", data_dir=data_dir, limit=max(20, questions + 1))
    if len(data.cases) <= questions:
        raise ValueError(f"questions={questions}: {data.source} has {len(data.cases)}, and one is for the first order")
    equal, source = equal_chunks(model, chunks + 2, chunk_tokens, data_dir=data_dir)
    text = _Words(model, torch.cat(list(equal.chunks)))
    prefix = equal.prefix.tolist() + text.take(-equal.prefix.numel() % BLOCK)
    parts = [text.take(chunk_tokens) for _ in range(chunks)]
    asked = [
        kr.RagPrompt.from_texts(
            model, system=data.task.system, chunks=["-"], question=f"\n\nQuestion: {case.question}\nAnswer:"
        ).question.tolist()
        for case in data.cases[: questions + 1]
    ]
    orders = [_order(first, chunks) for first in range(1, rounds + 1)]
    return Workload(
        first=Prompt(prefix, parts, asked[questions]),
        rounds=[[Prompt(prefix, [parts[i] for i in order], q) for q in asked[:questions]] for order in orders],
        source=source,
    )


def _order(first: int, chunks: int) -> list[int]:
    rest = [i for i in range(chunks) if i != first]
    random.Random(first).shuffle(rest)
    return [first, *rest]


class _Words:
    """Running text, cut where words begin."""

    def __init__(self, model: kr.ReuseModel, ids: torch.Tensor) -> None:
        self.ids = ids.tolist()
        # A token that is a space and more begins a word, whatever stands before it.
        texts = [model.decode([token]) for token in self.ids]
        self.begins = [text.startswith(" ") and not text.isspace() for text in texts]
        self.at = 0

    def take(self, count: int) -> list[int]:
        """The next ``count`` tokens that begin a word and end before one."""
        if not count:
            return []
        last = len(self.ids) - count
        start = next((i for i in range(self.at, last) if self.begins[i] and self.begins[i + count]), None)
        if start is None:
            raise ValueError(f"the text has no {count} tokens left that begin and end with a word: give fewer chunks")
        self.at = start + count
        return self.ids[start : self.at]
