"""Raw records of each dataset, in the form their authors publish, turned into cases.

Every function takes the records of one source by role ("cases", and "shots" for SAMSum) and raises
`ValueError` naming record and field when one does not fit. The small sets of `data/` have these forms too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from experiments.dataset_types import SHOTS_TEMPLATE, Case, Document, seeded_order

Record = Mapping[str, Any]
Records = Mapping[str, Sequence[Record]]
Parser = Callable[[Records, int], list[Case]]

# SAMSum chunks hold 200-400 tokens (CacheBlend, section 7.1). No tokenizer is known here, so 3.5 characters
# of a chat (short lines, names) count as a token.
CHARACTERS_PER_TOKEN = 3.5
SHOT_GROUP_TOKENS = (200, 400)
SHOT_GROUPS_PER_CASE = 10


def parse_musique(records: Records, seed: int) -> list[Case]:
    """MuSiQue-Ans: 20 paragraphs a case, the 2 to 4 gold ones marked. Unanswerable cases are skipped."""
    cases = []
    for index, record in enumerate(records["cases"]):
        if not record.get("answerable", True):
            continue
        documents = [
            Document(
                title=_field(paragraph, "title", index),
                text=_field(paragraph, "paragraph_text", index).strip(),
                gold=bool(_field(paragraph, "is_supporting", index)),
            )
            for paragraph in _field(record, "paragraphs", index)
        ]
        answers = [_field(record, "answer", index), *(record.get("answer_aliases") or ())]
        cases.append(_case(record, "id", index, _field(record, "question", index), answers, documents))
    return cases


def parse_musique_cacheblend(records: Records, seed: int) -> list[Case]:
    """CacheBlend's own MuSiQue input: 10 untitled chunks a case, none marked as gold."""
    cases = []
    for index, record in enumerate(records["cases"]):
        documents = [
            Document(title=_field(chunk, "title", index), text=_field(chunk, "text", index).strip())
            for chunk in _field(record, "ctxs", index)
        ]
        question, answers = _field(record, "question", index), _field(record, "answers", index)
        cases.append(_case(record, None, index, question, answers, documents))
    return cases


def parse_2wikimqa(records: Records, seed: int) -> list[Case]:
    """2WikiMultihopQA: paragraphs as sentence lists, gold by the titles in `supporting_facts`.

    Cases without context are left out, and so is a paragraph's second copy. The hub's HotpotQA-like columns
    ({"title": [...], "sentences": [...]}) and JSON strings are read too.
    """
    cases = []
    for index, record in enumerate(records["cases"]):
        context = _title_pairs(record.get("context"), ("sentences", "content"), index)
        if not context:
            continue
        facts = _title_pairs(_field(record, "supporting_facts", index), ("sent_id",), index)
        gold_titles = {title for title, _ in facts}
        documents = [
            Document(title, " ".join(sentence.strip() for sentence in sentences), gold=title in gold_titles)
            for title, sentences in context
        ]
        id_field = "_id" if "_id" in record else "id"
        question, answer = _field(record, "question", index), _field(record, "answer", index)
        cases.append(_case(record, id_field, index, question, [answer], dict.fromkeys(documents)))
    return cases


def parse_samsum(records: Records, seed: int) -> list[Case]:
    """SAMSum as a few-shot task: solved dialogues of the validation split, then one of the test split.

    The shots are put in one seeded order and cut into groups once, so that cases share chunks; each case
    draws `SHOT_GROUPS_PER_CASE` groups.
    """
    shots = []
    for index, record in enumerate(records["shots"]):
        dialogue, summary = _dialogue(record, index)
        if dialogue and summary:
            shots.append(f"Dialogue: {dialogue}\nSummary: {summary}\n")
    groups = [Document("", text) for text in group_shots(seeded_order(shots, seed, "samsum shots"))]
    if not groups:
        raise ValueError("SAMSum needs solved dialogues as shots, and its validation split has none of use")
    cases = []
    for index, record in enumerate(records["cases"]):
        dialogue, summary = _dialogue(record, index)
        case_id = str(record.get("id", index))
        documents = seeded_order(groups, seed, case_id, "shots")[:SHOT_GROUPS_PER_CASE]
        cases.append(Case(case_id, dialogue, (summary,), tuple(documents), SHOTS_TEMPLATE))
    return cases


def group_shots(shots: Iterable[str]) -> list[str]:
    """Whole shots joined into texts of 200 to 400 tokens, counting 3.5 characters as a token.

    A shot of that size is a group by itself; shorter ones are collected until they reach 200 (so they stay
    under 400). A shot over 400 is left out, and so is an unfilled last group unless there is no other.
    Without a last newline: the prompt separates chunks.
    """
    low, high = (tokens * CHARACTERS_PER_TOKEN for tokens in SHOT_GROUP_TOKENS)
    groups, short = [], ""
    for shot in shots:
        if len(shot) > high:
            continue
        if len(shot) >= low:
            groups.append(shot)
            continue
        short += shot
        if len(short) >= low:
            groups.append(short)
            short = ""
    if short and not groups:
        groups.append(short)
    return [group.rstrip("\n") for group in groups]


def parse_multinews(records: Records, seed: int) -> list[Case]:
    """LongBench's multi_news: its passages as documents; "NEWLINE_CHAR" becomes a newline."""
    cases = []
    for index, record in enumerate(records["cases"]):
        passages = re.split(r"(?m)^Passage \d+:\s*$", _field(record, "context", index))
        documents = [Document(title="", text=text) for text in map(_clean_news, passages) if text]
        cases.append(_case(record, "_id", index, "", _field(record, "answers", index), documents))
    return cases


def _clean_news(text: str) -> str:
    lines = re.sub(r"[ \t]*NEWLINE_CHAR[ \t]*", "\n", text.replace("\r\n", "\n"))
    return re.sub(r"\n{3,}", "\n\n", lines).strip()


def _dialogue(record: Record, index: int) -> tuple[str, str]:
    """Dialogue and summary on plain newlines, under the official field names or the published copy's."""
    names = ("context", "response") if "context" in record else ("dialogue", "summary")
    dialogue, summary = (_field(record, name, index).replace("\r\n", "\n").strip() for name in names)
    # A shot's summary is one line: generation stops at the first newline.
    return dialogue, " ".join(summary.split())


def _title_pairs(value: Any, value_names: Sequence[str], index: int) -> list[tuple[str, Any]]:
    """[(title, value), ...] from such pairs, or columns {"title": [...], ...}, or JSON text of either."""
    if isinstance(value, str):
        value = json.loads(value) if value.strip() else None
    if not value:
        return []
    if isinstance(value, Mapping):
        name = next((name for name in value_names if name in value), value_names[0])
        return list(zip(_field(value, "title", index), _field(value, name, index), strict=True))
    return [(first, second) for first, second in value]


def _case(
    record: Record,
    id_field: str | None,
    index: int,
    question: str,
    answers: Iterable[str],
    documents: Iterable[Document],
) -> Case:
    case_id = str(_field(record, id_field, index)) if id_field else str(index)
    case = Case(case_id, question.strip(), tuple(dict.fromkeys(map(str, answers))), tuple(documents))
    if not case.answers or not case.documents:
        missing = "answer" if case.documents else "document"
        raise ValueError(f"record {index} (id {case_id!r}) has no {missing}; take it out of the file or repair it")
    return case


def _field(record: Record, name: str, index: int) -> Any:
    try:
        return record[name]
    except (KeyError, TypeError):
        have = sorted(record) if isinstance(record, Mapping) else type(record).__name__
        raise ValueError(f"record {index} has no field {name!r} (it has {have}); is it the right file?") from None
