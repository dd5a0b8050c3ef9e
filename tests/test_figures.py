"""Every analysis figure: a smoke run on a tiny model, what its numbers must obey, and its picture."""

import gc
import json
import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from test_experiments import hand_made
from tiny import word_model

import kvreuse as kr
from experiments import fig06, fig07, least_compute, worldcup
from experiments.__main__ import EXPERIMENTS, main
from experiments.experiment import PRESETS, configurations
from experiments.results import Results, read_results
from experiments.runner import RunConfig
from experiments.value_tables import value_table
from kvreuse import demo

SETS = {
    "fig15a": "2wikimqa",
    "fig15b": "2wikimqa",
    "fig15c": "2wikimqa",
    "fig03": "worldcup",
    "fig04": "worldcup",
}
RETRIEVING = ("fig02", "fig15a", "fig15b", "fig15c")


@pytest.fixture(scope="module", autouse=True)
def _quick_collections():
    """The runner collects garbage after each case: do not search all that pytest and torch hold each time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A function that makes a figure's smoke run once and gives its records and its table; checks that it is drawn."""
    model = word_model()
    folder = tmp_path_factory.mktemp("figures")
    at = folder / "toy"
    model.hf.save_pretrained(at)
    model.tokenizer.save_pretrained(at)
    done = {}

    def once(name):
        if name in RETRIEVING and not demo._is_complete(demo.cache_folder() / demo._EMBEDDER.folder, demo._EMBEDDER):
            pytest.skip("the demo embedder is not in the cache: python -m kvreuse.demo")
        if name not in done:
            places = ["--out", str(folder / name), "--figures", str(folder / name)]
            more = {"fig16": ["--dataset", "musique"], "fig03": ["--limit", "4"]}.get(name, [])
            assert main([name, "--smoke", "--model", str(at), "--threads", "1", "--paper", *more, *places]) == 0
            (picture,) = (folder / name).glob("*.png")
            assert picture.name.startswith(f"{name}-toy-{SETS.get(name, 'musique')}")
            assert picture.stat().st_size > 15_000
            text = picture.with_suffix(".md").read_text()
            assert "The paper: " in text
            records = [r for path in sorted((folder / name).glob("*.jsonl")) for r in read_results(path).records]
            done[name] = records, pd.read_csv(picture.with_suffix(".csv")), places
        return done[name]

    return once


def test_attention_deviation_falls_below_full_reuses(run):
    records, frame, _ = run("fig06")
    by_rule = frame.set_index("rule")
    assert list(frame["rule"]) == ["full reuse", "HKVD", "random", "oracle"]
    assert by_rule.loc["full reuse", "share"] == 1
    assert 0 < by_rule.loc["HKVD", "deviation"] < by_rule.loc["full reuse", "deviation"]
    assert by_rule.loc["random", "recomputed"] == pytest.approx(0.3, abs=0.02)
    # layer 0 of four runs on all tokens, the others on 30%
    assert by_rule.loc["HKVD", "recomputed"] == pytest.approx((1 + 3 * 0.3) / 4, abs=0.02)
    assert all(len(r["attention_deviation"]) == 4 and r["attention_deviation"][0] < 1e-4 for r in records)


def test_every_rule_of_figure_6_is_found_by_its_repr():
    methods = EXPERIMENTS["fig06"].methods
    places = {fig06._place(repr(m)) for m in methods}
    assert len(methods) == 2 * len(places)
    assert places == {("full reuse", 0.0)} | {(rule, r) for rule in fig06.RULES for r in fig06.RATIOS}


def test_the_top_tokens_hold_more_than_their_share(run):
    records, frame, _ = run("fig07")
    assert sorted(set(frame["layer"])) == [1, 2, 3]
    tops = [f"top{100 * t:g}" for t in fig07.TOP]
    for _, row in frame.iterrows():
        values = [row[name] for name in tops]
        assert values == sorted(values)
        assert all(share * 0.8 <= value <= 1 for share, value in zip(fig07.TOP, values, strict=True))
        assert row["q0"] <= row["q0.5"] <= row["q1"]
    assert all(len(r["quantiles"]) == 3 for r in records)


