"""The server over the 2Wiki corpus: 500 real questions, its model thread killed and its GPU lost once each.

    OMP_NUM_THREADS=1 python -m benchmarks.server [--questions 500] [--rate 0.5] [--threads 1]

Poisson arrivals. Passages are cut to ``--doc-tokens`` tokens and answers to ``--max-new-tokens``, so that two CPU cores
bear the load; the tiers are small, so that both evict. Checked at the end: every request answered exactly once, none
lost; a sample of the answers against full recompute; the process's memory from quarter to quarter.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch

import kvreuse as kr
from benchmarks.wiki import load_questions, load_wiki
from kvreuse.ragcache.corpus import Corpus, Retriever
from kvreuse.ragcache.index import IVFStages
from kvreuse.ragcache.kv import TreeCache
from kvreuse.ragcache.profiler import CostProfiler
from kvreuse.ragcache.server import RagServer
from kvreuse.ragcache.serving_types import ServedAnswer, ServerOptions
from kvreuse.retrieval import Embedder


def resident_mib() -> float:
    """Memory of this process that is in RAM, MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class MemorySampler(threading.Thread):
    """Samples (seconds, MiB) every few seconds."""

    def __init__(self, interval_s: float = 2.0) -> None:
        super().__init__(daemon=True)
        self.samples: list[tuple[float, float]] = []
        self._interval_s, self._done = interval_s, threading.Event()
        self._since = time.monotonic()

    def run(self) -> None:
        """Until `stop`."""
        while not self._done.wait(self._interval_s):
            self.samples.append((time.monotonic() - self._since, resident_mib()))

    def stop(self) -> None:
        """End sampling."""
        self._done.set()
        self.join()


def cut(model: kr.ReuseModel, text: str, num_tokens: int) -> str:
    """The text's first tokens."""
    return model.decode(model.tokenize(text)[:num_tokens]).strip()


def drive(
    server: RagServer, questions: list[str], rate: float, max_open: int, seed: int
) -> tuple[list[Future[ServedAnswer]], list[int]]:
    """Submit at Poisson times; kill the model's thread at 30% and lose the GPU at 60% of the questions.

    While ``max_open`` requests are open, arrivals wait: the rate is the one the machine bears, whoever else uses it.
    """
    rng = random.Random(seed)
    futures, answered = [], [0] * len(questions)
    due = time.monotonic()

    def count(number: int) -> None:
        answered[number] += 1

    for number, question in enumerate(questions):
        due += rng.expovariate(rate)
        time.sleep(max(0.0, due - time.monotonic()))
        while number - sum(answered) >= max_open:
            time.sleep(0.02)
            due = time.monotonic()
        future = server.submit(question)
        future.add_done_callback(lambda _, n=number: count(n))  # type: ignore[misc]
        futures.append(future)
        if number == int(0.3 * len(questions)):
            server.kill_model_thread()
        if number == int(0.6 * len(questions)):
            server.lose_gpu()
        if number % 50 == 49:
            print(f"{number + 1} submitted, {sum(answered)} answered, {resident_mib():.0f} MiB", flush=True)
    return futures, answered


def check_sample(model: kr.ReuseModel, corpus: Corpus, answers: dict[str, ServedAnswer], limit: int, size: int) -> int:
    """How many of ``size`` answers have full recompute's tokens."""
    equal = 0
    for question in random.Random(1).sample(sorted(answers), min(size, len(answers))):
        documents = [corpus.document(n) for n in answers[question].documents]
        prompt = corpus.prompt(documents, corpus.question_ids(question))
        result = kr.FullRecompute().prefill(model, prompt, kr.KVStore())
        equal += model.generate(result, limit).token_ids == answers[question].token_ids
    return equal


def main() -> None:
    """Serve, check, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--rate", type=float, default=0.5, help="arrivals per second")
    parser.add_argument("--max-open", type=int, default=16, help="requests open at a time")
    parser.add_argument("--doc-tokens", type=int, default=48)
    parser.add_argument("--max-new-tokens", type=int, default=6)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--gpu", default="192MiB")
    parser.add_argument("--host", default="384MiB")
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sample", type=int, default=25, help="answers compared with full recompute")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/server.json"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    model = kr.load_model("demo")
    wiki, questions = load_wiki(), load_questions(args.questions)
    corpus = Corpus(model, [cut(model, t, args.doc_tokens) for t in wiki.texts], system="Answer from the passages.")
    retriever = Retriever(Embedder("demo"), IVFStages(np.asarray(wiki.vectors), num_stages=4), args.top_k)
    cost = CostProfiler.measure(model, (0, 32, 96, 160), (16, 64, 128, 192), repeats=2)
    cache = TreeCache(model, corpus.prefix, args.gpu, args.host, cost=cost)
    options = ServerOptions(max_new_tokens=args.max_new_tokens, window=args.window, replicas="16MiB")
    server = RagServer(model, corpus, retriever, cache, options)
    sampler = MemorySampler()
    started = time.monotonic()
    with server:
        server.answer(questions[0])
        server.metrics.requests.clear()
        sampler.start()
        futures, answered = drive(server, questions, args.rate, args.max_open, seed=0)
        done = [future.result(timeout=options.deadline_s) for future in futures]
        wall_s = time.monotonic() - started
        sampler.stop()
    answers = dict(zip(questions, done, strict=True))
    quarters = [statistics.mean(m for _, m in part) for part in _quarters(sampler.samples)]
    stats = server._books.controller.speculator.stats
    result = {
        "options": {k: str(v) for k, v in vars(args).items()},
        "answered_once": sum(n == 1 for n in answered),
        "lost": sum(n == 0 for n in answered),
        "answered_twice": sum(n > 1 for n in answered),
        "equal_to_full_recompute": check_sample(model, corpus, answers, args.max_new_tokens, args.sample),
        "compared": min(args.sample, len(answers)),
        "wall_s": wall_s,
        "memory_mib_by_quarter": [round(q, 1) for q in quarters],
        "speculation": vars(stats),
        "evictions": {"gpu": server.tree.gpu.evictions, "host": server.tree.host.evictions},
        "metrics": {k: round(v, 5) for k, v in server.metrics.summary().items()},
    }
    server.tree.check_integrity()
    print(json.dumps(result, indent=1))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({**result, "memory": sampler.samples}, indent=1))


def _quarters(samples: list[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    size = max(1, len(samples) // 4)
    return [samples[i * size : (i + 1) * size] for i in range(4) if samples[i * size : (i + 1) * size]]


if __name__ == "__main__":
    main()
