"""CacheBlend's extended sets (section 7.1): every question and three paraphrases, over chunks of all questions' texts.

The paper has its paraphrases written by GPT-4; here they are templates around the question. They retrieve more nearly
the same chunks than rewritten questions would, which favours every kind of reuse.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import kvreuse as kr
from experiments.dataset_types import seeded_order
from experiments.datasets import load_dataset
from experiments.vectors import SEPARATOR, Counts, Search, count_tokens, embed, embedder_named, search_all
from experiments.workloads import Request, Workload
from kvreuse.ragcache.corpus import SYSTEM
from kvreuse.retrieval import Embeds, split_text

PARAPHRASES = (
    "I would like to know this: {question}",
    "{question} Please look it up in the documents.",
    "Tell me, going by what the texts say: {question}",
)
WARMUP = 6  # the first one in so many requests is left out: the store is empty at first


def extended_set(
    dataset: str,
    counter: Counts,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    chunk_tokens: int = 512,
    top_k: int = 6,
    limit: int | None = None,
    seed: int = 0,
    embedder: Embeds | None = None,
    answer_tokens: int = 32,
) -> Workload:
    """Four queries per case in a random order, each with its ``top_k`` nearest chunks in a random order.

    Every case's texts are joined and cut into chunks of at most ``chunk_tokens`` tokens; the chunks of all cases are
    one database, searched exactly by L2 distance. All arrive at time 0: give a rate with `Workload.at_rate`. The first
    sixth is warm-up.

    Args:
        dataset: "musique" or "2wikimqa" (any of `experiments.datasets`).
        counter: counts tokens, for chunks and questions.
        limit: cases at most.
        seed: of the orders.
        embedder: the demo embedder if None.
    """
    data = load_dataset(dataset, data_dir=data_dir, limit=limit)
    joined = ["\n".join(case.chunk_text(document) for document in case.documents) for case in data.cases]
    chunks = list(dict.fromkeys(chunk for text in joined for chunk in _split(text, counter, chunk_tokens)))
    asked = [(case.case_id, text) for case in data.cases for text in with_paraphrases(case.question)]
    embeds = embedder or embedder_named("demo")
    search = Search("flat", top_k)
    found = search_all(embed(chunks, embeds), embed([text for _, text in asked], embeds), search)[:, -1]
    sizes = count_tokens([chunk + SEPARATOR for chunk in chunks], counter)
    lengths = count_tokens([text for _, text in asked], counter)
    documents = [kr.Document(number, size) for number, size in enumerate(sizes)]
    requests = []
    for number in seeded_order(range(len(asked)), seed, dataset, "queries"):
        order = seeded_order([int(n) for n in found[number] if n >= 0], seed, asked[number][1], "chunks")
        picked = tuple(documents[n] for n in order)
        requests.append(Request(0.0, picked, max(1, lengths[number]), answer_tokens, (), number))
    name = f"{dataset} extended"
    return Workload(name, data.source, tuple(requests), len(counter.tokenize(SYSTEM)), len(requests) // WARMUP)


def with_paraphrases(question: str) -> list[str]:
    """The question, and the three templates filled with it."""
    return [question, *(template.format(question=question) for template in PARAPHRASES)]


def _split(text: str, counter: Counts, chunk_tokens: int) -> Sequence[str]:
    return split_text(text, counter, chunk_tokens)
