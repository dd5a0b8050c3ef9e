"""CacheBlend's extended sets (section 7.1): every question and three paraphrases, over chunks of all questions' texts.

The paper has its paraphrases written by GPT-4; here they are templates around the question. They retrieve more nearly
the same chunks than rewritten questions would, which favours every kind of reuse.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import kvreuse as kr
from experiments.dataset_types import seeded_order
from experiments.datasets import load_dataset
from experiments.vectors import SEPARATOR, Counts, Search, count_tokens, embed, embedder_named, search_all
from experiments.workloads import Request, Workload
from kvreuse.ragcache.corpus import SYSTEM
from kvreuse.retrieval import Embeds, split_text

if TYPE_CHECKING:
    import numpy as np

PARAPHRASES = (
    "I would like to know this: {question}",
    "{question} Please look it up in the documents.",
    "Tell me, going by what the texts say: {question}",
)
WARMUP = 6  # the first one in so many requests is left out: the store is empty at first


@dataclass(frozen=True, eq=False)
class ExtendedSet:
    """Queries with the chunks found for them; workloads differ in the order of both.

    ``found`` [queries, top_k]: chunks by their place, nearest first, -1 for none.
    """

    dataset: str
    source: str
    queries: tuple[str, ...] = field(repr=False)
    found: np.ndarray = field(repr=False)
    chunk_tokens: tuple[int, ...] = field(repr=False)
    query_tokens: tuple[int, ...] = field(repr=False)
    system_tokens: int = 0
    answer_tokens: int = 32

    def workload(self, seed: int = 0) -> Workload:
        """All queries in a random order, each with its chunks in a random order; the first sixth is warm-up.

        All arrive at time 0: give a rate with `Workload.at_rate`.
        """
        requests = []
        for number in seeded_order(range(len(self.queries)), seed, self.dataset, "queries"):
            order = seeded_order([int(n) for n in self.found[number] if n >= 0], seed, self.queries[number], "chunks")
            picked = tuple(kr.Document(n, self.chunk_tokens[n]) for n in order)
            tokens = max(1, self.query_tokens[number]), self.answer_tokens
            requests.append(Request(0.0, picked, *tokens, (), number))
        name, warmup = f"{self.dataset} extended", len(requests) // WARMUP
        return Workload(name, self.source, tuple(requests), self.system_tokens, warmup)


def extended_set(
    dataset: str,
    counter: Counts,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    chunk_tokens: int = 512,
    top_k: int = 6,
    limit: int | None = None,
    embedder: Embeds | None = None,
) -> ExtendedSet:
    """Four queries per case, each with its ``top_k`` nearest chunks.

    Every case's texts are joined and cut into chunks of at most ``chunk_tokens`` tokens; the chunks of all cases are
    one database, searched exactly by L2 distance.

    Args:
        dataset: "musique" or "2wikimqa" (any of `experiments.datasets`).
        counter: counts tokens, for chunks and queries.
        limit: cases at most.
        embedder: the demo embedder if None.
    """
    data = load_dataset(dataset, data_dir=data_dir, limit=limit)
    joined = ["\n".join(case.chunk_text(document) for document in case.documents) for case in data.cases]
    chunks = list(dict.fromkeys(chunk for text in joined for chunk in split_text(text, counter, chunk_tokens)))
    queries = tuple(text for case in data.cases for text in with_paraphrases(case.question))
    embeds = embedder or embedder_named("demo")
    return ExtendedSet(
        dataset,
        data.source,
        queries,
        search_all(embed(chunks, embeds), embed(queries, embeds), Search("flat", top_k))[:, -1],
        count_tokens([chunk + SEPARATOR for chunk in chunks], counter),
        count_tokens(queries, counter),
        len(counter.tokenize(SYSTEM)),
    )


def with_paraphrases(question: str) -> list[str]:
    """The question, and the three templates filled with it."""
    return [question, *(template.format(question=question) for template in PARAPHRASES)]