def test_correlations_start_alike_and_stay_in_range(run):
    _, frame, _ = run("fig08")
    assert frame[["neighbour", "check"]].abs().to_numpy().max() <= 1
    second = frame[frame["layer"] == 2]
    assert second["neighbour"].tolist() == pytest.approx(second["check"].tolist())
    assert len(frame) == 4


def test_answers_to_every_question_by_every_method(run):
    records, frame, _ = run("fig03")
    assert len(frame) == len(records) == 5 * len(worldcup.QUESTIONS)
    assert set(frame["question"]) == {question for question, _ in worldcup.QUESTIONS}
    assert (frame[frame["method"] == "FullRecompute()"]["kl"] == 0).all()
    assert all(r["num_chunks"] == 2 for r in records)


def test_reuse_misses_the_cross_attention_that_recompute_has(run):
    records, frame, _ = run("fig04")
    cross = frame.set_index("method")["cross"]
    assert cross["FullRecompute()"] > 0.1
    assert cross[repr(kr.FullReuse(context="bare"))] == cross[repr(kr.FullReuse(context="prefix"))] == 0
    assert 0 < cross[repr(kr.CacheBlend(context="prefix"))] < cross["FullRecompute()"]
    for record in records:
        rows = record["attention"]
        assert [len(row) for row in rows] == list(range(1, record["prompt_tokens"] + 1))
        assert all(sum(row) == pytest.approx(1, abs=0.01) for row in rows)  # weights are kept to three digits
    matrices = {r["method"]: r["attention"] for r in records}
    full, prefix = matrices["FullRecompute()"], matrices[repr(kr.FullReuse(context="prefix"))]
    second = records[0]["starts"][1]
    for a, b in zip(full[:second], prefix[:second], strict=True):  # prefix and first chunk are exact
        assert a == pytest.approx(b, abs=2e-3)


def test_the_facts_of_the_example_add_up():
    texts = {"Messi": worldcup.MESSI.text, "Ronaldo": worldcup.RONALDO.text}
    assert "13 goals" in texts["Messi"]
    assert "8 goals" in texts["Ronaldo"]
    assert 1 + 0 + 4 + 1 + 7 == 13
    assert 1 + 1 + 1 + 4 + 1 == 8
    assert worldcup.QUESTIONS[0][1][0] == str(13 - 8)


def test_more_chunks_are_longer_prompts(run):
    _, frame, _ = run("fig02")
    assert set(frame["swept_num_chunks"]) == {1, 3}
    tokens = frame.groupby(["dataset", "swept_num_chunks"])["prompt_tokens"].mean().unstack()
    assert (tokens[3] > tokens[1]).all()
    one = frame[(frame["swept_num_chunks"] == 1) & (frame["label"] == "FullReuse (prefix)")]
    assert (one["kl"] < 1e-6).all()  # behind the prefix a single chunk is exact


@pytest.mark.parametrize(("name", "swept"), [("fig15a", "num_chunks"), ("fig15b", "chunk_tokens")])
def test_least_compute_runs_over_its_setting(run, name, swept):
    _, frame, _ = run(name)
    assert len(set(frame[f"swept_{swept}"])) == 2
    assert len(frame) == 2 * 4


def test_a_batch_keeps_each_cases_quality(run):
    """Rows equal single runs, so only the time differs between batch sizes."""
    _, frame, _ = run("fig15c")
    assert set(frame["swept_batch_size"]) == {1, 2}
    one, two = (frame[frame["swept_batch_size"] == n].set_index("method") for n in (1, 2))
    # fp32 rounding of the logits; a selection that hangs on it would be seen as well
    pd.testing.assert_series_equal(one["kl"], two["kl"], atol=1e-4)
    assert (one["num_chunks"] == two["num_chunks"]).all()


