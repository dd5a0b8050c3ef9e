"""What goes into a simulation, as arrays with a row per request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from kvreuse.ragcache.node import Document

Ints = np.ndarray[Any, np.dtype[np.int32]]
Floats = np.ndarray[Any, np.dtype[np.float64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]
NONE = -1  # no document


class Asks(Protocol):
    """A request as an object. ``stages``: lists after every stage of the search, the last one ``documents``; or ()."""

    @property
    def arrival_s(self) -> float: ...
    @property
    def documents(self) -> Sequence[Document]: ...
    @property
    def question_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def stages(self) -> Sequence[Sequence[Document]]: ...


@dataclass(frozen=True, eq=False)
class Requests:
    """A workload of ``n`` requests.

    Args:
        arrival_s: [n], not falling.
        documents: [n, k] final lists of documents, in prompt order, as numbers; -1 behind a shorter list's last one.
        document_tokens: [number of documents].
        question_tokens: [n], or one number for all; with everything that stands behind the documents.
        new_tokens: [n], or one number for all; of the answers.
        stages: [n, stages - 1, k] what a search shows after each stage but the last, in the same form (-1 alone:
            nothing yet). None: searches show nothing before they end, so nothing can be speculated on.
    """

    arrival_s: Floats
    documents: Ints
    document_tokens: Ints
    question_tokens: Ints
    new_tokens: Ints
    stages: Ints | None = None

    def __post_init__(self) -> None:
        arrival = np.asarray(self.arrival_s, dtype=np.float64)
        if arrival.ndim != 1 or not arrival.size or not np.isfinite(arrival).all() or arrival[0] < 0:
            raise ValueError("arrival_s: give at least one time, each finite and from 0 up")
        if (np.diff(arrival) < 0).any():
            raise ValueError("arrival_s falls: sort requests by their arrival")
        count = arrival.size
        sizes = np.asarray(self.document_tokens, dtype=np.int32)
        if sizes.ndim != 1 or (sizes < 1).any():
            raise ValueError("document_tokens: one number per document, each 1 or more")
        lists: list[tuple[str, Any, tuple[int, ...]]] = [("documents", self.documents, (count,))]
        if self.stages is not None:
            lists.append(("stages", self.stages, (count, np.shape(self.stages)[1])))
        set_field = object.__setattr__
        for name, value, shape in lists:
            rows = np.asarray(value, dtype=np.int32)
            if rows.shape[:-1] != shape or rows.ndim != len(shape) + 1:
                raise ValueError(f"{name} has shape {rows.shape}: give lists of documents for each of {count} requests")
            if (rows >= sizes.size).any() or (rows < NONE).any():
                raise ValueError(f"{name}: a document's number is from 0 to {sizes.size - 1}, or -1 for none")
            if ((rows[..., 1:] != NONE) & (rows[..., :-1] == NONE)).any():
                raise ValueError(f"{name}: a document stands behind a -1")
            set_field(self, name, rows)
        for name in ("question_tokens", "new_tokens"):
            numbers = np.broadcast_to(np.asarray(getattr(self, name), dtype=np.int32), (count,))
            if (numbers < 1).any():
                raise ValueError(f"{name}: give 1 or more for every request")
            set_field(self, name, numbers)
        set_field(self, "arrival_s", arrival)
        set_field(self, "document_tokens", sizes)

    def __len__(self) -> int:
        return int(self.arrival_s.size)

    @classmethod
    def from_lists(
        cls,
        arrival_s: Sequence[float],
        documents: Sequence[Sequence[int]],
        document_tokens: Sequence[int],
        question_tokens: Sequence[int] | int,
        new_tokens: Sequence[int] | int,
        stages: Sequence[Sequence[Sequence[int]]] | None = None,
    ) -> Requests:
        """From lists of any lengths."""
        every = [*documents, *(found for shown in stages or () for found in shown)]
        width = max((len(found) for found in every), default=0)

        def padded(found: Sequence[int]) -> list[int]:
            return [*found, *[NONE] * (width - len(found))]

        return cls(
            np.asarray(arrival_s, dtype=np.float64),
            np.asarray([padded(found) for found in documents], dtype=np.int32),
            np.asarray(document_tokens, dtype=np.int32),
            np.asarray(question_tokens, dtype=np.int32),
            np.asarray(new_tokens, dtype=np.int32),
            None if stages is None else np.asarray([[padded(f) for f in shown] for shown in stages], dtype=np.int32),
        )

    @classmethod
    def of(cls, requests: Sequence[Asks]) -> Requests:
        """From objects; their documents are numbered as they first appear, in lists that were shown or final.

        So the numbers mean something within the result only. If several runs are to go on with one tree, take `some` of
        one `Requests`, or number the documents yourself (`from_lists`).
        """
        numbers: dict[Document, int] = {}

        def numbered(documents: Sequence[Document]) -> list[int]:
            return [numbers.setdefault(document, len(numbers)) for document in documents]

        documents = [numbered(r.documents) for r in requests]
        most = max((len(r.stages) for r in requests), default=0)
        stages = None
        if most > 1:
            stages = [[numbered(s) for s in r.stages[:-1]] + [[]] * (most - max(1, len(r.stages))) for r in requests]
        return cls.from_lists(
            [r.arrival_s for r in requests],
            documents,
            [document.num_tokens for document in numbers],
            [r.question_tokens for r in requests],
            [r.output_tokens for r in requests],
            stages,
        )

    def some(self, chosen: Flags) -> Requests:
        """Those with a true ``chosen`` [n]; documents keep their numbers, so one tree may serve several parts.

        Arrivals keep their times: a later part's simulation is idle until its first one.
        """
        names = ["arrival_s", "documents", "question_tokens", "new_tokens"]
        if self.stages is not None:
            names.append("stages")
        return replace(self, **{name: getattr(self, name)[chosen] for name in names})

    def shown(self, num_stages: int) -> Ints | None:
        """`stages`, which must be one less than the stages of a search."""
        if self.stages is not None and self.stages.shape[1] != num_stages - 1:
            raise ValueError(
                f"stages shows {self.stages.shape[1]} lists per request, a search of {num_stages} stages shows "
                f"{num_stages - 1} before its last: give costs with as many search_stage_s, or other lists"
            )
        return self.stages

    def sizes(self) -> Ints:
        """Tokens of each request's documents [n, k]; 0 where there is none."""
        return self._tokens(self.documents)

    def most_context(self, shown: bool) -> Ints:
        """Tokens of each request's documents [n]; ``shown``: the most of the lists its search shows and the final."""
        most: Ints = self.sizes().sum(axis=1, dtype=np.int32)
        if shown and self.stages is not None and self.stages.size:
            most = np.maximum(most, self._tokens(self.stages).sum(axis=2, dtype=np.int32).max(axis=1))
        return most

    def _tokens(self, lists: Ints) -> Ints:
        tokens = self.document_tokens[lists]
        tokens[lists == NONE] = 0
        return tokens
