"""Staged search against one-shot search over the 2Wiki corpus: same documents, how early, at what price.

    OMP_NUM_THREADS=1 python -m benchmarks.staged_search [--queries 1000] [--top-k 2] [--stages 8]

6,119 passages, embedded once by the demo embedder (kept in the user's cache), searched for real
questions: 2WikiMultihopQA's, then Natural Questions'. An IVF index (cluster slices), an HNSW index (restarts with
doubled efSearch). Rounds of both searches are interleaved; times are medians over queries, ratios are within one run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.arguments import save
from benchmarks.wiki import load_questions, wiki_texts
from experiments.vectors import embed, embedder_named
from kvreuse.ragcache.index import HNSWStages, IVFStages, StagedIndex


def measure(index: StagedIndex, queries: np.ndarray, top_k: int) -> dict[str, float]:
    """Agreement, when the final list was first shown, seconds."""

    def timed(search: Callable[[], list[int]]) -> tuple[list[int], float]:
        started = time.perf_counter()
        found = search()
        return found, time.perf_counter() - started

    equal, first_shown, changes = 0, [], []
    one_shot_s, staged_s, first_s = [], [], []
    for number, query in enumerate(queries):
        shown: list[list[int]] = []

        def staged(query: np.ndarray = query, shown: list[list[int]] = shown) -> list[int]:
            shown.clear()
            shown.extend(index.stages(query, top_k))
            return shown[-1]

        searches = [lambda q=query: index.search(q, top_k), staged]  # type: ignore[misc]
        results = [timed(s) for s in (searches if number % 2 == 0 else searches[::-1])]
        (one, one_s), (last, all_s) = results if number % 2 == 0 else results[::-1]
        first_s.append(timed(lambda q=query: next(iter(index.stages(q, top_k))))[1])  # type: ignore[misc]
        equal += one == last
        first_shown.append(shown.index(last) + 1)
        changes.append(sum(a != b for a, b in pairwise(shown)))
        one_shot_s.append(one_s)
        staged_s.append(all_s)
    n = len(queries)
    return {
        "queries": n,
        "equal": equal,
        "stages": index.num_stages,
        "final_after_first_stage": sum(s == 1 for s in first_shown) / n,
        "final_after_half": sum(s <= index.num_stages / 2 for s in first_shown) / n,
        "wrong_lists_per_query": statistics.mean(changes),
        "one_shot_ms": statistics.median(one_shot_s) * 1e3,
        "staged_ms": statistics.median(staged_s) * 1e3,
        "first_stage_ms": statistics.median(first_s) * 1e3,
        "staged_over_one_shot": statistics.median(s / o for s, o in zip(staged_s, one_shot_s, strict=True)),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/staged_search.json"))
    args = parser.parse_args()
    embedder = embedder_named("demo")
    vectors, queries = embed(wiki_texts(), embedder), embed(load_questions(args.queries), embedder)
    exact = [set(row) for row in _exact(vectors, queries, args.top_k)]
    saved = {}
    for index in (IVFStages(vectors, num_stages=args.stages), HNSWStages(vectors, num_stages=args.stages)):
        index.search(queries[0], args.top_k)
        result = measure(index, queries, args.top_k)
        hits = sum(len(exact[i] & set(index.search(q, args.top_k))) for i, q in enumerate(queries))
        result["recall_of_exact_search"] = hits / (len(queries) * args.top_k)
        print(index)
        saved[repr(index)] = result
        print(json.dumps({k: round(v, 4) for k, v in result.items()}))

    save(args.out, saved)


def _exact(vectors: np.ndarray, queries: np.ndarray, top_k: int) -> list[list[int]]:
    import faiss

    flat = faiss.IndexFlatL2(vectors.shape[1])
    flat.add(vectors)
    return flat.search(queries, top_k)[1].tolist()


if __name__ == "__main__":
    main()
