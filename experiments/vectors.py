"""Embeddings, token counts and search results, computed once and kept under their content's hash.

Files are in the user's cache folder (``kvreuse.demo.cache_folder()``, "workloads"); deleting them costs the time to
compute them again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import torch

from kvreuse import demo
from kvreuse.retrieval import Embeds

if TYPE_CHECKING:
    import numpy as np

IndexName = Literal["flat", "ivf", "hnsw"]
BLOCK = 512  # texts that are embedded and kept together
SEPARATOR = "\n\n"  # behind every document of a prompt, and part of its tokens (`RagPrompt.from_texts`)


@dataclass(frozen=True)
class Search:
    """How documents are found: RAGCache's default is an IVF index and two documents.

    ``index``: "flat" (exact), "ivf" (a quarter of about sqrt(n) clusters) or "hnsw". ``num_stages``: of the staged
    search; a flat one has one stage. ``embedder``: "demo" (all-MiniLM-L6-v2), "words" (`WordEmbedder`), a hub id or a
    folder. ``stem``: search for the question without its choices (MMLU). ``probed``: share of an IVF index'
    clusters that is searched, if not a quarter.
    """

    index: IndexName = "ivf"
    top_k: int = 2
    num_stages: int = 4
    embedder: str = "demo"
    stem: bool = False
    probed: float | None = None

    def __post_init__(self) -> None:
        if self.index not in get_args(IndexName):
            raise ValueError(f"index={self.index!r}: choose one of {', '.join(get_args(IndexName))}")
        for name in ("top_k", "num_stages"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: give at least 1")
        if self.probed is not None and (self.index != "ivf" or not 0 < self.probed <= 1):
            raise ValueError(f"probed={self.probed}: a share of the clusters of an IVF index, more than 0, at most 1")


class WordEmbedder:
    """A text as its words' weights, hashed into ``dim`` dimensions: no model, no download.

    Signed feature hashing of (1 + log count) per word, length 1. Words of one or two letters and a few that every text
    has are left out. A lexical contrast to the demo embedder, and what tests use.
    """

    _COMMON = frozenset(
        {"the", "and", "was", "for", "with", "that", "from", "are", "were", "his", "her", "its", "this", "has", "had"}
        | {"who", "what", "when", "where", "which", "how"}
    )

    def __init__(self, dim: int = 1024) -> None:
        if dim < 8:
            raise ValueError(f"dim={dim}: give at least 8")
        self.dim = dim

    def encode(self, texts: Sequence[str], progress: bool = False) -> torch.Tensor:
        """Embeddings [n, dim], fp32."""
        rows = torch.zeros(len(texts), self.dim)
        values = rows.numpy()
        for row, text in enumerate(texts):
            words = Counter(w for w in re.findall(r"\w{3,}", text.lower()) if w not in self._COMMON)
            for word, count in words.items():
                place, sign = _hashed(word)
                values[row, place % self.dim] += sign * (1 + math.log(count))
        return torch.nn.functional.normalize(rows)

    @property
    def content(self) -> str:
        """Change it whenever `encode` gives other numbers: it is part of the key of what is kept."""
        return ""

    def __repr__(self) -> str:
        return f"WordEmbedder({self.dim})"


@cache
def _hashed(word: str) -> tuple[int, int]:
    digest = hashlib.sha256(word.encode()).digest()
    return int.from_bytes(digest[:8], "big"), 1 if digest[8] & 1 else -1


def embedder_named(name: str) -> Embeds:
    """ "words" or a sentence-transformers model; nothing is loaded before something is embedded."""
    return WordEmbedder() if name == "words" else _Lazy(name)


class _Lazy:
    """A sentence-transformers embedder that is loaded when the first text comes: cached embeddings need no model."""

    def __init__(self, name: str) -> None:
        self._name = name

    def encode(self, texts: Sequence[str], progress: bool = False) -> torch.Tensor:
        return _sentence_embedder(self._name).encode(texts, progress)

    @property
    def content(self) -> str:
        """Of a folder its files, of a hub id its revision; the demo embedder's name has its version already."""
        return "" if self._name == "demo" else _weights(self._name)

    def __repr__(self) -> str:
        named = demo._EMBEDDER.requirement if self._name == "demo" else self._name
        return f"Embedder({named!r})"


@cache
def _sentence_embedder(name: str) -> Embeds:
    from kvreuse.retrieval import Embedder

    return Embedder(name, device="cpu")


def _weights(name: str) -> str:
    """What tells a model's weights from others of the same name: names, sizes and times of files, or a revision."""
    folder = Path(name)
    if folder.is_dir():
        files = sorted((p.relative_to(folder).as_posix(), p.stat()) for p in folder.rglob("*") if p.is_file())
        listed = json.dumps([(path, stat.st_size, stat.st_mtime_ns) for path, stat in files])
        return hashlib.sha256(listed.encode()).hexdigest()
    revision = _revision(name)
    if revision is None:
        _sentence_embedder(name)  # fetched here, so that the key is the same the next time
        revision = _revision(name)
    return revision or ""


