"""T(alpha, beta): interpolation, measuring, files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvreuse.ragcache.profiler import CostProfiler
from tests.tiny import tiny_model

CACHED, NEW = (0, 10, 30), (1, 5, 45)


def bilinear(a: float, b: float) -> float:
    """A function bilinear everywhere: interpolation between grid points must give it back."""
    return 1.0 + 0.5 * a + 2.0 * b + 0.25 * a * b


PROFILE = CostProfiler(CACHED, NEW, tuple(tuple(bilinear(a, b) for b in NEW) for a in CACHED))


@given(st.floats(0, 30), st.floats(1, 45))
def test_inside_the_grid_a_bilinear_cost_is_given_back(alpha: float, beta: float) -> None:
    assert PROFILE(alpha, beta) == pytest.approx(bilinear(alpha, beta), rel=1e-12)


@given(st.integers(-5, 100), st.integers(-5, 100))
def test_outside_the_grid_the_edge_counts(alpha: int, beta: int) -> None:
    inside = min(max(alpha, 0), 30), min(max(beta, 1), 45)
    assert PROFILE(alpha, beta) == pytest.approx(bilinear(*inside), rel=1e-12)


def test_grid_points_are_exact() -> None:
    seconds = ((0.1, 0.7, 0.3), (0.2, 0.9, 0.4), (0.3, 0.5, 0.8))
    profile = CostProfiler(CACHED, NEW, seconds)
    assert [[profile(a, b) for b in NEW] for a in CACHED] == [list(row) for row in seconds]


def test_one_point_grid() -> None:
    profile = CostProfiler((0,), (1,), ((0.5,),))
    assert profile(0, 1) == profile(100, 100) == 0.5


def test_measured_on_a_model_saved_and_loaded(tmp_path: Path) -> None:
    model = tiny_model()
    seen: list[tuple[int, int]] = []
    profile = CostProfiler.measure(model, (0, 8), (1, 4, 16), repeats=1, progress=lambda *at: seen.append(at))
    assert seen[-1] == (12, 12)
    assert len(profile.seconds) == 2
    assert all(0 < s < 5 for row in profile.seconds for s in row)
    path = tmp_path / "cost.json"
    profile.save(path)
    assert CostProfiler.load(path) == CostProfiler.load(path, model) == profile
    assert [p.name for p in tmp_path.iterdir()] == ["cost.json"]


def test_a_profile_of_something_else_is_refused(tmp_path: Path) -> None:
    model = tiny_model()
    path = tmp_path / "cost.json"
    CostProfiler.measure(model, (0,), (1,), repeats=1).save(path)
    with pytest.raises(ValueError, match="measured on something else .*model"):
        CostProfiler.load(path, tiny_model("qwen2"))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        with pytest.raises(ValueError, match=f"threads '{threads}', now '{threads + 1}'.*measure again"):
            CostProfiler.load(path, model)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "other"}'])
def test_a_foreign_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="not a usable cost profile"):
        CostProfiler.load(path)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    PROFILE.save(path)
    record = json.loads(path.read_text())
    record["seconds"] = record["seconds"][:-1]
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match="2 rows of lengths"):
        CostProfiler.load(path)


def test_bad_axes() -> None:
    with pytest.raises(ValueError, match="rising"):
        CostProfiler((0, 0), (1,), ((1.0,), (1.0,)))
    with pytest.raises(ValueError, match=r"new_tokens=\(0,\)"):
        CostProfiler((0,), (0,), ((1.0,),))
    with pytest.raises(ValueError, match="positive"):
        CostProfiler((0,), (1,), ((0.0,),))
    with pytest.raises(ValueError, match="repeats=0"):
        CostProfiler.measure(tiny_model(), (0,), (1,), repeats=0)
    with pytest.raises(ValueError, match="300 tokens"):
        CostProfiler.measure(tiny_model(), (0, 200), (1, 100))
