"""The four datasets of CacheBlend's evaluation (section 7.1), from disk, the hub or the project's small sets.

```python
dataset = load_dataset("musique", limit=50)
chunks = paragraph_chunks(dataset.cases[0], num_chunks=6)
```
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from experiments.dataset_formats import (
    Parser,
    parse_2wikimqa,
    parse_multinews,
    parse_musique,
    parse_musique_cacheblend,
    parse_samsum,
)
from experiments.dataset_sources import fetch
from experiments.dataset_types import Case, Dataset, Document, Task, seeded_order

__all__ = [
    "DATASET_NAMES",
    "TASKS",
    "Case",
    "Dataset",
    "Document",
    "Task",
    "load_dataset",
    "paragraph_chunks",
]

_ANSWER_ONLY = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words."
)
# "Answer within 5 words." is the paper's own addition to the two QA sets (footnote of section 7.1).
_QA = Task(
    kind="qa",
    system=f"{_ANSWER_ONLY}\n\nThe following are given passages.\n",
    question_template=f"\n{_ANSWER_ONLY} Answer within 5 words.\n\nQuestion: {{question}}\nAnswer:",
    metric="f1",
    max_new_tokens=32,
)
# Without LongBench's blank after "Summary:": tokenizers put it into the next word's token, as in the shots.
_FEW_SHOT = Task(
    kind="few_shot",
    system="Summarize the dialogue into a few short sentences. The following are some examples.\n\n",
    question_template="\nDialogue: {question}\nSummary:",
    metric="rougeL",
    max_new_tokens=128,
    stop="\n",
)
_SUMMARY = Task(
    kind="summary",
    system="You are given several news passages. Write a one-page summary of all news. \n\nNews:\n",
    question_template="\nNow, write a one-page summary of all the news.\n\nSummary:\n",
    metric="rougeL",
    max_new_tokens=512,
)

TASKS: Mapping[str, Task] = {
    "musique": _QA,
    "musique_cacheblend": _QA,
    "2wikimqa": _QA,
    "samsum": _FEW_SHOT,
    "multinews": _SUMMARY,
}
DATASET_NAMES = tuple(TASKS)

_PARSERS: Mapping[str, Parser] = {
    "musique": parse_musique,
    "musique_cacheblend": parse_musique_cacheblend,
    "2wikimqa": parse_2wikimqa,
    "samsum": parse_samsum,
    "multinews": parse_multinews,
}


def load_dataset(
    name: str, *, data_dir: str | os.PathLike[str] | None = None, limit: int | None = None, seed: int = 0
) -> Dataset:
    """Dataset `name` from `data_dir`, else KVREUSE_DATA, else `../shared/data`, the hub, the small set.

    Args:
        name: one of `DATASET_NAMES`.
        data_dir: folder with the real sets, laid out as in `data/README.md`; "small" takes the small set.
        limit: at most this many cases, a seeded sample in file order (files are often sorted by difficulty);
            the sample of a smaller limit is part of a larger one's.
        seed: of that sample and of SAMSum's shots.

    Raises:
        ValueError: unknown name, a limit below 1, or a file that is not in its dataset's form.
        FileNotFoundError: a file that the named folder lacks, or a dataset that is nowhere to be found.
    """
    if name not in TASKS:
        raise ValueError(f"unknown dataset {name!r}; choose one of {', '.join(DATASET_NAMES)}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1 or None, not {limit}")
    source, records = fetch(name, data_dir)
    try:
        cases = _PARSERS[name](records, seed)
    except ValueError as error:
        raise ValueError(f"dataset {name!r} from {source}: {error}") from None
    if not cases:
        raise ValueError(f"dataset {name!r} from {source} holds no usable case; download it again")
    if limit is not None and limit < len(cases):
        kept = sorted(seeded_order(range(len(cases)), seed, name, "limit")[:limit])
        cases = [cases[index] for index in kept]
    return Dataset(name=name, source=source, cases=tuple(cases), task=TASKS[name])


def paragraph_chunks(case: Case, num_chunks: int | None = 6, seed: int = 0) -> list[str]:
    """Chunk texts of `case`: all gold documents plus random others up to `num_chunks`, in a random order.

    More gold documents than `num_chunks` are all kept; None takes every document. Choice and order depend on
    `seed` and the case's id alone. Where nothing is marked as gold, the choice is random.
    """
    if num_chunks is not None and num_chunks < 1:
        raise ValueError(f"num_chunks must be at least 1 or None, not {num_chunks}")
    gold = [document for document in case.documents if document.gold]
    others = [document for document in case.documents if not document.gold]
    if num_chunks is not None:
        others = seeded_order(others, seed, case.case_id, "choice")[: max(0, num_chunks - len(gold))]
    return [case.chunk_text(document) for document in seeded_order(gold + others, seed, case.case_id, "order")]
