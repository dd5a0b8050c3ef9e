"""Staged search ends with what one-shot search returns, on random and on duplicated vectors."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("faiss")

from kvreuse.ragcache.index import HNSWStages, IVFStages, StagedIndex

DIM = 16
BUILDERS: dict[str, Callable[[np.ndarray], StagedIndex]] = {
    "ivf": lambda rows: IVFStages(rows, num_stages=8),
    "ivf-few-probes": lambda rows: IVFStages(rows, num_clusters=20, nprobe=3),
    "ivf-one-cluster": lambda rows: IVFStages(rows, num_clusters=1),
    "hnsw": HNSWStages,
}


def vectors(count: int, seed: int, copies: int = 1) -> np.ndarray:
    """Random rows, each ``copies`` times: copies are equally near to any query."""
    rng = np.random.default_rng(seed)
    rows = np.repeat(rng.standard_normal((count // copies, DIM), dtype=np.float32), copies, axis=0)
    return rng.permutation(rows)


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("copies", [1, 4])
def test_last_stage_equals_one_shot_search(name: str, copies: int) -> None:
    rows = vectors(800, 0, copies)
    index = BUILDERS[name](rows)
    for query in [*vectors(60, 1), *rows[:20]]:
        stages = list(index.stages(query, 3))
        assert len(stages) == index.num_stages
        assert stages[-1] == index.search(query, 3)


def test_stages_improve_and_differ() -> None:
    rows = vectors(800, 0)
    index = IVFStages(rows, num_stages=8)
    changed = 0
    for query in vectors(40, 2):
        worst = [max(float(((rows[i] - query) ** 2).sum()) for i in found) for found in index.stages(query, 3)]
        assert worst == sorted(worst, reverse=True)
        changed += len(set(worst)) > 1
    assert changed > 10  # else stages would show nothing


def test_all_probes_is_exact_search() -> None:
    rows = vectors(300, 3)
    index = IVFStages(rows, num_clusters=10, nprobe=10, num_stages=5)
    for query in vectors(30, 4):
        exact = np.argsort(((rows - query) ** 2).sum(axis=1))[:4].tolist()
        assert list(index.stages(query, 4))[-1] == exact


def test_fewer_rows_than_asked_for() -> None:
    for index in (IVFStages(vectors(3, 0), num_clusters=1), HNSWStages(vectors(3, 0))):
        assert sorted(list(index.stages(vectors(1, 1)[0], 9))[-1]) == [0, 1, 2]


def test_bad_input() -> None:
    good = vectors(10, 0)
    for bad, message in (
        (lambda: IVFStages(good[0]), "shape (16,)"),
        (lambda: IVFStages(good * np.nan), "finite"),
        (lambda: IVFStages(good, num_clusters=11), "num_clusters=11 for 10 vectors"),
        (lambda: IVFStages(good, num_clusters=4, nprobe=5), "nprobe=5"),
        (lambda: IVFStages(good, num_stages=0), "num_stages=0"),
        (lambda: HNSWStages(good, ef_search=4), "ef_search=4"),
        (lambda: next(IVFStages(good).stages(good[0, :5], 2)), "5 numbers, the index 16"),
        (lambda: next(IVFStages(good).stages(good[0], 0)), "top_k=0"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            bad()
