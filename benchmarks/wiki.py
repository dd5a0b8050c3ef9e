"""The 2Wiki corpus and real questions, for benchmarks of serving."""

from __future__ import annotations

import json

from experiments.corpora import CORPUS_FILE, data_folder, required
from experiments.dataset_sources import read_records


def wiki_texts() -> list[str]:
    """All 6,119 passages of the corpus: title and text."""
    records = read_records(required("the 2Wiki corpus", data_folder(), CORPUS_FILE))
    return [f"{r['title']}\n{r['text']}" for r in records]


def load_questions(count: int) -> list[str]:
    """Different real questions: 2WikiMultihopQA's (dev 200, two lists over its dev split), then Natural Questions'."""
    corpus = required("the 2Wiki corpus", data_folder(), CORPUS_FILE).parent
    folder = corpus.parent
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
