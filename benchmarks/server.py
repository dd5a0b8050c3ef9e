"""The server over the 2Wiki corpus: real questions, its model thread killed and its GPU lost once each.

    OMP_NUM_THREADS=1 python -m benchmarks.server [--questions 500] [--rate 0.5] [--threads 1]
    OMP_NUM_THREADS=1 python -m benchmarks.server --model tiny --embedder words --questions 12000 --pool 1000 --rate 60

Poisson arrivals; with ``--pool`` questions are drawn from so many with probability proportional to 1 / rank^skew, as
users ask some things more often, else all differ. Passages are cut to ``--doc-tokens`` tokens and answers to
``--max-new-tokens``, so that two CPU cores bear the load; the tiers are small, so that both evict. Checked at the end:
every request answered exactly once, none lost; a sample of the answers against full recompute; the process's memory
from quarter to quarter. ``--model tiny`` is a random-weight model of two layers: thousands of requests in minutes,
which is what shows whether memory stays flat; with ``--embedder words`` no embedding model runs either.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch

import kvreuse as kr
from benchmarks.arguments import save
from benchmarks.memory import MemorySampler, resident_mib, trim
from benchmarks.wiki import load_questions, wiki_texts
from experiments.vectors import embed, embedder_named
from kvreuse.ragcache.corpus import Corpus, Retriever
from kvreuse.ragcache.index import IVFStages
from kvreuse.ragcache.kv import TreeCache
from kvreuse.ragcache.profiler import CostProfiler
from kvreuse.ragcache.server import RagServer
from kvreuse.ragcache.serving_types import ServedAnswer, ServerOptions


def cut(model: kr.ReuseModel, text: str, num_tokens: int) -> str:
    """The text's first tokens."""
    return model.decode(model.tokenize(text)[:num_tokens]).strip()


