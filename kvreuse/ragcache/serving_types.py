"""What a server is told and what it returns."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

import torch

from kvreuse.ragcache.controller import Request
from kvreuse.ragcache.engine import Sequence


@dataclass(frozen=True)
class ServerOptions:
    """How a server runs.

    ``max_batch``: sequences that decode together. ``max_prefill_batch``: fewer than this must wait for a speculative
    generation to start. ``window``: how often a request may be overtaken. ``replicas``: bytes of hot upper nodes kept
    on host as well, renewed every ``replicate_every`` answers. ``iteration_timeout_s``, ``retrieval_timeout_s``: a
    prefill, decode step or search that takes longer is given up and done again, at most ``max_attempts`` times.
    ``deadline_s``: a request not answered by then fails. ``collect_between``: Python's garbage collector runs between
    iterations only, for the whole process while the server runs (`Collector`).
    """

    max_new_tokens: int = 32
    max_batch: int = 4
    max_prefill_batch: int = 4
    window: int = 32
    speculate: bool = True
    replicas: str | int = 0
    replicate_every: int = 16
    iteration_timeout_s: float = 120.0
    retrieval_timeout_s: float = 120.0
    max_attempts: int = 3
    deadline_s: float = 3600.0
    collect_between: bool = False

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "max_batch", "max_prefill_batch", "replicate_every", "max_attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: give 1 or more")
        for name in ("iteration_timeout_s", "retrieval_timeout_s", "deadline_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)}: give a number of seconds above 0")


@dataclass(frozen=True)
class ServedAnswer:
    """An answer, the numbers of the documents it was made from, and how its request went."""

    text: str
    token_ids: list[int]
    documents: list[int]
    request: Request

    @property
    def ttft_s(self) -> float:
        """Seconds from arrival to the first token that was known to be right."""
        assert self.request.first_token_s is not None
        return self.request.first_token_s - self.request.arrived_s


@dataclass(eq=False)
class Job:
    """A question on its way: everything about it that is not a decision."""

    question: str
    question_ids: torch.Tensor
    max_new_tokens: int
    future: Future[ServedAnswer]
    sequence: Sequence | None = None
