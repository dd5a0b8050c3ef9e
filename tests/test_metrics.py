"""Metrics against values worked out by hand."""

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvreuse import metrics
from kvreuse.metrics import (
    Interval,
    answer_nll,
    bootstrap_interval,
    gap_recovered,
    gap_recovered_interval,
    kl_divergence,
    normalize_answer,
    paired_interval,
    rouge_l,
    word_f1,
)


def log(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor(rows).log()


# --- text ---


def test_normalize_answer_is_squads() -> None:
    assert normalize_answer("  The U.S.A.,\n an  Apple-pie a day! ") == "usa applepie day"
    assert normalize_answer("Theatre and Anthem") == "theatre and anthem"  # articles go as whole words only
    assert normalize_answer("the") == ""


def test_word_f1_counts_repeated_words_once_each() -> None:
    # 2 words in common of 3 and 4: precision 2/3, recall 2/4.
    assert word_f1("New York city", ["new york new jersey"]) == pytest.approx(2 * 2 / 7)
    assert word_f1("york york", ["york"]) == pytest.approx(2 / 3)


def test_word_f1_is_the_best_over_the_answers() -> None:
    assert word_f1("Ada Lovelace.", ["Grace Hopper", "ada lovelace", "Ada"]) == 1.0
    assert word_f1("Ada", "Ada") == 1.0  # a lone answer is one answer, not a list of letters


def test_word_f1_of_empty_texts() -> None:
    assert word_f1("", ["Paris"]) == 0.0
    assert word_f1(" \n", ["Paris"]) == 0.0
    assert word_f1("the", ["Paris"]) == 0.0
    assert word_f1("Paris", ["The"]) == 0.0
    assert word_f1("", ["the"]) == 1.0  # both empty after normalisation


def test_no_gold_text_is_an_error() -> None:
    with pytest.raises(ValueError, match="answers is empty"):
        word_f1("x", [])
    with pytest.raises(ValueError, match="references is empty"):
        rouge_l("x", [])


@given(st.text(max_size=60), st.text(max_size=60))
def test_word_f1_is_symmetric_and_bounded(a: str, b: str) -> None:
    assert word_f1(a, [b]) == word_f1(b, [a])
    assert 0.0 <= word_f1(a, [b]) <= 1.0
    assert word_f1(a, [b, a]) == 1.0


def test_rouge_l_takes_the_longest_common_subsequence_of_stems() -> None:
    # The examples of the ROUGE paper (Lin 2004, section 3).
    assert rouge_l("police kill the gunman", "police killed the gunman") == 1.0
    assert rouge_l("the gunman kill police", "police killed the gunman") == pytest.approx(0.5)


def test_rouge_l_is_the_best_over_the_references_and_survives_empty_text() -> None:
    assert rouge_l("b c d", ["x y", "a b c d"]) == pytest.approx(2 * (3 / 3) * (3 / 4) / (3 / 3 + 3 / 4))
    assert rouge_l("", ["a b"]) == 0.0
    assert rouge_l("a b", [""]) == 0.0


def test_rouge_l_through_evaluate_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from rouge_score.rouge_scorer import RougeScorer

    calls = []

    def compute(predictions: list[str], references: list[list[str]], **how: Any) -> dict[str, list[float]]:
        calls.append(how)
        scorer = RougeScorer(how["rouge_types"], use_stemmer=how["use_stemmer"])
        pairs = zip(references, predictions, strict=True)
        return {"rougeL": [scorer.score_multi(r, p)["rougeL"].fmeasure for r, p in pairs]}

    texts = ("the gunman kill police", ["nothing", "police killed the gunman"])
    alone = rouge_l(*texts)
    metrics._rouge_scorer.cache_clear()
    monkeypatch.setattr(metrics, "_local_evaluate_rouge", lambda: SimpleNamespace(compute=compute))
    try:
        assert rouge_l(*texts) == alone
    finally:
        metrics._rouge_scorer.cache_clear()
    assert calls == [{"rouge_types": ["rougeL"], "use_stemmer": True, "use_aggregator": False}]


def test_evaluate_is_not_asked_to_download(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("evaluate.load was called without a local module")

    fake = SimpleNamespace(load=load, config=SimpleNamespace(HF_MODULES_CACHE=str(tmp_path)))
    monkeypatch.setitem(sys.modules, "evaluate", fake)
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: object())
    assert metrics._local_evaluate_rouge() is None


# --- distributions ---


def test_kl_divergence_is_the_mean_over_tokens() -> None:
    reference = log([[0.5, 0.5], [0.9, 0.1]])
    method = log([[0.25, 0.75], [0.9, 0.1]])
    first = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert kl_divergence(reference, method) == pytest.approx(first / 2, rel=1e-6)


def test_kl_divergence_of_zero_probabilities() -> None:
    sure, even = log([[1.0, 0.0]]), log([[0.5, 0.5]])
    assert kl_divergence(sure, even) == pytest.approx(math.log(2))
    assert kl_divergence(even, sure) == math.inf
    assert kl_divergence(sure, sure) == 0.0


@given(st.lists(st.floats(-20, 20), min_size=6, max_size=6))
def test_kl_divergence_is_not_negative(logits: list[float]) -> None:
    a, b = torch.tensor(logits).reshape(2, 3).log_softmax(dim=-1).split(1)
    assert kl_divergence(a, b) >= 0.0
    assert kl_divergence(a, a) == 0.0


def test_kl_divergence_refuses_what_it_cannot_compare() -> None:
    two, three = log([[0.5, 0.5]]), log([[0.2, 0.3, 0.5]])
    with pytest.raises(ValueError, match=r"\(1, 2\) and logprobs \(1, 3\) differ in shape"):
        kl_divergence(two, three)
    with pytest.raises(ValueError, match="apply log_softmax"):
        kl_divergence(two, torch.tensor([[3.0, 1.0]]))
    with pytest.raises(ValueError, match="not log-probabilities"):
        kl_divergence(two, torch.tensor([[math.nan, 0.0]]))
    with pytest.raises(ValueError, match=r"expected \[T, V\]"):
        kl_divergence(two[0], two[0])
    with pytest.raises(ValueError, match="at least one token"):
        kl_divergence(two[:0], two[:0])


def test_answer_nll_is_per_token() -> None:
    rows = log([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]])
    expected = -(math.log(0.25) + math.log(0.8)) / 2
    assert answer_nll(rows, [1, 2]) == pytest.approx(expected, rel=1e-6)
    assert answer_nll(rows, torch.tensor([1, 2])) == pytest.approx(expected, rel=1e-6)