def tiny_model() -> kr.ReuseModel:
    """A random-weight Llama of two layers with the demo model's tokenizer."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    tokenizer = kr.load_model("demo").tokenizer
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
    )
    return kr.ReuseModel(AutoModelForCausalLM.from_config(config).eval(), tokenizer, name="tiny")


def drawn(pool: list[str], count: int, skew: float, seed: int) -> list[str]:
    """``count`` questions of a pool; the one of rank r in proportion to 1 / r^skew."""
    weights = 1 / np.arange(1, len(pool) + 1) ** skew
    return [pool[i] for i in np.random.default_rng(seed).choice(len(pool), count, p=weights / weights.sum())]


class Tally:
    """What has been answered: how often each request, and each question's latest answer. Futures are not kept."""

    def __init__(self, count: int) -> None:
        self.times = [0] * count
        self.answers: dict[str, ServedAnswer] = {}
        self.errors: list[BaseException] = []
        self.open = 0
        self._changed = threading.Condition()

    def submit(self, server: RagServer, number: int, question: str) -> None:
        """Hand in request ``number``."""
        with self._changed:
            self.open += 1
        server.submit(question).add_done_callback(lambda future: self._done(number, question, future))

    def wait(self, max_open: int, timeout_s: float) -> None:
        """Until at most so many requests are open."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.open <= max_open, timeout_s):
                raise TimeoutError(f"{self.open} requests are open after {timeout_s} s")

    def _done(self, number: int, question: str, future: Future[ServedAnswer]) -> None:
        with self._changed:
            self.times[number] += 1
            self.open -= 1
            error = future.exception()
            if error is None:
                self.answers[question] = future.result()
            else:
                self.errors.append(error)
            self._changed.notify_all()


def drive(server: RagServer, questions: list[str], rate: float, max_open: int, seed: int) -> Tally:
    """Submit at Poisson times; kill the model's thread at 30% and lose the GPU at 60% of the questions.

    While ``max_open`` requests are open, arrivals wait: the rate is the one the machine bears, whoever else uses it.
    """
    rng, tally = random.Random(seed), Tally(len(questions))
    due = time.monotonic()
    for number, question in enumerate(questions):
        due += rng.expovariate(rate)
        time.sleep(max(0.0, due - time.monotonic()))
        if tally.open >= max_open:
            tally.wait(max_open - 1, server.options.deadline_s)
            due = time.monotonic()
        tally.submit(server, number, question)
        if number == int(0.3 * len(questions)):
            server.kill_model_thread()
        if number == int(0.6 * len(questions)):
            server.lose_gpu()
        if (number + 1) % max(1, len(questions) // 10) == 0:
            print(f"{number + 1} submitted, {tally.open} open, {resident_mib():.0f} MiB", flush=True)
    tally.wait(0, server.options.deadline_s)
    return tally


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
    parser.add_argument("--model", default="demo", help="demo, a hub id, a folder, or tiny: random weights")
    parser.add_argument("--embedder", default="demo", choices=("demo", "words"), help="words: hashed words, no model")
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--pool", type=int, help="draw the questions from so many; default: all differ")
    parser.add_argument("--skew", type=float, default=1.0, help="of that draw: 1 / rank^skew")
    parser.add_argument("--rate", type=float, default=0.5, help="arrivals per second")
    parser.add_argument("--max-open", type=int, default=16, help="requests open at a time")
    parser.add_argument("--doc-tokens", type=int, default=48)
    parser.add_argument("--max-new-tokens", type=int, default=6)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--gpu", default="192MiB")
    parser.add_argument("--host", default="384MiB")
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--collect-between", action="store_true", help="ServerOptions.collect_between")
    parser.add_argument("--sample", type=int, default=25, help="answers compared with full recompute")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/server.json"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    tiny = args.model == "tiny"
    model = tiny_model() if tiny else kr.load_model(args.model)
    texts, pool = wiki_texts(), load_questions(args.pool or args.questions)
    questions = drawn(pool, args.questions, args.skew, seed=0) if args.pool else pool
    corpus = Corpus(model, [cut(model, t, args.doc_tokens) for t in texts], system="Answer from the passages.")
    embedder = embedder_named(args.embedder)
    retriever = Retriever(embedder, IVFStages(embed(texts, embedder), num_stages=4), args.top_k)
    cost = CostProfiler.measure(model, (0, 32, 96, 160), (16, 64, 128, 192), repeats=2)
    cache = TreeCache(model, corpus.prefix, args.gpu, args.host, cost=cost)
    options = ServerOptions(
        max_new_tokens=args.max_new_tokens,
        window=args.window,
        replicas="1MiB" if tiny else "16MiB",
        collect_between=args.collect_between,
    )
    server = RagServer(model, corpus, retriever, cache, options)
    sampler = MemorySampler()
    with server:
        server.answer(questions[0])
        server.metrics.requests.clear()
        started, worked = time.monotonic(), time.process_time()
        sampler.start()
        tally = drive(server, questions, args.rate, args.max_open, seed=0)
        wall_s, cpu_s = time.monotonic() - started, time.process_time() - worked
        sampler.stop()
    resident = resident_mib()
    trim()
    stats = server._books.controller.speculator.stats
    result = {
        "options": {k: str(v) for k, v in vars(args).items()},
        "answered_once": sum(n == 1 for n in tally.times),
        "lost": sum(n == 0 for n in tally.times),
        "answered_twice": sum(n > 1 for n in tally.times),
        "failed": len(tally.errors),
        "equal_to_full_recompute": check_sample(model, corpus, tally.answers, args.max_new_tokens, args.sample),
        "compared": min(args.sample, len(tally.answers)),
        "wall_s": wall_s,
        "utilisation": cpu_s / wall_s,
        **sampler.summary(),
        "resident_mib_before_and_after_trim": [round(resident, 1), round(resident_mib(), 1)],
        "speculation": vars(stats),
        "evictions": {"gpu": server.tree.gpu.evictions, "host": server.tree.host.evictions},
        "metrics": {k: round(v, 5) for k, v in server.metrics.summary().items()},
    }
    server.tree.check_integrity()
    print(json.dumps(result, indent=1))
    save(args.out, {**result, "memory": sampler.samples})


if __name__ == "__main__":
    main()
