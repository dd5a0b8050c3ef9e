"""The server whose costs are measured: a model on this machine, its documents as long as they are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

import kvreuse as kr
from experiments.corpora import load_corpus, load_questions
from experiments.ragcache.scales import Scale
from experiments.runner import say
from experiments.vectors import WordEmbedder
from kvreuse import demo
from kvreuse.ragcache.corpus import Corpus, Retriever
from kvreuse.ragcache.cost_models import MeasuredCosts
from kvreuse.ragcache.cost_profiling import measure_costs
from kvreuse.ragcache.index import IVFStages
from kvreuse.ragcache.profiler import conditions

# About as many of our documents (120 tokens) as a published A10G holds of its own with Mistral-7B: 35 and 800.
GPU_TOKENS, HOST_TOKENS = 4_200, 96_000
QUESTIONS = 9


@dataclass(frozen=True)
class Grids:
    """Of T(alpha, beta), and lengths of decoding sequences; requests beyond them are refused by the simulator."""

    cached_tokens: tuple[int, ...]
    new_tokens: tuple[int, ...]
    lengths: tuple[int, ...]


# Real prompts: two documents of 1,700 tokens, a question of 1,000.
SMALL = Grids((32, 256, 768), (16, 64, 256, 768), (128, 512))
REAL = Grids((32, 256, 1024, 3072), (16, 64, 256, 1024, 5120), (128, 1024, 5632))


@cache
def measured_scale(name: str = "demo", small: bool = False) -> Scale:
    """Costs from the cache folder, or measured now, in minutes, and kept there; delete the file to measure again."""
    model = kr.load_model(name, device="cpu")
    threads = torch.get_num_threads()
    file = f"{model.fingerprint()[:16]}-{threads}threads{'-small' * small}.json"
    path = demo.cache_folder() / "serving_costs" / file
    try:
        costs = MeasuredCosts.load(path)
    except (FileNotFoundError, ValueError):  # never measured, or by an older version
        say(f"measuring what serving with {name} takes on this machine; kept in {path}")
        costs = _measure(model, SMALL if small else REAL)
        costs.save(path)
    title = f"{name}, measured ({conditions(model)['device']}, threads: {threads})"
    per_token = costs.bytes_per_token
    return Scale(title, costs, GPU_TOKENS * per_token, HOST_TOKENS * per_token)


def _measure(model: kr.ReuseModel, grids: Grids) -> MeasuredCosts:
    """On the small sets' paragraphs and questions, searched in four stages."""
    texts = list(load_corpus("small").texts)
    embedder = WordEmbedder()
    index = IVFStages(embedder.encode(texts).numpy(), num_clusters=16, nprobe=8)
    questions = [question.text for question in load_questions("musique", "small")[:QUESTIONS]]
    return measure_costs(
        model,
        Corpus(model, texts),
        Retriever(embedder, index, 2),
        questions,
        cached_tokens=grids.cached_tokens,
        new_tokens=grids.new_tokens,
        lengths=grids.lengths,
    )