def test_a_batch_of_one_is_not_in_a_configurations_name():
    """Records from before there were batches keep their names."""
    config = RunConfig("fig15c", "demo", "2wikimqa", (kr.FullRecompute(),))
    assert repr(config) == (
        "RunConfig(figure='fig15c', model='demo', dataset='2wikimqa', methods=(FullRecompute(),), limit=None, "
        "small=False, data_dir=None, context='auto', num_chunks=6, chunk_tokens=512, max_new_tokens=None, "
        "score_tokens=128, repeats=1, device=None, dtype=None, quantization=None, threads=None, seed=0)"
    )
    assert repr(replace(config, batch_size=2)) == repr(config)[:-1] + ", batch_size=2)"
    with pytest.raises(ValueError, match="batch_size=0"):
        replace(config, batch_size=0)


def test_figure_16_has_every_ratio(run):
    _, frame, _ = run("fig16")
    assert [least_compute.ratio_of(m) for m in frame["method"]][2:] == [0, 0.05, 0.1]
    assert math.isnan(least_compute.ratio_of(frame["method"][1]))


def test_the_least_ratio_is_the_one_from_which_on_all_keep():
    methods = [repr(m) for m in least_compute.METHODS if not isinstance(m, kr.PrefixCaching)]
    kl = [0.0, 0.2, 0.04, 0.06, 0.05, 0.03, 0.01]  # full, reuse, then the ratios: 5% keeps by chance, 10% does not
    score = [0.5, 0.1, 0.48, 0.49, 0.486, 0.5, 0.4]
    frame = pd.DataFrame({"method": methods, "kl": kl, "score": score})
    assert least_compute.least_compute(frame, least_compute.keeps_kl)["ratio"] == 0.15
    assert least_compute.least_compute(frame, least_compute.keeps_score)["ratio"] == 1
    assert least_compute.least_compute(frame.assign(kl=0.0), least_compute.keeps_kl)["ratio"] == 0
    assert least_compute.least_compute(frame.assign(kl=1.0), least_compute.keeps_kl)["ratio"] == 1


def test_a_figure_is_drawn_again_from_its_records(run, tmp_path, capsys):
    _, frame, places = run("fig08")
    (records,) = (p for p in Path(places[1]).glob("*.jsonl"))
    assert main(["fig08", "--records", str(records), "--figures", str(tmp_path)]) == 0
    again = pd.read_csv(next(tmp_path.glob("*.csv")))
    pd.testing.assert_frame_equal(again, frame)
    assert "with the check layer" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "option"), [("fig02", "--num-chunks"), ("fig15b", "--chunk-tokens")])
def test_what_a_figure_sweeps_cannot_be_given(name, option, tmp_path, capsys):
    assert main([name, option, "3", "--out", str(tmp_path)]) == 1
    assert f"{name} varies {option[2:].replace('-', '_')} itself: leave {option} out" in capsys.readouterr().err


def test_a_figures_own_settings_stand_between_preset_and_command_line():
    fig02 = EXPERIMENTS["fig02"]
    found = configurations(fig02, PRESETS["paper"], {"chunk_tokens": 64, "dataset": "musique"})
    assert [c.num_chunks for c in found] == [1, 2, 4, 6, 8, 12]
    assert {(c.chunk_tokens, c.context, c.model) for c in found} == {(64, "retrieve-own", PRESETS["paper"].model)}
    assert len({c.file_name for c in found}) == 6


def test_means_leave_nan_out_and_incomplete_cases_too():
    results = hand_made()

    def rows(record, case):
        value = math.nan if record["case_id"] == "a" else record["kl"]
        assert set(case) == {m["method"] for m in results.header["methods"]}
        yield {"answer": record["answer"][:1]}, {"kl": value, "nll": record["nll"]}

    table = value_table(results, rows, {"kl": "KL"}, ("answer",), "note")
    reuse = table.frame[table.frame["label"] == "FullReuse (prefix)"].set_index("answer")
    assert math.isnan(reuse.loc["r", "kl"])
    assert (reuse.loc["g", "kl"], reuse.loc["g", "nll"]) == (0.1, 2.0)
    assert "note" in table.markdown()
    assert "2 cases" in table.text()
    assert value_table(Results(results.header, results.records[:2], False), rows, {}, ("answer",)) is None
    assert json.dumps(table.records)
