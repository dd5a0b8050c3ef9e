"""Questions and the corpora they are answered from, as texts.

The real corpus is a small Wikipedia: the 2WikiMultihopQA corpus and the gold passages of Natural Questions, shared by
all question sets, as in RAGCache's evaluation (there with 0.3 million documents). Without the real sets it is the
paragraphs of the project's small ones.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from experiments.dataset_sources import DATA_VARIABLE, REPOSITORY, SMALL, SMALL_SETS, read_records

CORPUS_FILE = "2wikimultihopqa_corpus/2wikimultihopqa_corpus.json"
GOLD_FILE = "nq_open_gold/nq-open-oracle.jsonl"


@dataclass(frozen=True)
class Corpus:
    """``texts``: title, newline, text of every document; its place is its id. ``source``: where they came from."""

    name: str
    source: str
    texts: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Corpus({self.name!r}, {len(self.texts)} documents)"


@dataclass(frozen=True)
class Question:
    """``text``: what is asked and searched for. ``stem``: that without its choices (MMLU). ``answer``: its length."""

    text: str
    answer: str
    stem: str


def data_folder(data_dir: str | os.PathLike[str] | None = None) -> Path | None:
    """The folder of the real sets, or None for the small ones.

    ``data_dir``, else KVREUSE_DATA ("small": None), else ``../shared/data`` beside the repository if it is there.

    Raises:
        FileNotFoundError: the folder that was named does not exist.
    """
    named = data_dir or os.environ.get(DATA_VARIABLE)
    if named:
        if str(named) == SMALL:
            return None
        folder = Path(named).expanduser().resolve()
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is no folder: name one with data_dir= or {DATA_VARIABLE}, or 'small'")
        return folder
    beside = REPOSITORY.parent / "shared" / "data"
    return beside if beside.is_dir() else None


def required(what: str, folder: Path | None, place: str) -> Path:
    """``folder / place``, which must be there.

    Raises:
        FileNotFoundError: naming the file, and what to do.
    """
    if folder is not None and (folder / place).exists():
        return folder / place
    where = "is not among the small sets" if folder is None else f"expects {folder / place}, which does not exist"
    raise FileNotFoundError(
        f"{what} {where}: put {place} under a folder and name that folder with data_dir= or {DATA_VARIABLE} "
        f"(see data/README.md); without it data_dir='small' has the questions {', '.join(_SMALL_QUESTIONS)}"
    )


def source_of(folder: Path | None) -> str:
    """As the headers of records name it."""
    return "small set" if folder is None else f"data-dir:{folder}"


def load_corpus(data_dir: str | os.PathLike[str] | None = None) -> Corpus:
    """The wiki corpus: real if there is a data folder, else the paragraphs of the small sets. Texts are unique."""
    folder = data_folder(data_dir)
    if folder is None:
        return Corpus("small", source_of(None), tuple(dict.fromkeys(_small_paragraphs())))
    wiki = read_records(required("the wiki corpus", folder, CORPUS_FILE))
    texts = [f"{record['title']}\n{record['text']}" for record in wiki]
    for record in read_records(required("the wiki corpus", folder, GOLD_FILE)):
        texts += [f"{passage['title']}\n{passage['text']}" for passage in record["ctxs"]]
    return Corpus("wiki", source_of(folder), tuple(dict.fromkeys(text.strip() for text in texts)))


def load_questions(name: str, data_dir: str | os.PathLike[str] | None = None) -> tuple[Question, ...]:
    """All questions of a set, in file order, each once.

    ``mmlu``: all subjects' test questions with their choices. ``nq``: Natural Questions (open), dev. ``2wiki``:
    2WikiMultihopQA's, also those of the published lists. In the small sets: ``2wiki`` and ``musique``.

    Raises:
        ValueError: there is no such set.
        FileNotFoundError: its file is not there.
    """
    folder = data_folder(data_dir)
    loaders = _SMALL_QUESTIONS if folder is None else _REAL_QUESTIONS
    if name not in loaders:
        if name in _REAL_QUESTIONS:
            required(f"question set {name!r}", None, _EXPECTED[name])
        raise ValueError(f"question set {name!r} is unknown: choose one of {', '.join(loaders)}")
    return tuple({question.text: question for question in loaders[name](folder or SMALL_SETS)}.values())


# -- the sets -------------------------------------------------------------------------------------------------------


def _mmlu(folder: Path) -> list[Question]:
    tests = sorted(required("question set 'mmlu'", folder, _EXPECTED["mmlu"]).glob("*.csv"))
    if not tests:
        raise FileNotFoundError(f"{folder / _EXPECTED['mmlu']} has no .csv file; see data/README.md")
    found = []
    for path in tests:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                choices = [row[f"choice{i}"] for i in range(4)]
                listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip("ABCD", choices, strict=True))
                found.append(Question(f"{row['question']}\n{listed}", "ABCD"[int(row["answer"])], row["question"]))
    return found


def _nq(folder: Path) -> list[Question]:
    records = read_records(required("question set 'nq'", folder, _EXPECTED["nq"]))
    return [_plain(record["question"], record["answer"][0]) for record in records]


def _2wiki(folder: Path) -> list[Question]:
    what = "question set '2wiki'"
    records = read_records(required(what, folder, _EXPECTED["2wiki"]))
    found = [_plain(record["question"], record["answer"]) for record in records if record.get("answer")]
    listed = folder / "2wikimultihopqa_corpus/simpledeepsearcher_2wiki_500_questions.json"
    if listed.is_file():
        found += [_plain(record["Question"], record["answer"][0]) for record in read_records(listed)]
    unanswered = folder / "2wikimultihopqa_corpus/fastgraphrag_2wikimultihopqa_101_questions.json"
    if unanswered.is_file():
        # No answers are published with these: two words stand for their length.
        found += [_plain(text, "some name") for text in json.loads(unanswered.read_text(encoding="utf-8"))]
    return found


def _plain(text: str, answer: str) -> Question:
    return Question(text.strip(), str(answer), text.strip())


def _small(name: str) -> Callable[[Path], list[Question]]:
    def load(folder: Path) -> list[Question]:
        return [_plain(record["question"], record["answer"]) for record in read_records(folder / name)]

    return load


def _small_paragraphs() -> list[str]:
    texts = [
        f"{paragraph['title']}\n{paragraph['paragraph_text'].strip()}"
        for record in read_records(SMALL_SETS / "musique_small.jsonl")
        for paragraph in record["paragraphs"]
    ]
    for record in read_records(SMALL_SETS / "2wikimqa_small.jsonl"):
        texts += [f"{title}\n{' '.join(sentences)}" for title, sentences in record["context"]]
    return texts


_EXPECTED: Mapping[str, str] = {
    "mmlu": "mmlu/test",
    "nq": "nq_open/NQ-open.dev.jsonl",
    "2wiki": "2wikimultihopqa/2wikimultihopqa_dev200.jsonl",
}
_REAL_QUESTIONS: Mapping[str, Callable[[Path], list[Question]]] = {"mmlu": _mmlu, "nq": _nq, "2wiki": _2wiki}
_SMALL_QUESTIONS: Mapping[str, Callable[[Path], list[Question]]] = {
    "2wiki": _small("2wikimqa_small.jsonl"),
    "musique": _small("musique_small.jsonl"),
}


QUESTION_SETS = tuple(dict.fromkeys((*_REAL_QUESTIONS, *_SMALL_QUESTIONS)))  # all that there can be


def question_sets(data_dir: str | os.PathLike[str] | None = None) -> tuple[str, ...]:
    """The question sets that there are: of the folder, or the small ones."""
    folder = data_folder(data_dir)
    if folder is None:
        return tuple(_SMALL_QUESTIONS)
    return tuple(name for name, place in _EXPECTED.items() if (folder / place).exists())
