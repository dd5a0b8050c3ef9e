"""Requests to replay: real questions with what real retrieval finds for them, at Poisson arrivals from a seed.

```python
retrieved = retrieve("mmlu", Search(top_k=2))  # embedded and searched once, then from the cache folder
workload = retrieved.workload(rate=0.8, num_requests=1000, seed=0)
for request in workload.requests:
    tree.serve(request.documents, request.question_tokens)  # `KnowledgeTree`: sizes only
```

`drive` hands a request to a `Controller`. Traces are in `experiments.traces`, CacheBlend's extended sets in
`experiments.extended`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import kvreuse as kr
from experiments.corpora import Corpus, Question, load_corpus, load_questions
from experiments.dataset_types import seeded_order
from experiments.vectors import SEPARATOR, Counts, Search, Tokenizer, count_tokens, embed, embedder_named, search_all
from kvreuse.ragcache.corpus import SYSTEM

if TYPE_CHECKING:
    import numpy as np

    from kvreuse.ragcache.controller import Controller
    from kvreuse.retrieval import Embeds

Documents = tuple[kr.Document, ...]


@dataclass(frozen=True)
class Request:
    """One request as a simulator, a tree or a controller takes it.

    Args:
        arrival_s: seconds since the workload began.
        documents: id and tokens of each, in prompt order, the system prompt not among them. May be empty.
        question_tokens: everything behind the documents; at least 1.
        output_tokens: length of the answer, at least 1.
        stages: the candidate lists after each stage of the search, the last of which is ``documents``; empty where
            the search has one stage or is not known.
        question: its number in the question set, or in the trace.
    """

    arrival_s: float
    documents: Documents
    question_tokens: int
    output_tokens: int = 1
    stages: tuple[Documents, ...] = ()
    question: int = 0

    def __post_init__(self) -> None:
        if self.question_tokens < 1 or self.output_tokens < 1:
            raise ValueError(f"{self.question_tokens} question and {self.output_tokens} output tokens: at least 1 each")
        if self.stages and self.stages[-1] != self.documents:
            raise ValueError(f"the last stage found {self.stages[-1]}, the documents are {self.documents}")

    @property
    def document_ids(self) -> tuple[object, ...]:
        """Ids in prompt order."""
        return tuple(document.id for document in self.documents)

    @property
    def document_tokens(self) -> int:
        """Tokens of all documents."""
        return sum(document.num_tokens for document in self.documents)

    @property
    def input_tokens(self) -> int:
        """Documents and question, without the system prompt."""
        return self.document_tokens + self.question_tokens


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival.

    ``source``: as in the headers of records. ``system_tokens``: of the system prompt that all share (the tree's root).
    ``warmup``: requests at the beginning that results leave out.
    """

    name: str
    source: str
    requests: tuple[Request, ...]
    system_tokens: int = 0
    warmup: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.warmup < max(1, len(self.requests)):
            raise ValueError(f"warmup={self.warmup} of {len(self.requests)} requests leaves none")

    @property
    def distinct_tokens(self) -> int:
        """Tokens of all different documents, each once: the capacity at which nothing need be evicted."""
        return sum({d.id: d.num_tokens for r in self.requests for d in r.documents}.values())

    def at_rate(self, rate: float, seed: int = 0) -> Workload:
        """The same requests in the same order, with Poisson arrivals at ``rate`` requests per second."""
        times = poisson_arrivals(rate, len(self.requests), seed)
        return replace(self, requests=tuple(replace(r, arrival_s=t) for r, t in zip(self.requests, times, strict=True)))

    def head(self, num_requests: int | None) -> Workload:
        """The first requests; as many of them are warm-up as before in proportion."""
        if num_requests is None or num_requests >= len(self.requests):
            return self
        if num_requests < 1:
            raise ValueError(f"num_requests={num_requests}: give at least 1")
        warmup = self.warmup * num_requests // len(self.requests)
        return replace(self, requests=self.requests[:num_requests], warmup=warmup)

    def __repr__(self) -> str:
        return f"Workload({self.name!r}, {len(self.requests)} requests, {self.source})"


def poisson_arrivals(rate: float, count: int, seed: int = 0) -> list[float]:
    """Arrival times in seconds, the first one behind the first gap; gaps are exponential with mean 1 / rate."""
    import numpy as np

    if not rate > 0:
        raise ValueError(f"rate={rate}: give requests per second, more than 0")
    gaps = np.random.default_rng([seed, 1]).exponential(1 / rate, count)
    return [float(t) for t in np.cumsum(gaps)]