def _revision(name: str) -> str | None:
    """The commit of a hub model that is in Hugging Face's cache; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache

    for repository in (name, f"sentence-transformers/{name}"):  # short names are theirs
        found = try_to_load_from_cache(repository, "config.json")
        if isinstance(found, str):
            return Path(found).parent.name  # .../snapshots/<commit>/config.json
    return None


class Counts(Protocol):
    """What counts tokens; a `ReuseModel` does."""

    def tokenize(self, text: str) -> torch.Tensor: ...


class Tokenizer:
    """A model's tokenizer without its weights: "demo", a hub id or a folder."""

    def __init__(self, name: str = "demo") -> None:
        from transformers import AutoTokenizer

        source = str(demo.demo_model_folder()) if name == "demo" else name
        self._tokenizer: Any = AutoTokenizer.from_pretrained(source)

    def tokenize(self, text: str) -> torch.Tensor:
        """Token ids [T] without special tokens, as `ReuseModel.tokenize`."""
        return torch.tensor(self._tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.long)

    @property
    def content(self) -> str:
        """The tokenizer itself, for the key of what it counted."""
        return str(self._tokenizer.backend_tokenizer.to_str())


def count_tokens(texts: Sequence[str], counter: Counts) -> tuple[int, ...]:
    """Tokens of every text; kept on disk where the counter has a ``content``."""
    import numpy as np

    def count() -> np.ndarray:
        return np.array([len(counter.tokenize(text)) for text in texts], dtype=np.int32)

    content = getattr(counter, "content", None)
    counts = count() if content is None else kept("tokens", [content, json.dumps(list(texts))], count)
    return tuple(int(n) for n in counts)


def embed(texts: Sequence[str], embedder: Embeds) -> np.ndarray:
    """Embeddings [n, dim] of texts, kept in blocks: what is stopped goes on, and more texts cost only the new ones."""
    import numpy as np

    content = getattr(embedder, "content", "")
    key = [repr(embedder), *([content] if content else [])]

    def rows(block: Sequence[str]) -> np.ndarray:
        return kept("vectors", [*key, json.dumps(list(block))], lambda: embedder.encode(block, True).numpy())

    return np.concatenate([rows(texts[i : i + BLOCK]) for i in range(0, len(texts), BLOCK)])


def index_settings(search: Search, count: int) -> dict[str, int]:
    """What an index of ``count`` vectors is built and searched with, besides its stages."""
    if search.index == "ivf":
        clusters = max(1, round(count**0.5))
        probed = clusters // 4 if search.probed is None else round(search.probed * count**0.5)
        return {"num_clusters": clusters, "nprobe": max(1, probed), "seed": 0}
    return {"links": 32, "ef_search": 128, "ef_construction": 128} if search.index == "hnsw" else {}


def search_all(vectors: np.ndarray, queries: np.ndarray, search: Search) -> np.ndarray:
    """The documents of every query after every stage, nearest first: [queries, stages, top_k], -1 for none yet."""
    import numpy as np

    def find() -> np.ndarray:
        from kvreuse.ragcache.index import HNSWStages, IVFStages, StagedIndex, import_faiss

        k = min(search.top_k, len(vectors))
        if search.index == "flat":
            flat = import_faiss().IndexFlatL2(vectors.shape[1])
            flat.add(np.ascontiguousarray(vectors, dtype=np.float32))
            return flat.search(np.ascontiguousarray(queries, dtype=np.float32), k)[1][:, None, :].astype(np.int32)
        staged: type[StagedIndex] = IVFStages if search.index == "ivf" else HNSWStages
        index = staged(vectors, num_stages=search.num_stages, **built)  # type: ignore[call-arg]
        found = np.full((len(queries), index.num_stages, k), -1, dtype=np.int32)
        for number, query in enumerate(queries):
            for stage, rows in enumerate(index.stages(query, k)):
                found[number, stage, : len(rows)] = rows
        return found

    built = index_settings(search, len(vectors))
    settings = repr((search.index, search.top_k, search.num_stages, *([built] if built else [])))
    return kept("found", [vectors.tobytes(), queries.tobytes(), settings], find)


def kept(kind: str, content: Sequence[str | bytes], make: Callable[[], np.ndarray]) -> np.ndarray:
    """An array from the cache folder, made and put there if it is not there yet."""
    import numpy as np

    digest = hashlib.sha256()
    for part in content:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)
    path = demo.cache_folder() / "workloads" / f"{kind}-{digest.hexdigest()[:24]}.npy"
    if path.is_file():
        return np.load(path, allow_pickle=False)
    array = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with partial.open("wb") as file:
        np.save(file, array, allow_pickle=False)
    os.replace(partial, path)
    return array
