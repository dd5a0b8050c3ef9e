"""RAGCache's simulated figures: on the small sets and a toy tokenizer; records by hand; redrawn without a run."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from tiny import word_model

import kvreuse as kr
from experiments.__main__ import SIMULATED, listing, main
from experiments.ragcache import fig17, fig18, fig19, rates, tab02, tab04
from experiments.ragcache.bench import Bench, measures
from experiments.ragcache.measured import measured_scale
from experiments.ragcache.scales import Scale, scales_named
from experiments.ragcache.seeds import over_seeds, percent, ratio_of, text
from experiments.results import read_results
from experiments.vectors import Search
from experiments.workloads import retrieve
from kvreuse.intervals import Interval
from kvreuse.ragcache.simulation_input import Requests
from kvreuse.ragcache.simulation_result import SimulationResult
from kvreuse.ragcache.systems import NO_REUSE, RAGCACHE

pytest.importorskip("faiss")
pytest.importorskip("simpy")
RUN = ("ragcache.fig13", "ragcache.fig17", "ragcache.fig18", "ragcache.fig19", "ragcache.tab04")
FROM_RECORDS = {"ragcache.tab02": "ragcache.fig17", "ragcache.tab03": "ragcache.fig19"}


class Words:
    """A word is a token."""

    def tokenize(self, text):
        return torch.zeros(len(text.split()), dtype=torch.long)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """One smoke run of them: the arguments, and its folder."""
    folder = tmp_path_factory.mktemp("simulated")
    model = word_model()
    model.hf.save_pretrained(folder / "toy-llama")
    model.tokenizer.save_pretrained(folder / "toy-llama")
    places = ["--out", str(folder / "results"), "--figures", str(folder / "figures")]
    arguments = ["--smoke", "--requests", "16", "--model", str(folder / "toy-llama"), "--dataset", "musique", *places]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVREUSE_CACHE", str(folder / "cache"))
        for figure in (*RUN, *FROM_RECORDS):
            assert main([figure, *arguments]) == 0
    return arguments, folder


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The small set's questions at a small scale, and a configuration's worth of records of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVREUSE_CACHE", str(tmp_path_factory.mktemp("cache")))
        retrieved = retrieve("musique", Search(embedder="words"), data_dir="small", counter=Words())
    (mistral, _) = scales_named("a10g")
    return Bench(retrieved, mistral)


def records(folder, figure):
    (path,) = (folder / "results").glob(f"{figure.replace('.', '-')}-*.jsonl")
    return read_results(path)


# -- the command line ----------------------------------------------------------------


def test_every_figure_writes_records_a_table_and_a_picture(smoke):
    _, folder = smoke
    for figure in (*RUN, *FROM_RECORDS):
        stem = f"{figure.replace('.', '-')}-a10g"
        for suffix in ("md", "csv", "png"):
            assert (folder / "figures" / f"{stem}.{suffix}").stat().st_size > (10_000 if suffix == "png" else 100)
        table = (folder / "figures" / f"{stem}.md").read_text()
        assert "published-hardware scale" in table
    for figure in RUN:
        results = records(folder, figure)
        assert results.complete
        assert results.header["requests"] == 16
        assert results.header["scales"][0]["costs"] == "Mistral-7B on A10G, published-hardware scale"
        for record in results.records:
            assert len(json.dumps(record)) < 1_000
            assert {"case_id", "method", "server", "seed", "rate"} <= set(record)


def test_tables_2_and_3_are_drawn_from_their_figures_records(smoke):
    arguments, folder = smoke
    before = {path: path.stat().st_mtime_ns for path in (folder / "results").iterdir()}
    assert len(before) == len(RUN)
    for table in FROM_RECORDS:
        assert main([table, *arguments]) == 0
    assert {path: path.stat().st_mtime_ns for path in (folder / "results").iterdir()} == before


def test_they_are_drawn_again_without_simulation_or_tokenizer(smoke, capsys):
    arguments, folder = smoke
    hidden = (folder / "toy-llama").rename(folder / "hidden")
    try:
        for figure in ("ragcache.fig18", "ragcache.tab03"):
            picture = folder / "figures" / f"{figure.replace('.', '-')}-a10g.png"
            picture.unlink()
            assert main([figure, "--plot-only", *arguments]) == 0
            assert picture.is_file()
    finally:
        hidden.rename(folder / "toy-llama")
    assert main(["ragcache.fig18", "--plot-only", "--costs", "h800", *arguments]) == 1
    assert "run it first" in capsys.readouterr().err


def test_they_are_listed_apart_from_cacheblends(smoke):
    lines = {line.split("  ")[1]: line for line in listing().splitlines()}
    assert len(SIMULATED) == 10
    for figure, experiment in SIMULATED.items():
        line = lines[f"python -m experiments.{figure}"]
        assert "simulated" in line
        assert "RAGCache 7" in line
        assert experiment.cost in line
    assert "CacheBlend" in lines["python -m experiments.fig14"] or "6" in lines["python -m experiments.fig14"]


def test_wrong_settings_end_in_one_line(smoke, capsys):
    arguments, _ = smoke
    assert main(["ragcache.fig18", *arguments, "--costs", "b200"]) == 1
    assert "costs 'b200' is unknown: choose one of a10g, h800, measured" in capsys.readouterr().err
    assert main(["ragcache.fig18", *arguments, "--requests", "3"]) == 1
    assert "requests=3: give at least 8" in capsys.readouterr().err


def test_costs_of_this_machine_are_measured_once_and_recorded(smoke, monkeypatch):
    arguments, folder = smoke
    monkeypatch.setenv("KVREUSE_CACHE", str(folder / "cache"))
    out = ["--out", str(folder / "measured"), "--costs", "measured", "--seeds", "1"]
    assert main(["ragcache.fig18", *arguments, *out]) == 0
    (kept,) = (folder / "cache" / "serving_costs").iterdir()
    (path,) = (folder / "measured").iterdir()
    (scale,) = read_results(path).header["scales"]
    assert "measured on cpu" in scale["costs"]
    assert scale["mean_document_tokens"] is None
    assert scale["measured"] == json.loads(kept.read_text())

    old = {**scale["measured"], "format": "kvreuse serving costs 1"}  # before searches and iterations cost each other
    kept.write_text(json.dumps(old))
    again = measured_scale.__wrapped__(str(folder / "toy-llama"), small=True)
    assert json.loads(json.dumps(again.costs.record())) == json.loads(kept.read_text()) != old


# -- what is simulated ----------------------------------------------------------------


def test_documents_are_stretched_to_the_scales_mean_by_one_factor(small):
    own = np.asarray(small.retrieved.document_tokens)
    assert small.document_tokens.mean() == pytest.approx(2000, rel=1e-3)
    assert small.document_tokens / own == pytest.approx(2000 / own.mean(), rel=0.02)
    unstretched = Bench(small.retrieved, replace(small.scale, mean_document_tokens=None))
    assert unstretched.document_tokens.tolist() == own.tolist()


def test_a_load_of_one_is_what_a_server_without_reuse_can_do(small):
    busy = small.simulator(NO_REUSE).run(small.requests(small.rate(20.0), 96, 0))
    assert busy.throughput_per_s == pytest.approx(small.rate(1.0), rel=0.03)  # every question four times
    idle = small.simulator(NO_REUSE).run(small.requests(small.rate(0.01), 96, 0))
    assert float(idle.ttft_s.mean()) == pytest.approx(0.4 + small.full_prefill_s, rel=0.05)


def test_systems_get_the_same_requests_and_seeds_others(small):
    first, again, other = (small.requests(1.0, 20, seed) for seed in (0, 0, 1))
    assert first.arrival_s.tolist() == again.arrival_s.tolist() != other.arrival_s.tolist()
    assert first.documents.tolist() == again.documents.tolist() != other.documents.tolist()
    faster = small.requests(2.0, 20, 0)
    assert faster.documents.tolist() == first.documents.tolist()
    assert faster.arrival_s == pytest.approx(first.arrival_s / 2)


def test_a_searchs_stages_take_its_whole_time_however_many_they_are(small):
    assert small.retrieved.found.shape[1] == 2
    assert small.costs.search_stage_s == (0.2, 0.2)
    tenth = Bench(small.retrieved, fig19.searched(small.scale, 0.1))
    assert tenth.costs.search_stage_s == pytest.approx((0.02, 0.02))


def test_more_clusters_are_searched_where_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("KVREUSE_CACHE", str(tmp_path))
    few, every = (
        retrieve("musique", Search(embedder="words", probed=share), data_dir="small", counter=Words())
        for share in (0.1, 1.0)
    )
    exact = retrieve("musique", Search("flat", embedder="words"), data_dir="small", counter=Words())
    assert every.found.shape[1] == 4
    assert few.found.shape[1] == 1
    assert every.found[:, -1].tolist() == exact.found[:, -1].tolist() != few.found[:, -1].tolist()
    with pytest.raises(ValueError, match="probed=0"):
        Search(probed=0)
    with pytest.raises(ValueError, match="probed=0.5"):
        Search("hnsw", probed=0.5)


# -- what is recorded ----------------------------------------------------------------


def result_by_hand():
    """Four requests of two documents of 100 tokens; the first is warm-up."""
    requests = Requests.from_lists([0.0, 1.0, 2.0, 3.0], [[0, 1]] * 4, [100, 100], 10, 1)
    result = SimulationResult.empty("by hand", "none", requests)
    result.arrived_s = requests.arrival_s
    result.retrieved_s = result.arrived_s + 0.4
    result.first_token_s = np.array([9.0, 1.4, 2.9, 4.4])
    result.finished_s = np.array([9.0, 1.5, 3.0, 5.0])
    result.prefill_s = np.array([5.0, 0.1, 0.6, 1.0])
    result.cached_tokens = np.array([0, 220, 120, 20], dtype=np.int32)
    result.speculative = np.array([False, True, True, False])
    result.num_answered = 4
    return result.finished({"prefill_s": 8.0, "moving_s": 0.4, "prefills": 6}, system_tokens=20)


def test_measures_by_hand():
    found = measures(result_by_hand(), search_s=0.4)
    assert found["ttft_s"] == pytest.approx((0.4 + 0.9 + 1.4) / 3, rel=1e-6)
    assert found["ttft_median_s"] == pytest.approx(0.9)
    assert found["prefill_s"] == pytest.approx(1.7 / 3, rel=1e-6)
    assert found["computed_s"] == 2.0  # of the whole run, with the two that were in vain
    assert found["prefills"] == 1.5
    assert found["document_hits"] == 0.5
    assert found["token_hits"] == 0.5
    # Hidden whole (0.1 s), begun 0.1 s before the search's end, not begun before it.
    assert found["search_alone_s"] == pytest.approx(0.4 - (0.1 + 0.1 + 0.0) / 3, rel=1e-6)
    assert found["speculative"] == pytest.approx(2 / 3, rel=1e-6)
    assert found["throughput_per_s"] == pytest.approx(4 / 9, rel=1e-6)


def test_records_agree_with_the_simulator(smoke, small):
    _, folder = smoke
    frame = pd.DataFrame(records(folder, "ragcache.fig17").records)
    assert frame.groupby(["host_gib", "method"]).size().eq(2).all()
    assert set(frame["method"]) == set(fig17.POLICIES)
    for share in ("document_hits", "token_hits", "speculative"):
        assert frame[share].between(0, 1).all()
    assert (frame["prefill_s"] <= frame["ttft_p99_s"]).all()
    assert (frame["computed_s"] > 0).all()
    on, off = (
        pd.DataFrame(records(folder, "ragcache.fig19").records).query("method == @m") for m in (fig19.ON, fig19.OFF)
    )
    assert (off["prefills"] == 1).all()
    assert (off["speculative"] == 0).all()
    assert on["prefills"].max() > 1
    assert off["search_alone_s"].to_numpy() == pytest.approx(off["search_s"].to_numpy())
    order = pd.DataFrame(records(folder, "ragcache.fig18").records)
    assert set(order["method"]) == {fig18.ON, fig18.OFF}


def test_a_timed_controller_decides_as_an_untimed_one(small):
    requests = small.requests(small.rate(1.5), 40, 0)
    plain = small.simulator(RAGCACHE)
    timed = tab04.TimedSimulator(**vars(plain))
    assert timed.run(requests).first_token_s.tolist() == plain.run(requests).first_token_s.tolist()
    (controller,) = timed.made
    spent = np.array([controller.spent[n] for n in range(40)])
    assert set(controller.spent) == set(range(40))
    assert (spent.sum(axis=1) > 0).all()
    found = tab04.numbers(spent)
    assert found["processor_ms"] == pytest.approx(1000 * spent[:, :, 1].sum() / 40, rel=1e-6)
    assert found["processor_median_ms"] <= found["processor_p99_ms"] <= found["processor_max_ms"]


# -- seeds, ratios, claims ----------------------------------------------------------------


def frame_by_hand():
    """Two systems at three rates, two seeds."""
    rows = []
    for method, values in (("no reuse", (1.0, 4.0, 16.0)), ("RAGCache", (0.5, 1.0, 2.0))):
        for rate, value in zip((1.0, 2.0, 3.0), values, strict=True):
            for seed, more in ((0, 0.9), (1, 1.1)):
                row = {"case_id": "mmlu", "server": "a server", "top_k": 2, "method": method, "seed": seed}
                rows.append(row | {"rate": rate, "load": rate, "ttft_s": value * more})
    return pd.DataFrame(rows)


def test_means_and_ratios_over_seeds():
    frame = frame_by_hand()
    points = over_seeds(frame, ["method", "rate"], ["ttft_s"])
    assert points["ttft_s"].tolist() == pytest.approx([1.0, 4.0, 16.0, 0.5, 1.0, 2.0])
    assert (points["ttft_s_low"] < points["ttft_s"]).all()
    ratio = ratio_of(frame[frame["rate"] == 2.0], "ttft_s", "no reuse", "RAGCache")
    assert (ratio.mean, ratio.low, ratio.high) == pytest.approx((4.0, 4.0, 4.0))  # paired: the seeds' spread cancels
    assert text(Interval(1.23456, 1.0, 12.345)) == "1.23 [1.00, 12.3]"
    assert percent(Interval(0.5, 0.25, 0.755)) == "50.0% [25.0%, 75.5%]"


def test_the_rate_that_a_system_keeps_up_with():
    frame = frame_by_hand()
    assert rates.limit_of(frame) == pytest.approx(5.0)
    rate, beyond = rates.sustained_rate(frame, "no reuse", 5.0)
    assert (rate, beyond) == (pytest.approx(2 + 1 / 12), False)
    assert rates.sustained_rate(frame, "RAGCache", 5.0) == (3.0, True)
    assert rates.sustained_rate(frame, "no reuse", 0.5) == (0.0, False)
    (claim,) = rates.claims(frame).values()
    assert "RAGCache keeps mean TTFT within 5.00 s up to 3.00 or more requests/s" in claim
    assert "no reuse: up to 2.08 (1/1.44), until there 2.00-4.00 times the TTFT" in claim


def test_ratios_above_one_say_that_pgdsf_is_better(smoke):
    _, folder = smoke
    results = records(folder, "ragcache.fig17")
    for record in results.records:  # PGDSF hits twice as much and computes half as long
        better = record["method"] == "PGDSF"
        record.update(document_hits=0.5 if better else 0.25, prefill_s=1.0 if better else 2.0)
    found = tab02.ratios(results)
    assert set(found["method"]) == set(fig17.POLICIES) - {"PGDSF"}
    assert found["document_hits"].eq(2.0).all()
    assert found["prefill_s"].eq(2.0).all()


def test_policies_that_forget_are_told_apart():
    assert {name for name, policy in fig17.POLICIES.items() if not policy.persistent} == {
        name for name in fig17.POLICIES if "forgetting" in name
    }
    assert fig17.POLICIES["LFU"] == kr.LFU()
    assert fig17.look("LFU, forgetting")["color"] == fig17.look("LFU")["color"]


def test_scales_say_where_they_are_from():
    for name in ("a10g", "h800"):
        for scale in scales_named(name):
            assert isinstance(scale, Scale)
            assert "published-hardware scale" in str(scale.describe()["costs"])
            assert 0 < scale.token_capacities[0] < scale.token_capacities[1]