@dataclass(frozen=True, eq=False)
class Retrieved:
    """A question set with what was found for every question; workloads differ in order and arrivals only.

    ``found`` [questions, stages, top_k]: documents by their place in the corpus, nearest first, -1 for none yet.
    ``document_tokens``: of every document of the corpus, with the separator behind it.
    """

    name: str
    search: Search
    corpus: Corpus
    questions: tuple[Question, ...]
    found: np.ndarray = field(repr=False)
    document_tokens: tuple[int, ...] = field(repr=False)
    question_tokens: tuple[int, ...] = field(repr=False)
    output_tokens: tuple[int, ...] = field(repr=False)
    system_tokens: int = 0

    def document(self, number: int) -> kr.Document:
        """A document of the corpus as the tree knows it."""
        return kr.Document(number, self.document_tokens[number])

    def request(self, number: int, arrival_s: float = 0.0) -> Request:
        """A question as a request."""
        lists = [tuple(self.document(int(d)) for d in row if d >= 0) for row in self.found[number]]
        stages = tuple(lists) if len(lists) > 1 else ()
        tokens = self.question_tokens[number], self.output_tokens[number]
        return Request(arrival_s, lists[-1], *tokens, stages, number)

    def workload(self, rate: float = 1.0, num_requests: int | None = None, seed: int = 0) -> Workload:
        """Poisson arrivals of the questions in a seeded random order.

        More requests than questions go through the set again, in another order each time, so that no question comes
        back before all have been asked.
        """
        import numpy as np

        count = len(self.questions) if num_requests is None else num_requests
        if count < 1:
            raise ValueError(f"num_requests={count}: give at least 1")
        rng = np.random.default_rng([seed, 0])
        rounds = -(-count // len(self.questions))
        order = np.concatenate([rng.permutation(len(self.questions)) for _ in range(rounds)])[:count]
        times = poisson_arrivals(rate, count, seed)
        requests = tuple(self.request(int(n), t) for n, t in zip(order, times, strict=True))
        return Workload(f"{self.name}, top {self.search.top_k}", self.corpus.source, requests, self.system_tokens)


def retrieve(
    questions: str = "mmlu",
    search: Search | None = None,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    limit: int | None = None,
    counter: Counts | None = None,
    embedder: Embeds | None = None,
) -> Retrieved:
    """Search the wiki corpus for every question of a set.

    Embeddings, token counts and lists come from the cache folder where they are known already; else the corpus and
    14,000 questions take a core about half an hour.

    Args:
        questions: "mmlu", "nq" or "2wiki"; of the small sets "2wiki" or "musique".
        search: how; RAGCache's default if None.
        data_dir: folder of the real sets; "small" for the small ones (see `experiments.corpora.data_folder`).
        limit: questions at most, a random sample; that of a smaller limit is part of a larger one's.
        counter: what counts tokens; the demo tokenizer if None.
        embedder: in place of the one that ``search`` names.

    Raises:
        ValueError, FileNotFoundError: for a set that there is not.
    """
    search, counter = search or Search(), counter or Tokenizer()
    corpus = load_corpus(data_dir)
    asked = tuple(seeded_order(load_questions(questions, data_dir), 0, questions, "limit")[:limit])
    embeds = embedder or embedder_named(search.embedder)
    queries = embed([q.stem if search.stem else q.text for q in asked], embeds)
    return Retrieved(
        questions,
        search,
        corpus,
        asked,
        search_all(embed(corpus.texts, embeds), queries, search),
        count_tokens([text.strip() + SEPARATOR for text in corpus.texts], counter),
        tuple(max(1, n) for n in count_tokens([q.text for q in asked], counter)),
        tuple(max(1, n) for n in count_tokens([q.answer for q in asked], counter)),
        len(counter.tokenize(SYSTEM)),
    )


def drive(controller: Controller, request_id: int, request: Request, retrieved_s: float) -> None:
    """Hand a request's whole search to a controller: its arrival, every stage, the final list at ``retrieved_s``.

    A simulator that interleaves requests makes these calls itself, each at its time.
    """
    controller.arrive(request_id, request.question_tokens, request.arrival_s)
    for documents in request.stages[:-1]:
        controller.stage(request_id, documents)
    controller.final(request_id, request.documents, retrieved_s)
