"""Published traces as they are: RAGPulse (a university's RAG service) and Mooncake (a chat service, Kimi).

Both come without texts: hash ids, lengths and times only. Neither is among the small sets.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import kvreuse as kr
from experiments.corpora import data_folder, required, source_of
from experiments.dataset_sources import read_records
from experiments.workloads import Request, Workload

RagPulseView = Literal["prompt", "passages"]
MOONCAKE_BLOCK_TOKENS = 512
_RAGPULSE = "trace_ragpulse"
# Part of a prompt -> file of its hash ids' lengths, in the order of the prompt.
_PARTS: Mapping[str, str] = {
    "sys_prompt": "1_sys_prompt.jsonl",
    "passages_ids": "2_passages.jsonl",
    "history": "3_history.jsonl",
    "web_search": "5_web_search.jsonl",
    "user_input": "4_user_input.jsonl",
}
_CONTEXT = ("sys_prompt", "passages_ids", "history", "web_search")


def ragpulse(data_dir: str | os.PathLike[str] | None = None, view: RagPulseView = "passages") -> Workload:
    """One week of RAGPulse: 7,106 requests, by time.

    The authors replay a prompt as system prompt (three blocks: the first is one of three, the others differ from
    request to request), passages, history, web search, user input.

    Args:
        data_dir: folder that has ``trace_ragpulse``.
        view: "prompt": every hash id but the user's input is a document, in that order; nothing is shared by all.
            "passages": the documents are the passages, and the first block of the system prompt is shared, as if what
            differs per request stood behind the passages; it counts as question. Requests without passages have no
            documents.

    Raises:
        FileNotFoundError: the trace is not there.
        ValueError: a hash id has no length, a row's input is shorter than its parts, or the view is unknown.
    """
    if view not in get_args(RagPulseView):
        raise ValueError(f"view={view!r}: choose one of {', '.join(get_args(RagPulseView))}")
    folder = data_folder(data_dir)
    place = required("the RAGPulse trace", folder, _RAGPULSE)
    lengths = {part: _lengths(place / name) for part, name in _PARTS.items()}
    rows = sorted(read_records(place / "0_trace.jsonl"), key=lambda row: float(row["timestamp"]))
    # As much of the first block as all requests have, so that no request's parts exceed its input.
    shared = 0
    if view == "passages":
        shared = min((sum(_tokens(row, "sys_prompt", lengths)[:1]) for row in rows), default=0)
    requests, short = [], []
    for number, row in enumerate(rows):
        parts = _CONTEXT if view == "prompt" else ("passages_ids",)
        documents = tuple(
            kr.Document(id_, tokens)
            for part in parts
            for id_, tokens in zip(row["hash_ids"][part], _tokens(row, part, lengths), strict=True)
        )
        rest = int(row["input_length"]) - sum(d.num_tokens for d in documents) - shared
        if rest < 1:
            short.append(
                f"row {number} by time ({row['input_length']} tokens, {int(row['input_length']) - rest} in its parts)"
            )
            continue
        requests.append(
            Request(float(row["timestamp"]), documents, rest, max(1, int(row["output_length"])), (), number)
        )
    if short:
        raise ValueError(
            f"{len(short)} of {len(rows)} rows of {place / '0_trace.jsonl'} leave nothing for the question, the first "
            f"is {short[0]}: take the trace and its lengths from the same release"
        )
    name = "RAGPulse, whole prompts" if view == "prompt" else "RAGPulse, passages"
    return Workload(name, source_of(folder), tuple(requests), shared)


def ragpulse_passages(data_dir: str | os.PathLike[str] | None = None) -> dict[int, int]:
    """Tokens of every passage of RAGPulse's corpus, those that no request got included."""
    return _lengths(required("the RAGPulse trace", data_folder(data_dir), _RAGPULSE) / _PARTS["passages_ids"])


def _lengths(path: Path) -> dict[int, int]:
    found = {}
    for record in read_records(path):
        id_ = next(int(value) for name, value in record.items() if name.endswith("_id"))
        found[id_] = int(record["token_length"])
    return found


def _tokens(row: Mapping[str, Any], part: str, lengths: Mapping[str, Mapping[int, int]]) -> Sequence[int]:
    ids = row["hash_ids"][part]
    try:
        return [lengths[part][id_] for id_ in ids]
    except KeyError as error:
        raise ValueError(f"RAGPulse's hash id {error} of {part} has no length in {_PARTS[part]}") from None


def mooncake(data_dir: str | os.PathLike[str] | None = None) -> Workload:
    """Mooncake's conversation trace: 12,031 requests in an hour, a document per full block of 512 tokens.

    A block's id is chained: it names the block *and all before it*. So ids that match at all match as a prefix, and
    reuse at any other place cannot be seen in this trace. What follows the last full block that has an id is the
    question: the partial block as a rule.

    Raises:
        FileNotFoundError: the trace is not there.
    """
    folder = data_folder(data_dir)
    path = required("the Mooncake trace", folder, "trace_mooncake/conversation_trace.jsonl")
    requests = []
    for number, row in enumerate(sorted(read_records(path), key=lambda row: row["timestamp"])):
        blocks = (int(row["input_length"]) - 1) // MOONCAKE_BLOCK_TOKENS  # the last token is never matched
        documents = tuple(kr.Document(id_, MOONCAKE_BLOCK_TOKENS) for id_ in row["hash_ids"][:blocks])
        rest = int(row["input_length"]) - MOONCAKE_BLOCK_TOKENS * len(documents)
        requests.append(
            Request(row["timestamp"] / 1000, documents, rest, max(1, int(row["output_length"])), (), number)
        )
    return Workload("Mooncake, conversations", source_of(folder), tuple(requests))
