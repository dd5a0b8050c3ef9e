"""What a server answers from: documents as token ids, and a staged search over their embeddings."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from kvreuse.prompt import RagPrompt
from kvreuse.ragcache.index import IVFStages, StagedIndex
from kvreuse.ragcache.kv import content_id
from kvreuse.ragcache.node import Document

if TYPE_CHECKING:
    from kvreuse.model import ReuseModel
    from kvreuse.retrieval import Embeds

SYSTEM = "Answer the question from the passages, in a few words."


class Retrieves(Protocol):
    """What a server needs of retrieval."""

    def search(self, question: str, on_stage: Callable[[Sequence[int]], None]) -> Sequence[int]:
        """The best documents, in order; ``on_stage`` gets the best so far after each stage but the last."""
        ...


class Corpus:
    """Documents and how a prompt is made of some of them and a question.

    Texts are tokenized when they are first asked for.

    Args:
        model: brings the tokenizer and the chat template.
        texts: one a document.
        system: the system prompt, shared by all requests: the root of the tree.
        instruction: put before every question; "{question}" is replaced.
    """

    def __init__(
        self, model: ReuseModel, texts: Sequence[str], system: str = SYSTEM, instruction: str = "Question: {question}"
    ) -> None:
        if isinstance(texts, str) or not texts:
            raise ValueError("texts must be a list of at least one document")
        if "{question}" not in instruction:
            raise ValueError(f"instruction={instruction!r} has no place for the {{question}}")
        for number, text in enumerate(texts):
            if not text.strip():
                raise ValueError(f"document {number} is empty: leave it out")
        self.texts, self.system, self.instruction = tuple(texts), system, instruction
        self._model = model
        self._ids: dict[int, torch.Tensor] = {}
        self._documents: dict[int, Document] = {}
        self._numbers: dict[str, int] = {}  # by content
        self._lock = threading.Lock()  # a fast tokenizer must not be called by two threads at once
        self.prefix = self._frame("?").prefix

    def __len__(self) -> int:
        return len(self.texts)

    def question_ids(self, question: str) -> torch.Tensor:
        """Token ids of the question with its instruction and the template's end [Q].

        Raises:
            ValueError: for an empty question.
        """
        if not question.strip():
            raise ValueError("question is empty: there is nothing to answer")
        return self._frame(self.instruction.format(question=question.strip())).question

    def document_ids(self, number: int) -> torch.Tensor:
        """Token ids of a document [T]."""
        if number not in self._ids:
            text = [self.texts[number]]
            with self._lock:
                ids = RagPrompt.from_texts(self._model, chunks=text, question="?", chat_template=False).chunks[0]
            self._ids[number] = ids
            self._numbers.setdefault(content_id(ids), number)
        return self._ids[number]

    def document(self, number: int) -> Document:
        """A document as the tree knows it, by content; always the same object, as many requests keep theirs."""
        if number not in self._documents:
            ids = self.document_ids(number)
            self._documents[number] = Document(content_id(ids), ids.numel())
        return self._documents[number]

    def number(self, document: Document) -> int:
        """Its number; the first one's where several have the same content."""
        return self._numbers[str(document.id)]

    def prompt(self, documents: Sequence[Document], question: torch.Tensor) -> RagPrompt:
        """The prompt of documents, in order, and a question's ids."""
        return RagPrompt(self.prefix, [self.document_ids(self.number(d)) for d in documents], question)

    def _frame(self, question: str) -> RagPrompt:
        with self._lock:
            return RagPrompt.from_texts(self._model, system=self.system, chunks=["-"], question=question)


@dataclass(frozen=True, eq=False)
class Retriever:
    """Staged search for a question by its embedding.

    Args:
        embedder: of documents and questions.
        index: over the documents' embeddings.
        top_k: documents per question, nearest first.
    """

    embedder: Embeds
    index: StagedIndex
    top_k: int = 2

    @classmethod
    def build(cls, texts: Sequence[str], embedder: Embeds, top_k: int = 2, num_stages: int = 4) -> Retriever:
        """Embed the documents, with a progress bar, into an IVF index."""
        rows = embedder.encode(texts, progress=True).float().numpy()
        return cls(embedder, IVFStages(rows, num_stages=num_stages), top_k)

    def search(self, question: str, on_stage: Callable[[Sequence[int]], None]) -> Sequence[int]:
        """Embeds the question, then searches stage by stage."""
        row = self.embedder.encode([question])[0].float().numpy()
        found: list[int] = []
        for stage, found in enumerate(self.index.stages(row, self.top_k), start=1):
            if stage < self.index.num_stages:
                on_stage(found)
        return found
