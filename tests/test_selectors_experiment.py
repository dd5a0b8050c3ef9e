"""`experiments.selectors` on a tiny random model: records, tables, picture, and answers that are not decoded twice."""

import math

import pandas as pd
import pytest
from test_experiments import CASES, DATASET, model  # noqa: F401 (a fixture)
from tiny import hf_model

import kvreuse as kr
from experiments.budgets import AtBudget
from experiments.measure import measure_case
from experiments.results import read_results
from experiments.runner import RunConfig, _prepare, run
from experiments.selector_plot import pareto, quality_against_ttft
from experiments.selector_report import BASE_RULE, by_case, markdown, split_label, summary
from experiments.selectors import METHODS, RULES, at
from experiments.selectors_thin import METHODS as THIN
from experiments.tables import make_table
from kvreuse.metrics import gap_recovered


@pytest.fixture(scope="module")
def deep(model):  # noqa: F811
    """Deep enough that HKVD's full layers fit into 5%."""
    hf = hf_model("llama", num_hidden_layers=24, hidden_size=12, num_attention_heads=2, num_key_value_heads=1)
    return kr.ReuseModel(hf, model.tokenizer, name="deep")


@pytest.fixture(scope="module")
def table(tmp_path_factory, deep):
    config = RunConfig("selectors", "deep", "toy", METHODS, max_new_tokens=4)
    path = run(config, tmp_path_factory.mktemp("selectors"), lambda: deep, dataset=DATASET)
    return make_table(read_results(path))


def test_methods_are_told_apart_and_spend_what_they_say(table):
    frame = summary(table)
    assert table.num_cases == len(CASES)
    assert table.failed == 0
    assert len(frame) == len(METHODS)
    assert set(THIN) <= set(METHODS)
    keys = list(zip(frame["rule"], frame["context"], frame["nominal"], strict=True))
    assert len(set(map(str, keys))) == len(keys)
    for _, row in frame.dropna(subset=["nominal"]).iterrows():
        check_free = row["nominal"] == 0.05 and row["rule"] == BASE_RULE
        # some twenty tokens are reused: counts are rounded to whole ones on each layer
        assert row["budget"] == pytest.approx(row["nominal"] + check_free / 24, abs=0.03)


def test_shares_and_differences_are_those_of_the_records(table):
    frame = summary(table).set_index("method")
    funnel, base = repr(at("Funnel", 0.15)), repr(at(BASE_RULE, 0.15))
    kl = {name: by_case(table, name)["kl"].astype(float).tolist() for name in (funnel, base, repr(kr.FullReuse()))}
    assert frame.loc[funnel, "share"] == pytest.approx(gap_recovered(kl[funnel], kl[repr(kr.FullReuse())]))
    differences = [a - b for a, b in zip(kl[funnel], kl[base], strict=True)]
    assert frame.loc[funnel, "kl_to_base"] == pytest.approx(sum(differences) / len(differences))
    assert frame.loc[base, "kl_to_base"] == 0
    assert math.isnan(frame.loc[repr(kr.FullReuse()), "kl_to_base"])


def test_the_report_has_every_rule_and_all_tables(table):
    text = markdown(table)
    for rule in {m.rule for m in METHODS if isinstance(m, AtBudget)}:
        assert rule in text
    assert text.count("| rule") == 3  # every rule, beside HKVD at its budget, at equal time
    assert f"Beside {BASE_RULE}" in text
    assert "nan" not in text


def test_the_picture_has_a_column_per_dataset_and_a_legend(table):
    figure = quality_against_ttft([table, table])
    assert len(figure.axes) == 4
    labels = {text.get_text() for text in figure.legends[0].get_texts()}
    assert {"Funnel", BASE_RULE, "Pareto front", "chunks encoded bos"} <= labels
    assert "FullRecompute" not in labels


def test_the_front_keeps_what_nothing_beats():
    frame = pd.DataFrame({"time_s": [1.0, 2.0, 3.0, 1.5, 2.5], "kl": [0.5, 0.2, 0.1, 0.6, 0.2]})
    assert pareto(frame, "kl", min).index.tolist() == [0, 1, 2]
    assert pareto(frame, "kl", max).index.tolist() == [0, 3]


def test_labels_come_apart_again():
    assert split_label("HKVD V, constant @ 5% (bare)") == ("HKVD V, constant", 0.05)
    assert split_label("FullReuse (prefix)") == ("FullReuse", None)
    assert split_label("FullRecompute") == ("FullRecompute", None)
    assert all(split_label(at(rule, 0.3).label) == (rule, 0.3) for rule in RULES)


@pytest.mark.parametrize("max_new_tokens", [1, 3, 12])
def test_answers_are_those_of_plain_decoding(model, max_new_tokens):  # noqa: F811
    """Records take the tokens that agree with full recompute's answer from one scoring pass."""
    methods = [kr.FullRecompute(), kr.FullReuse(), *(kr.CacheBlend(ratio=r) for r in (0.3, 0.6, 0.9, 1.0))]
    config = RunConfig("toy", "tiny", "toy", tuple(methods), max_new_tokens=max_new_tokens)
    agreed = 0
    for case in CASES:
        chunks = [case.chunk_text(document) for document in case.documents]
        m = _prepare(config, DATASET, model, chunks, case)
        store = kr.KVStore()
        methods[1].encode(model, m.prompt, store)
        records = {r["method"]: r for r in measure_case(methods, model, m)}
        for method in methods:
            plain = method.answer(model, m.prompt, store, max_new_tokens)
            assert records[repr(method)]["answer"] == plain.text
            assert records[repr(method)]["answer_tokens"] == len(plain.token_ids)
        agreed += records[repr(methods[-1])]["answer"] == records[repr(methods[0])]["answer"]
    assert agreed == len(CASES)  # ratio 1 is full recompute


def test_an_answer_that_ends_at_once(model, monkeypatch):  # noqa: F811
    """Full recompute's first token is an end token: nothing of it is an answer's beginning."""
    methods = [kr.FullRecompute(), kr.CacheBlend(ratio=1.0)]
    config = RunConfig("toy", "tiny", "toy", tuple(methods), max_new_tokens=4)
    m = _prepare(config, DATASET, model, [CASES[0].chunk_text(d) for d in CASES[0].documents], CASES[0])
    first = kr.FullRecompute().prefill(model, m.prompt).first_token
    monkeypatch.setattr(model.hf.generation_config, "eos_token_id", first)
    records = list(measure_case(methods, model, m))
    assert [r["answer_tokens"] for r in records] == [0, 0]


def test_full_layers_that_do_not_fit_are_spent_on_top(model, deep):  # noqa: F811
    prompt = kr.RagPrompt([3, 4], [list(range(5, 25)), list(range(30, 70))], [11])
    for wrapped, budget, spent in ((deep, 0.05, 0.05 + 1 / 24), (deep, 0.15, 0.15), (model, 0.15, 0.25 + 0.25 + 0.075)):
        method, store = at(BASE_RULE, budget), kr.KVStore()
        method.encode(wrapped, prompt, store)
        trace = method.prefill(wrapped, prompt, store).trace
        # on 4 layers neither fits into 15%: layer 0 and the check layer come on top of 15% of the two behind them
        assert trace.budget == pytest.approx(spent, abs=0.03)
