"""From long texts to the chunks a question needs: split, embed, search.

As in the CacheBlend paper's section 7.1: texts are cut into chunks counted in the model's own tokens (128 or
512), chunks and question are embedded by a sentence-transformers model, the nearest by L2 distance are taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from kvreuse.demo import demo_embedder_folder


class Tokenizes(Protocol):
    """What splitting needs of a model; a `ReuseModel` has it."""

    def tokenize(self, text: str) -> Tensor: ...


class Embeds(Protocol):
    """What an index needs of an embedder: rows [n, dim] for n texts."""

    def encode(self, texts: Sequence[str], progress: bool = False) -> Tensor: ...


def split_text(text: str, model: Tokenizes, chunk_tokens: int = 512, overlap: int = 0) -> list[str]:
    """Cut a text into chunks of at most `chunk_tokens` model tokens, at paragraphs, lines or words if it can.

    Args:
        text: the text; white space at a chunk's ends is dropped.
        model: a `ReuseModel`, whose tokens are counted.
        chunk_tokens: upper bound on a chunk's tokens.
        overlap: up to this many tokens of a chunk's end are repeated at the start of the next.

    Raises:
        ValueError: the text is empty, a number is out of range, or a character has more tokens than allowed.
        ImportError: langchain-text-splitters is not installed.
    """
    if not text.strip():
        raise ValueError("text is empty: nothing to split into chunks")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens}: a chunk has at least one token")
    if not 0 <= overlap < chunk_tokens:
        raise ValueError(f"overlap={overlap}: must be at least 0 and less than chunk_tokens={chunk_tokens}")
    try:
        from langchain_text_splitters import RecursiveCharacterTextSplitter
    except ImportError as error:
        raise ImportError("split_text needs langchain-text-splitters: pip install 'kvreuse[experiments]'") from error

    @cache  # the same pieces are counted again and again while they are merged
    def num_tokens(piece: str) -> int:
        return len(model.tokenize(piece))

    # The splitter adds up its pieces' tokens, but " word" that loses its space at a chunk's start can take
    # more of them. Then the bound was missed by a token or two, and a slightly smaller one keeps it.
    size = chunk_tokens
    while size > 0:
        splitter = RecursiveCharacterTextSplitter(
            chunk_size=size, chunk_overlap=min(overlap, size - 1), length_function=num_tokens
        )
        chunks: list[str] = splitter.split_text(text)
        excess = max(map(num_tokens, chunks)) - chunk_tokens
        if excess <= 0:
            return chunks
        size -= excess
    raise ValueError(f"chunk_tokens={chunk_tokens} is too small: a single character of the text has more tokens")


class Embedder:
    """A sentence-transformers model that turns texts into vectors.

    Texts longer than the model reads are cut by it (`max_tokens`, counted in its own word pieces).

    Args:
        name: "demo" (all-MiniLM-L6-v2, fetched once), a hub id, or a folder.
        device: where it runs; chosen by sentence-transformers if None.

    Raises:
        ImportError: sentence-transformers is not installed.
    """

    def __init__(self, name: str = "demo", device: str | None = None) -> None:
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise ImportError("Embedder needs sentence-transformers: pip install 'kvreuse[experiments]'") from error
        self.name = name
        source = str(demo_embedder_folder()) if name == "demo" else name
        self._model: Any = SentenceTransformer(source, device=device)

    @property
    def max_tokens(self) -> int:
        """Word pieces of a text that are read; the rest is ignored."""
        return int(self._model.max_seq_length)

    def encode(self, texts: Sequence[str], progress: bool = False) -> Tensor:
        """Embeddings [n, dim], fp32, on the CPU; with a progress bar if asked."""
        rows = self._model.encode(list(texts), show_progress_bar=progress, convert_to_tensor=True)
        return rows.float().cpu()

    def __repr__(self) -> str:
        return f"Embedder({self.name!r})"


@dataclass(frozen=True)
class Hit:
    """A chunk that was found: its place in the index, its L2 distance to the question, its text."""

    index: int
    distance: float
    text: str


class ChunkIndex:
    """Chunks with their embeddings, searched exactly by L2 distance. Make one with `ChunkIndex.build`."""

    def __init__(self, chunks: tuple[str, ...], embedder: Embeds, faiss_index: Any) -> None:
        self.chunks = chunks
        self.embedder = embedder
        self._index = faiss_index

    @classmethod
    def build(cls, chunks: Sequence[str], embedder: Embeds, progress: bool = True) -> ChunkIndex:
        """Embed the chunks, with a progress bar, and index them.

        Raises:
            ValueError: there is no chunk, one is empty, or the embeddings are not one finite row a chunk.
            ImportError: faiss is not installed.
        """
        if isinstance(chunks, str) or not chunks:
            raise ValueError("chunks must be a list of at least one text")
        for position, chunk in enumerate(chunks):
            if not chunk.strip():
                raise ValueError(f"chunk {position} is empty: leave it out")
        try:
            import faiss
        except ImportError as error:
            raise ImportError("ChunkIndex needs faiss: pip install 'kvreuse[experiments]'") from error
        rows = embedder.encode(chunks, progress=progress).float().contiguous()
        if rows.ndim != 2 or len(rows) != len(chunks) or not bool(rows.isfinite().all()):
            raise ValueError(f"the embedder gave {tuple(rows.shape)} for {len(chunks)} chunks, or values not finite")
        index = faiss.IndexFlatL2(rows.shape[1])
        index.add(rows.numpy())
        return cls(tuple(chunks), embedder, index)

    def search(self, question: str, top_k: int) -> list[Hit]:
        """The `top_k` chunks nearest to the question, nearest first; all of them if there are fewer.

        Raises:
            ValueError: the question is empty, or top_k is less than 1.
        """
        if not question.strip():
            raise ValueError("question is empty: nothing to search for")
        if top_k < 1:
            raise ValueError(f"top_k={top_k}: ask for at least one chunk")
        row = self.embedder.encode([question]).float().contiguous()
        squared, found = self._index.search(row.numpy(), min(top_k, len(self.chunks)))
        # faiss leaves its L2 distances squared, and rounding can take one below zero.
        distances = torch.from_numpy(squared[0]).clamp(min=0).sqrt().tolist()
        return [Hit(int(i), d, self.chunks[i]) for i, d in zip(found[0], distances, strict=True)]

    def __len__(self) -> int:
        return len(self.chunks)

    def __repr__(self) -> str:
        return f"ChunkIndex({len(self.chunks)} chunks, {self.embedder!r})"
