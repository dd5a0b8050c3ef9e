"""`Books`: a server's state, without its threads. Says what to compute next and records what came of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

import torch

from kvreuse.errors import KVReuseError, PromptTooLongError
from kvreuse.ragcache import engine as model_side
from kvreuse.ragcache.controller import Controller, Request
from kvreuse.ragcache.corpus import Corpus
from kvreuse.ragcache.node import Document
from kvreuse.ragcache.planning import Iteration, Planner, id_of
from kvreuse.ragcache.serving_metrics import ServingMetrics
from kvreuse.ragcache.serving_types import Job, ServedAnswer, ServerOptions
from kvreuse.ragcache.speculative import Documents, Generation


class Books(Planner[model_side.Sequence]):
    """Everything a server knows; ``now`` is its clock, in seconds.

    Not thread-safe: the server holds its lock around every call but ``compute``.
    """

    def __init__(
        self,
        corpus: Corpus,
        controller: Controller,
        engine: model_side.Engine,
        options: ServerOptions,
        now: Callable[[], float],
    ) -> None:
        super().__init__(controller, engine, now)
        self.model, self.corpus, self.options, self.engine = engine.model, corpus, options, engine
        self.metrics = ServingMetrics()
        self.jobs: dict[int, Job] = {}
        self.error: BaseException | None = None  # a fault of the program's own
        self._submitted = self._answered = 0
        self._lost: deque[model_side.Sequence] = deque()  # prefilled, but the batch they were in is gone
        self._step_s = 0.0

    # -- requests and searches ----------------------------------------------------------------------------------------

    def submit(self, question: str, ids: torch.Tensor, max_new_tokens: int) -> tuple[int, Future[ServedAnswer]]:
        """Open a request for a question with token ids ``ids``; its number and the future of its answer."""
        if self.error is not None:
            raise RuntimeError("the server has stopped after an error of its own") from self.error
        request_id, self._submitted = self._submitted, self._submitted + 1
        job = Job(question, ids, max_new_tokens, Future())
        self.jobs[request_id] = job
        self.controller.arrive(request_id, ids.numel(), self.now())
        return request_id, job.future

    def stage(self, request_id: int, documents: Documents) -> None:
        """A stage of a search ended."""
        if request_id in self.jobs and self._too_long(request_id, documents) is None:
            with self._scheduling():
                self.controller.stage(request_id, documents)

    def final(self, request_id: int, documents: Documents) -> None:
        """A search ended."""
        if request_id not in self.jobs:
            return
        error = self._too_long(request_id, documents)
        if error is not None:
            self.fail(request_id, error)
        else:
            self.searched(request_id, documents)

    def fail(self, request_id: int, error: BaseException) -> None:
        """Answer a request with an error."""
        job = self.jobs.pop(request_id, None)
        self.controller.give_up(request_id)
        if job is not None:
            self.metrics.counts["failed"] += 1
            job.future.set_exception(error)

    def _too_long(self, request_id: int, documents: Sequence[Document]) -> KVReuseError | None:
        total = self.corpus.prefix.numel() + sum(d.num_tokens for d in documents)
        total += self.jobs[request_id].question_ids.numel()
        try:
            self.model.check_length(total)
        except KVReuseError as error:
            return error
        if self.model.long_rope(total) != self.engine.cache.long_rope:
            return PromptTooLongError(
                f"the prompt has {total} tokens, {self.model.name} rotates prompts from {self.model.long_rope_length} "
                f"tokens on with other factors, and the tree was made with long_rope={self.engine.cache.long_rope}"
            )
        return None

    # -- iterations ---------------------------------------------------------------------------------------------------

    def _urgent(self) -> Iteration | None:
        lost = self._next_lost()
        if lost is None:
            return None
        return Iteration(partial(self.engine.continued, lost), partial(self.engine.rejoin, lost), [id_of(lost)])

    def end_step(self) -> None:
        """An iteration is over: what was decided for it was one scheduling step."""
        if self._step_s:
            self.metrics.scheduling_s.append(self._step_s)
        self._step_s = 0.0

    def _sequence(self, generation: Generation) -> model_side.Sequence:
        job = self.jobs[generation.request_id]
        if job.sequence is None or job.sequence.generation is not generation:
            prompt = self.corpus.prompt(generation.documents, job.question_ids)
            job.sequence = model_side.Sequence(generation, prompt, job.max_new_tokens)
        return job.sequence

    def _next_lost(self) -> model_side.Sequence | None:
        while self._lost:
            sequence = self._lost.popleft()
            if sequence.generation.live:
                return sequence
        return None

    def _answer(self, request: Request | None) -> None:
        if request is None:
            return
        job, tree = self.jobs.pop(request.id), self.controller.tree
        assert job.sequence is not None
        assert request.documents is not None
        tokens = job.sequence.tokens
        text = self.model.decode(tokens).strip() if self.model.tokenizer is not None else ""
        self.metrics.answered(request, tree)
        self._answered += 1
        if self.options.replicas and self._answered % self.options.replicate_every == 0:
            self.metrics.counts["replicated_bytes"] += tree.replicate(self.options.replicas)
        documents = [self.corpus.number(d) for d in request.documents]
        job.future.set_result(ServedAnswer(text, list(tokens), documents, request))

    # -- failures (section 6) ---------------------------------------------------------------------------------------

    def retry_or_fail(self, request_ids: list[int], error: BaseException) -> list[int]:
        """Count a failure of each; those that failed too often are answered with the error. Returns the others."""
        left = []
        for request_id in request_ids:
            request = self.controller.open.get(request_id)
            if request is None:
                continue
            request.failures += 1
            if request.failures >= self.options.max_attempts:
                self.fail(request_id, error)
            else:
                self.metrics.counts["retried"] += 1
                left.append(request_id)
        return left

    def lost_thread(self, request_ids: list[int], error: BaseException) -> None:
        """The model's thread is gone, with the batch and its iteration.

        A request before its first token is computed again; one behind it goes on from its stored K/V.
        """
        self._lost.extend(self.engine.restart())
        left = set(self.retry_or_fail(request_ids, error))
        for generation in self.controller.running:
            if generation.request_id not in left:
                continue
            sequence = self._sequence(generation)
            if sequence.stored is None:
                self.controller.requeue(generation, len(sequence.tokens))
            elif not sequence.done and sequence not in self._lost:
                self._lost.append(sequence)

    def lose_gpu(self) -> None:
        """All that was in GPU memory is gone: the tree's GPU tier, the batch, the K/V of running sequences.

        They are prefilled again behind what the host still has; tokens that were emitted stay.
        """
        self.metrics.counts["gpu_lost"] += 1
        self.metrics.counts["nodes_lost"] += self.controller.tree.lose_gpu()
        self.engine.restart()
        self._lost.clear()
        for generation in self.controller.running:
            sequence = self._sequence(generation)
            sequence.stored = None
            if sequence.done:  # speculative, its search goes on: the answer is known, the K/V to commit are lost
                sequence.tokens, sequence.done = [], False
            self.controller.requeue(generation, len(sequence.tokens))

    def broken(self, error: BaseException) -> None:
        """Keeping the books failed, a fault of this program: nothing in them can be trusted any more."""
        self.error = error
        for request_id in list(self.jobs):
            self.jobs.pop(request_id).future.set_exception(error)

    @contextmanager
    def _scheduling(self) -> Iterator[None]:
        """Charge what runs inside to the scheduling step, but for moving K/V."""
        started, moved = time.perf_counter(), self.engine.moving.seconds
        yield
        self._step_s += time.perf_counter() - started - (self.engine.moving.seconds - moved)
