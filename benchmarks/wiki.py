"""The 2Wiki corpus and real questions, with their embeddings kept between runs; for benchmarks of serving."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvreuse.retrieval import Embedder


def data_folder() -> Path:
    """``KVREUSE_DATA``, else ``../shared/data`` or ``shared/data``."""
    for folder in (os.environ.get("KVREUSE_DATA"), "../shared/data", "shared/data"):
        if folder and Path(folder, "2wikimultihopqa_corpus").is_dir():
            return Path(folder)
    raise FileNotFoundError(
        "the 2Wiki corpus is not here: set KVREUSE_DATA to the folder that has 2wikimultihopqa_corpus"
    )


@dataclass(frozen=True, eq=False)
class Wiki:
    """``texts``: title and text of every passage; ``vectors`` [n, dim]: their embeddings."""

    texts: list[str]
    vectors: np.ndarray

    def embed(self, texts: Sequence[str], name: str) -> np.ndarray:
        """Embeddings [n, dim] of texts, by the demo embedder, from the cache if it has them."""
        return embed_cached(texts, name)


def embed_cached(texts: Sequence[str], name: str) -> np.ndarray:
    """Embeddings of texts, kept under their content's hash."""
    digest = hashlib.sha256(json.dumps(list(texts)).encode()).hexdigest()[:16]
    path = Path.home() / ".cache" / "kvreuse" / "embeddings" / f"{name}-{digest}.npy"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = Embedder("demo").encode(texts, progress=True).numpy()
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        with partial.open("wb") as file:
            np.save(file, rows)
        partial.replace(path)
    return np.load(path)


def wiki_texts() -> list[str]:
    """All 6,119 passages of the corpus: title and text."""
    records = json.loads((data_folder() / "2wikimultihopqa_corpus" / "2wikimultihopqa_corpus.json").read_text())
    return [f"{r['title']}\n{r['text']}" for r in records]


def load_wiki() -> Wiki:
    """The corpus with its embeddings."""
    texts = wiki_texts()
    return Wiki(texts, embed_cached(texts, "2wiki-corpus"))


def load_questions(count: int) -> list[str]:
    """Different real questions: 2WikiMultihopQA's (dev 200, two lists over its dev split), then Natural Questions'."""
    folder = data_folder()
    corpus = folder / "2wikimultihopqa_corpus"
    lines = (folder / "2wikimultihopqa" / "2wikimultihopqa_dev200.jsonl").read_text().splitlines()
    questions = [json.loads(line)["question"] for line in lines]
    questions += json.loads((corpus / "fastgraphrag_2wikimultihopqa_101_questions.json").read_text())
    listed = json.loads((corpus / "simpledeepsearcher_2wiki_500_questions.json").read_text())
    questions += [record["Question"] for record in listed]
    lines = (folder / "nq_open" / "NQ-open.dev.jsonl").read_text().splitlines()
    questions += [json.loads(line)["question"] for line in lines]
    unique = list(dict.fromkeys(q.strip() for q in questions))
    if count > len(unique):
        raise ValueError(f"{count} questions asked for, {len(unique)} are there")
    return unique[:count]
