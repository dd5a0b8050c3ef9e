"""What a worker is asked and how it answers: one JSON object a line over stdin and stdout.

Runs inside every peer's virtual environment, so it needs nothing but the standard library (Python 3.10).
"""

from __future__ import annotations

import array
import base64
import importlib.metadata
import json
import os
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Prompt:
    """Token ids: what every prompt begins with, the retrieved chunks, the question."""

    prefix: list[int]
    chunks: list[list[int]]
    question: list[int]

    @property
    def context(self) -> list[int]:
        """All but the question."""
        return self.prefix + [token for chunk in self.chunks for token in chunk]

    @property
    def ids(self) -> list[int]:
        """The whole prompt."""
        return self.context + self.question

    def message(self) -> dict[str, Any]:
        """As it travels."""
        return asdict(self)


@dataclass(frozen=True)
class Answer:
    """Greedy continuation, as ids or as text; log-probabilities of the first token over the vocabulary, if there are.

    ``again``: the prompt was served once more for the log-probabilities, from whatever was cached by then.
    ``reported_s``: the time to the first token as the peer itself gives it.
    """

    token_ids: list[int] | None = None
    text: str | None = None
    logprobs: Iterable[float] | None = None
    again: bool = False
    reported_s: float | None = None


class Worker(ABC):
    """A peer. Its methods are what a user could choose between; each keeps what it has seen."""

    packages: ClassVar[tuple[str, ...]] = ()  # distributions whose versions are reported

    @abstractmethod
    def load(self, model: str, context: int) -> list[str]:
        """Load the model folder for prompts and answers of up to ``context`` tokens together; names of the methods."""

    def prepare(self, method: str, prompt: Prompt) -> None:
        """See the chunks for the first time: by default an ordinary request."""
        self.first(method, prompt)

    @abstractmethod
    def first(self, method: str, prompt: Prompt) -> None:
        """Go as far as the first token."""

    @abstractmethod
    def answer(self, method: str, max_new_tokens: int) -> Answer:
        """Continue the last prompt."""


def pack(values: Iterable[float]) -> str:
    """Floats as base64 of float32."""
    return base64.b64encode(array.array("f", values).tobytes()).decode("ascii")


def unpack(text: str) -> array.array[float]:
    """What `pack` made."""
    return array.array("f", base64.b64decode(text))


def serve(worker: Worker) -> None:
    """Answer requests until stdin ends. What the peer prints goes to stderr: stdout carries replies only."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        cpu_s, started = time.process_time(), time.perf_counter()
        try:
            reply = _handle(worker, json.loads(line))
        except Exception as error:  # whatever a peer raises is told, and the parent decides
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        reply["inside_s"] = time.perf_counter() - started
        reply["cpu_s"] = [cpu_s, time.process_time()]  # all threads of this process, before and after
        print(json.dumps(reply), file=replies, flush=True)


def _handle(worker: Worker, message: dict[str, Any]) -> dict[str, Any]:
    match message["do"]:
        case "load":
            methods = worker.load(message["model"], message["context"])
            versions = {name: importlib.metadata.version(name) for name in worker.packages}
            return {"methods": methods, "versions": versions}
        case "prepare":
            worker.prepare(message["method"], Prompt(**message["prompt"]))
            return {}
        case "first":
            worker.first(message["method"], Prompt(**message["prompt"]))
            return {}
        case "answer":
            answer = worker.answer(message["method"], message["max_new_tokens"])
            logprobs = None if answer.logprobs is None else pack(answer.logprobs)
            return {**asdict(answer), "logprobs": logprobs}
        case other:
            raise ValueError(f"do={other!r}: load, prepare, first or answer")
