"""Which chunks a case's prompt gets: paragraphs, retrieved pieces, few-shot groups, or the texts to summarise."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, get_args

from experiments.dataset_types import seeded_order
from experiments.datasets import Case, Dataset, paragraph_chunks
from kvreuse.model import ReuseModel

if TYPE_CHECKING:
    from kvreuse.retrieval import Embedder

ContextMode = Literal["auto", "paragraphs", "retrieve", "retrieve-own", "given"]
Chunker = Callable[[Case], list[str]]


def resolve_context(dataset: Dataset, mode: str) -> str:
    """The mode that is used, as the header names it.

    ``auto`` takes paragraphs where the dataset marks the gold ones and retrieves elsewhere. SAMSum's chunks are its
    few-shot groups and MultiNews's the first pieces of its texts, whatever the mode. ``retrieve-own`` searches the
    case's own texts only (CacheBlend, 3.2); ``given`` takes its texts in their order.
    """
    if mode not in get_args(ContextMode):
        raise ValueError(f"context={mode!r}: choose one of {', '.join(get_args(ContextMode))}")
    if dataset.task.kind == "few_shot":
        return "few-shot groups"
    if dataset.task.kind == "summary":
        return "first pieces"
    if mode == "auto":
        marked = any(document.gold is not None for case in dataset.cases for document in case.documents)
        mode = "paragraphs" if marked else "retrieve"
    return mode


def make_chunker(
    dataset: Dataset, model: ReuseModel, context: str, num_chunks: int, chunk_tokens: int, seed: int
) -> Chunker:
    """A function from a case to its chunk texts, at most ``num_chunks`` unless there are more gold paragraphs.

    Retrieval is the paper's (7.1): the texts of all loaded cases are one database, cut into pieces of at most
    ``chunk_tokens`` tokens; those nearest to the question by L2 distance of embeddings are taken, in a random order.
    """
    if context == "paragraphs":
        return lambda case: paragraph_chunks(case, num_chunks, seed)
    if context in ("few-shot groups", "given"):
        return lambda case: [case.chunk_text(document) for document in case.documents[:num_chunks]]
    if context == "first pieces":
        return lambda case: _pieces(case, model, chunk_tokens)[:num_chunks]
    if context == "retrieve-own":
        return lambda case: _retriever([case], model, num_chunks, chunk_tokens, seed)(case)
    return _retriever(dataset.cases, model, num_chunks, chunk_tokens, seed)


def cutting(chunker: Chunker, num_words: int) -> Chunker:
    """The chunker's chunks, cut to their first ``num_words`` words."""
    return lambda case: [" ".join(text.split(" ")[:num_words]) for text in chunker(case)]


def _pieces(case: Case, model: ReuseModel, chunk_tokens: int) -> list[str]:
    """Every document of the case, cut where it is longer than ``chunk_tokens``."""
    from kvreuse.retrieval import split_text

    return [p for document in case.documents for p in split_text(case.chunk_text(document), model, chunk_tokens)]


@functools.cache
def _embedder() -> Embedder:
    """Loaded once, for a sweep makes many chunkers."""
    from kvreuse.retrieval import Embedder

    return Embedder("demo")


def _retriever(cases: Sequence[Case], model: ReuseModel, num_chunks: int, chunk_tokens: int, seed: int) -> Chunker:
    from kvreuse.retrieval import ChunkIndex, split_text

    # A case's paragraphs are joined before they are cut: alone, most are far shorter than a chunk.
    texts = ["\n".join(case.chunk_text(document) for document in case.documents) for case in cases]
    pieces = list(dict.fromkeys(piece for text in texts for piece in split_text(text, model, chunk_tokens)))
    index = ChunkIndex.build(pieces, _embedder(), progress=len(cases) > 1)

    def nearest(case: Case) -> list[str]:
        found = [hit.text for hit in index.search(case.question, num_chunks)]
        return seeded_order(found, seed, case.case_id, "retrieved")

    return nearest