def test_answer_nll_refuses_other_lengths_and_ids() -> None:
    rows = log([[0.5, 0.5]])
    with pytest.raises(ValueError, match="has 1 rows"):
        answer_nll(rows, [0, 1])
    with pytest.raises(ValueError, match="vocabulary of 2"):
        answer_nll(rows, [2])


# --- over cases ---


def test_gap_recovered_is_a_ratio_of_sums() -> None:
    assert gap_recovered([1.0, 0.0], [1.0, 3.0]) == pytest.approx(0.75)
    assert gap_recovered(0.5, 2.0) == pytest.approx(0.75)
    assert gap_recovered([3.0], [2.0]) == pytest.approx(-0.5)
    assert math.isnan(gap_recovered([0.0], [0.0]))


def test_gap_recovered_refuses_bad_values() -> None:
    with pytest.raises(ValueError, match="kl_method has 2 values, kl_full_reuse 1"):
        gap_recovered([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="kl_full_reuse has a negative value, -1.0"):
        gap_recovered([1.0], [-1.0])
    with pytest.raises(ValueError, match="kl_method has 1 values that are NaN"):
        gap_recovered([math.nan], [1.0])
    with pytest.raises(ValueError, match="kl_method is empty"):
        gap_recovered([], [])


def test_bootstrap_interval_is_about_two_standard_errors() -> None:
    interval = bootstrap_interval([0.0, 1.0] * 200)
    assert interval.mean == 0.5
    assert interval.low == pytest.approx(0.5 - 1.96 * 0.5 / 20, abs=0.006)
    assert interval.high == pytest.approx(0.5 + 1.96 * 0.5 / 20, abs=0.006)


def test_bootstrap_interval_is_seeded() -> None:
    values = [0.1, 0.7, 0.3, 0.9, 0.2]
    assert bootstrap_interval(values) == bootstrap_interval(torch.tensor(values, dtype=torch.float64))
    assert bootstrap_interval(values, seed=1) != bootstrap_interval(values, seed=2)


def test_bootstrap_interval_of_another_statistic() -> None:
    interval = bootstrap_interval([1.0, 2.0, 30.0], statistic=lambda cases: float(cases.median()), samples=300)
    assert interval == Interval(2.0, 1.0, 30.0)


def test_bootstrap_interval_of_one_case_has_no_width() -> None:
    assert bootstrap_interval([0.25]) == Interval(0.25, 0.25, 0.25)
    assert str(Interval(0.25, 0.2, 0.3)) == "0.250 [0.200, 0.300]"
    assert f"{Interval(0.25, 0.2, 0.3):+.1%}" == "+25.0% [+20.0%, +30.0%]"


def test_bootstrap_interval_refuses_bad_values() -> None:
    with pytest.raises(ValueError, match="values is empty"):
        bootstrap_interval([])
    with pytest.raises(ValueError, match="1 values that are NaN or infinite"):
        bootstrap_interval([1.0, math.inf])
    with pytest.raises(ValueError, match="samples=0"):
        bootstrap_interval([1.0], samples=0)


def test_pairing_removes_what_cases_share() -> None:
    a = torch.linspace(0, 100, 50, dtype=torch.float64)
    interval = paired_interval(a + 0.5, a)
    assert (interval.mean, interval.low, interval.high) == pytest.approx((0.5, 0.5, 0.5))
    with pytest.raises(ValueError, match="a has 2 values, b 1"):
        paired_interval([1.0, 2.0], [1.0])


def test_gap_recovered_interval_resamples_pairs() -> None:
    reuse = [0.1, 1.0, 10.0, 0.5]
    interval = gap_recovered_interval([0.25 * kl for kl in reuse], reuse)
    assert (interval.mean, interval.low, interval.high) == pytest.approx((0.75, 0.75, 0.75))
    wide = gap_recovered_interval([0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0])
    assert wide.low == 0.0
    assert wide.mean == 0.5
    assert wide.high == 1.0


def test_gap_recovered_interval_without_a_gap() -> None:
    nothing = gap_recovered_interval([0.0, 0.0], [0.0, 0.0])
    assert all(math.isnan(value) for value in (nothing.mean, nothing.low, nothing.high))
    # Resamples that happen to draw only the case without a gap are left out.
    assert gap_recovered_interval([0.0, 0.5], [0.0, 1.0]) == Interval(0.5, 0.5, 0.5)
