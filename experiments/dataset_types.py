"""What every dataset becomes: documents, cases and one task; and the seeded order they are sampled in."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

T = TypeVar("T")

# LongBench numbers its passages ("Passage 3:"). A chunk is encoded once and reused at any place, so it has no
# number.
PASSAGE_TEMPLATE = "Passage:{title}\n{text}\n"
# A few-shot document is examples already written out as "Dialogue: ... Summary: ...".
SHOTS_TEMPLATE = "{text}\n"


@dataclass(frozen=True)
class Document:
    """One retrievable text. `gold` says whether the answer needs it; None where the dataset does not say."""

    title: str
    text: str
    gold: bool | None = None


@dataclass(frozen=True)
class Case:
    """One request: a question (or the dialogue to summarise; empty for MultiNews) over some documents."""

    case_id: str
    question: str
    answers: tuple[str, ...]
    documents: tuple[Document, ...]
    chunk_template: str = PASSAGE_TEMPLATE

    def chunk_text(self, document: Document) -> str:
        """`document` as it stands in a prompt; the prompt puts an empty line behind each chunk."""
        title = f" {document.title}" if document.title else ""
        return self.chunk_template.format(title=title, text=document.text)


@dataclass(frozen=True)
class Task:
    """The prompt around the chunks, the metric and the limits: LongBench's, and CacheBlend's section 7.1.

    `system` goes before the chunks; `question_template.format(question=case.question)` after them.
    """

    kind: Literal["qa", "few_shot", "summary"]
    system: str
    question_template: str
    metric: Literal["f1", "rougeL"]
    max_new_tokens: int
    stop: str | None = None


@dataclass(frozen=True)
class Dataset:
    """`source` says where the cases came from: "data-dir:...", "hub:..." or "small set"."""

    name: str
    source: str
    cases: tuple[Case, ...]
    task: Task


def seeded_order(items: Sequence[T], seed: int, *salt: str) -> list[T]:
    """`items` shuffled by SHA-256 of seed, salt and place: the same in every process and Python version."""

    def rank(place: int) -> bytes:
        return hashlib.sha256("\x1f".join([str(seed), *salt, str(place)]).encode()).digest()

    return [items[place] for place in sorted(range(len(items)), key=rank)]
