"""`measure_costs`: what a `RagServer` of this model on this machine takes for everything it does.

Prefills and decode steps are timed on grids. The server's own books then serve a few requests, and what an iteration
takes beyond the grids is its overhead: decisions, K/V copied into the batch, everything else. Searches run beside
prefills tell what each does to the other. The grids are timed both before and after that, for a machine's speed drifts.
A server that waits for requests finds its processor asleep: searches and served requests may be timed behind a pause.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from kvreuse.kv import cut_out
from kvreuse.ragcache.batch import DecodeBatch
from kvreuse.ragcache.bookkeeping import Books
from kvreuse.ragcache.controller import Controller
from kvreuse.ragcache.corpus import Corpus, Retrieves
from kvreuse.ragcache.cost_models import MeasuredCosts, StepTable, frozen, mean_of
from kvreuse.ragcache.engine import Engine, TimedBackend
from kvreuse.ragcache.engine import Sequence as Served
from kvreuse.ragcache.kv import TensorBackend, TreeCache, bytes_per_token
from kvreuse.ragcache.node import Match
from kvreuse.ragcache.profiler import CostProfiler, conditions
from kvreuse.ragcache.serving_types import ServerOptions
from kvreuse.ragcache.speculative import Speculator

if TYPE_CHECKING:
    from kvreuse.model import ReuseModel


def measure_costs(
    model: ReuseModel,
    corpus: Corpus,
    retriever: Retrieves,
    questions: Sequence[str],
    *,
    cached_tokens: Sequence[int] = (32, 128, 256),
    new_tokens: Sequence[int] = (16, 64, 128, 256),
    lengths: Sequence[int] = (64, 256),
    max_batch: int = 4,
    max_new_tokens: int = 6,
    repeats: int = 2,
    pause_s: float = 0.0,
) -> MeasuredCosts:
    """Measure all costs; takes about as long as ``len(questions)`` requests and ``repeats`` + 2 rounds over the grid.

    Args:
        model, corpus, retriever: of the server.
        questions: served, a batch at a time, to find the overheads; at least ``max_batch``.
        cached_tokens, new_tokens: grid of T(alpha, beta); the largest of both must fit the model.
        lengths: tokens of the decoding sequences.
        max_batch: sequences that decode together.
        max_new_tokens: of the answers that are served.
        repeats: timed rounds over the grids before and after the questions are served, half of them each.
        pause_s: idle before every search and every batch that is served, as at a rate that leaves the server idle.

    Raises:
        ValueError: too few questions, or a grid that does not fit.
    """
    if len(questions) < max_batch:
        raise ValueError(f"{len(questions)} questions: a batch of max_batch={max_batch} needs as many")
    rounds = -(-repeats // 2)

    def grids() -> tuple[CostProfiler, StepTable]:
        prefill = CostProfiler.measure(model, cached_tokens, new_tokens, rounds)
        return prefill, _step_table(model, tuple(lengths), max_batch, 2 + rounds)

    before = grids()
    keep, to_gpu, to_host = _copying(model, max(lengths), repeats)
    searches = [_search(retriever, question, pause_s) for question in questions]
    served = _Served(model, corpus, ServerOptions(max_new_tokens=max_new_tokens, max_batch=max_batch), before[0])
    found = [(question, documents) for question, (documents, _) in zip(questions, searches, strict=True)]
    served.serve(found[:1])  # warm-up
    served.forget()
    for start in range(0, len(found), max_batch):
        time.sleep(pause_s)
        served.serve(found[start : start + max_batch])
    beside_s, contention_s = _contention(model, retriever, questions, min(new_tokens))
    stages = zip(*(seconds for _, seconds in searches[1:] or searches), strict=True)
    stage_s = tuple(statistics.fmean(seconds) for seconds in stages)
    after = grids()
    prefill = replace(before[0], seconds=frozen(mean_of([before[0].seconds, after[0].seconds])))
    step = replace(before[1], seconds=frozen(mean_of([before[1].seconds, after[1].seconds])))
    by_rows = {
        rows: statistics.fmean(taken - prefill(*tokens) for tokens, taken in seen)
        for rows, seen in sorted(served.prefills.items())
    }
    steps = [taken - step(*rows) for rows, taken in served.steps]
    return MeasuredCosts(
        prefill=prefill,
        step=step,
        prefill_overheads_s=tuple(max(0.0, by_rows.get(n, by_rows[max(by_rows)])) for n in range(max_batch)),
        step_overhead_s=max(0.0, statistics.fmean(steps)) if steps else 0.0,
        search_stage_s=stage_s,
        keep_s_per_byte=keep,
        to_gpu_s_per_byte=to_gpu,
        to_host_s_per_byte=to_host,
        bytes_per_token=bytes_per_token(model),
        contended_search=beside_s / sum(stage_s),
        contention_s=contention_s,
        conditions=conditions(model),
    )


def _seconds(function: Callable[[], object], device: torch.device) -> float:
    """One call, the device waited for."""
    started = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _step_table(model: ReuseModel, lengths: tuple[int, ...], max_batch: int, steps: int) -> StepTable:
    """Medians of ``steps`` decode steps from every length on, behind one of warm-up."""
    ids = torch.randint(0, model.config.vocab_size, (max(lengths),), generator=torch.Generator().manual_seed(0))
    _, cache = model.prefill(ids)
    rows = []
    for count in range(1, DecodeBatch(model, max_batch).max_rows + 1):
        row = []
        for length in lengths:
            batch = DecodeBatch(model, max_batch)
            for _ in range(count):
                batch.join(cache, length)
            times = [_seconds(lambda b=batch, n=count: b.step([5] * n), model.device) for _ in range(steps + 1)]  # type: ignore[misc]
            row.append(statistics.median(times[1:]))
        rows.append(tuple(row))
    return StepTable(tuple(range(1, len(rows) + 1)), lengths, tuple(rows))


def _copying(model: ReuseModel, num_tokens: int, repeats: int) -> tuple[float, float, float]:
    """Seconds per byte: cut out of a prefill, copied to GPU, to host."""
    ids = torch.randint(0, model.config.vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(0))
    _, cache = model.prefill(ids)
    backend, half = TensorBackend(model), ids[: num_tokens // 2]
    payload = cut_out(cache, half, 0, False)
    calls: list[Callable[[], object]] = [
        lambda: cut_out(cache, half, 0, False),
        lambda: backend.to_gpu(payload),
        lambda: backend.to_host(payload),
    ]
    size = backend.num_bytes(payload)
    keep, to_gpu, to_host = (
        statistics.median(_seconds(call, model.device) for _ in range(3 + repeats)) / size for call in calls
    )
    return keep, to_gpu, to_host


def _search(retriever: Retrieves, question: str, pause_s: float) -> tuple[Sequence[int], list[float]]:
    """What is found, and the seconds of every stage."""
    time.sleep(pause_s)
    times = [time.perf_counter()]
    found = retriever.search(question, lambda _: times.append(time.perf_counter()))
    times.append(time.perf_counter())
    return found, [after - before for before, after in pairwise(times)]


def _contention(
    model: ReuseModel, retriever: Retrieves, questions: Sequence[str], num_tokens: int
) -> tuple[float, float]:
    """Seconds of a search beside prefills, and what it adds to them; each paired with a prefill alone."""
    ids = torch.randint(0, model.config.vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(0))

    def prefill_s() -> float:
        return _seconds(lambda: model.prefill(ids), model.device)

    beside, added = [], []
    with ThreadPoolExecutor(1) as thread:
        for question in questions:
            alone = prefill_s()
            search = thread.submit(lambda q=question: sum(_search(retriever, q, 0.0)[1]))  # type: ignore[misc]
            late = prefill_s() - alone
            while not search.done():
                late += prefill_s() - alone
            beside.append(search.result())
            added.append(late)
    return statistics.fmean(beside), max(0.0, statistics.fmean(added))


class _WatchedEngine(Engine):
    """Remembers alpha and beta of the prefill that was prepared last."""

    planned = (0, 0)

    def prepare(self, sequence: Served, match: Match) -> Any:
        """As it is, and noted."""
        self.planned = match.cached_tokens, sequence.prompt.num_tokens - match.cached_tokens
        return super().prepare(sequence, match)


class _Served:
    """Serves requests through a server's own books, in one thread, and keeps what iterations took.

    ``prefills``: by the rows of the batch that was joined, (alpha, beta) and seconds; ``steps``: (rows, longest) and
    seconds. Without moving K/V between tiers.
    """

    def __init__(self, model: ReuseModel, corpus: Corpus, options: ServerOptions, prefill: CostProfiler) -> None:
        cache = TreeCache(model, corpus.prefix, cost=prefill)
        self.engine = _WatchedEngine(cache, options.max_batch)
        cache.tree.backend = TimedBackend(cache.tree.backend, self.engine.moving)
        controller = Controller(cache.tree, Speculator(enabled=False), options.window)
        self.books = Books(corpus, controller, self.engine, options, time.monotonic)
        self.corpus, self.options = corpus, options
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.prefills: dict[int, list[tuple[tuple[int, int], float]]] = defaultdict(list)
        self.steps: list[tuple[tuple[int, int], float]] = []

    def serve(self, found: Sequence[tuple[str, Sequence[int]]]) -> None:
        """Questions with their documents, all at once."""
        for question, numbers in found:
            ids = self.corpus.question_ids(question)
            request_id, _ = self.books.submit(question, ids, self.options.max_new_tokens)
            self.books.final(request_id, tuple(self.corpus.document(n) for n in numbers))
        while self._iterate():
            pass

    def _iterate(self) -> bool:
        rows, longest = len(self.engine.rows), max(self.engine.batch.lengths, default=0) + 1
        started, moved = time.perf_counter(), self.engine.moving.seconds
        work = self.books.plan()
        if work is None:
            return False
        work.record(work.compute())
        taken = time.perf_counter() - started - (self.engine.moving.seconds - moved)
        if work.is_step:
            self.steps.append(((rows, longest), taken))
        else:
            self.prefills[rows].append((self.engine.planned, taken))
        return True
