"""RAGCache's counted and timed figures, the reuse gap, CacheBlend's figure 14: on the small sets and a tiny model."""

import numpy as np
import pandas as pd
import pytest
from tiny import VOCAB, rag_prompt, word_model

import kvreuse as kr
from experiments.__main__ import COUNTED, TIMED, listing, main
from experiments.environment import command_line
from experiments.fig14 import BLEND, FULL, PREFIX, fifo_waits, keeps_up, queue_frame
from experiments.ragcache import skew
from experiments.ragcache.fig02 import NEW_TOKENS, decode_seconds, lengths_of, quartiles
from experiments.ragcache.frame import chosen_sets, limit_of
from experiments.results import read_results

pytest.importorskip("faiss")
FIGURES = (*COUNTED, "ragcache.fig02", "ragcache.fig04", "fig14")


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """One smoke run of all of them: the arguments, and its folder."""
    folder = tmp_path_factory.mktemp("smoke")
    model = word_model()
    model.hf.save_pretrained(folder / "toy-llama")
    model.tokenizer.save_pretrained(folder / "toy-llama")
    places = ["--out", str(folder / "results"), "--figures", str(folder / "figures")]
    arguments = ["--smoke", "--model", str(folder / "toy-llama"), "--threads", "1", *places]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVREUSE_CACHE", str(folder / "cache"))
        for figure in FIGURES:
            assert main([figure, *arguments]) == 0
    return arguments, folder


def records(smoke, figure):
    (path,) = (smoke[1] / "results").glob(f"{figure.replace('.', '-')}-*.jsonl")
    return read_results(path)


def test_every_figure_writes_records_a_table_and_a_picture(smoke):
    _, folder = smoke
    for figure in FIGURES:
        stem = f"{figure.replace('.', '-')}-toy-llama"
        for suffix in ("md", "csv", "png"):
            assert (folder / "figures" / f"{stem}.{suffix}").stat().st_size > (10_000 if suffix == "png" else 100)
        results = records(smoke, figure)
        assert results.complete
        assert results.header["figure"] == figure
        assert all({"case_id", "method"} <= set(r) for r in results.records)


def test_they_are_drawn_from_records_alone(smoke, capsys):
    arguments, folder = smoke
    hidden = (folder / "toy-llama").rename(folder / "hidden")
    try:
        for figure in FIGURES:
            picture = folder / "figures" / f"{figure.replace('.', '-')}-toy-llama.png"
            picture.unlink()
            assert main([figure, "--plot-only", *arguments]) == 0
            assert picture.is_file()
        (path,) = (folder / "results").glob("ragcache-fig05-*.jsonl")
        assert main(["ragcache.fig05", "--records", str(path), *arguments]) == 0
    finally:
        hidden.rename(folder / "toy-llama")
    assert "| 2WikiMultihopQA |" in capsys.readouterr().out


def test_a_complete_run_is_kept_unless_forced(smoke, capsys):
    arguments, folder = smoke
    (path,) = (folder / "results").glob("ragcache-fig05-*.jsonl")
    before = path.stat().st_mtime_ns
    assert main(["ragcache.fig05", *arguments]) == 0
    assert path.stat().st_mtime_ns == before
    assert "--force" in capsys.readouterr().err
    assert main(["ragcache.fig05", "--force", *arguments]) == 0
    assert path.stat().st_mtime_ns > before


def test_they_are_listed_with_section_and_cost():
    lines = {line.split("  ")[1]: line for line in listing().splitlines()}
    for figure in FIGURES:
        line = lines[f"python -m experiments.{figure}"]
        assert "RAGCache 3" in line or "CacheBlend" in line
        assert (COUNTED | TIMED)[figure].cost in line
    assert "50 minutes, not in `all`" in lines["python -m experiments.ragcache.check_simulator"]


def test_what_takes_long_runs_by_name_only(monkeypatch, capsys):
    ran = []

    def app(experiment):
        return lambda rest, prog_name, obj: ran.append((experiment.name, obj))

    for maker in ("app_for", "timed_app", "counted_app", "simulated_app"):
        monkeypatch.setattr(f"experiments.__main__.{maker}", app)
    assert main(["all"]) == 0
    assert "ragcache.check_simulator" not in [name for name, _ in ran]
    assert {"fig14", "ragcache.fig05"} <= {name for name, _ in ran}
    assert {obj for _, obj in ran} == {"all"}
    assert main(["ragcache.check_simulator", "--help"]) == 0
    assert "simulator's TTFT" in capsys.readouterr().out


def test_records_hold_counts_and_no_texts(smoke):
    labels = {"case_id", "method", "kind", "panel"}
    counts = {"count", "mean", "corpus", "requests", "share", "seed", "distinct_tokens", "input_tokens"}
    counts |= {"document_tokens", "prefix_tokens", "other_tokens", "computed_tokens"}
    for figure in COUNTED:
        for record in records(smoke, figure).records:
            assert all(isinstance(record[name], str) and len(record[name]) < 40 for name in labels & set(record))
            of_counts = record.pop("documents_by_accesses", {})  # accesses, as JSON has keys, and documents
            numbers = [*map(int, of_counts), *of_counts.values(), *record.pop("percentiles", [])]
            numbers += [record[name] for name in counts & set(record)]
            assert all(n is None or type(n) in (int, float) for n in numbers)
            assert set(record) <= labels | counts


def test_wrong_settings_end_in_one_line(smoke, capsys):
    arguments, _ = smoke
    assert main(["ragcache.fig05", "--limit", "-1", *arguments[1:]]) == 1
    assert "limit=-1: must be at least 1" in capsys.readouterr().err
    for option in ("limit", "seeds"):
        assert main(["ragcache.fig05", f"--{option}", "0", *arguments]) == 1
        assert f"{option}=0: must be at least 1" in capsys.readouterr().err
    for named, wrong in (("musique,nqq", "nqq"), ("typo", "typo"), ("samsum", "samsum"), ("", "")):
        assert main(["ragcache.fig05", "--dataset", named, *arguments]) == 1
        error = capsys.readouterr().err
        assert f"ragcache.fig05 has no question set '{wrong}': choose some of 2wiki,musique" in error


def test_all_passes_over_the_sets_of_other_figures():
    fig05 = COUNTED["ragcache.fig05"]
    assert chosen_sets(fig05, None, "small") == ("2wiki",)
    assert chosen_sets(fig05, "musique", "small") == ("musique",)
    assert chosen_sets(fig05, "musique,samsum", "small", of_all=True) == ("musique",)
    assert chosen_sets(fig05, "samsum,mmlu", "small", of_all=True) == ("2wiki", "musique")
    assert [limit_of(n, of_all=True) for n in (None, 0, 3)] == [None, None, 3]
    assert limit_of(0, of_all=False) == 0
    with pytest.raises(ValueError, match="no question set 'nqq'"):
        chosen_sets(fig05, "musique,nqq", "small", of_all=True)


def test_commands_of_packages_are_named_as_typed(monkeypatch):
    for script, expected in (
        ("/x/experiments/ragcache/fig05.py", "python -m experiments.ragcache.fig05 --smoke"),
        ("/x/experiments/fig14.py", "python -m experiments.fig14 --smoke"),
        ("/x/experiments/__main__.py", "python -m experiments --smoke"),
        ("/x/bin/pytest", "pytest --smoke"),
    ):
        monkeypatch.setattr("sys.argv", [script, "--smoke"])
        assert command_line() == expected


# -- retrieval skew -------------------------------------------------------------------------------------------------


def test_shares_of_the_most_used():
    record = skew.access_record("toy", "top 1", ["a"] * 6 + ["b"] * 3 + ["c"], corpus=10, requests=10)
    assert record["documents_by_accesses"] == {"6": 1, "3": 1, "1": 1}
    counts = skew.access_counts(record)
    assert counts.tolist() == [6, 3, 1] + [0] * 7
    assert skew.top_share(counts, 0.1) == pytest.approx(0.6)
    assert skew.top_share(counts, 0.15) == pytest.approx(0.6 + 0.5 * 0.3)  # half a document
    assert skew.top_share(counts, 1.0) == 1
    assert skew.needed_share(counts, 0.6) == pytest.approx(0.1)
    assert skew.needed_share(counts, 0.9) == pytest.approx(0.2)


def test_chance_alone_looks_skewed_where_requests_are_few():
    few = skew.uniform_top_shares(np.array([1] * 200 + [0] * 800), seeds=5)
    many = skew.uniform_top_shares(np.full(1000, 500), seeds=5)
    assert len(few) == 5
    assert min(few) > 0.15
    assert max(many) < 0.04


def test_skew_counts_every_retrieval(smoke):
    for record in records(smoke, "ragcache.fig06").records:
        wanted = int(record["method"].split()[1]) if record["method"].startswith("top") else 1
        assert skew.access_counts(record).sum() == wanted * record["requests"] == wanted * 24
        assert record["corpus"] == 110


# -- the reuse gap --------------------------------------------------------------------------------------------------


def test_the_gap_is_between_a_prefix_and_any_place(smoke):
    frame = pd.DataFrame(records(smoke, "reuse_gap").records)
    assert set(frame["case_id"]) == {"2wiki"}
    assert frame.groupby(["case_id", "kind", "share"], dropna=False)["seed"].nunique().eq(2).all()
    found = (frame["prefix_tokens"] + frame["other_tokens"]) / frame["document_tokens"]
    mean = found.groupby([frame["kind"], frame["share"].fillna(9)]).mean()
    assert mean["any place", 9] > mean["prefix", 9] + 0.2
    assert mean["any place", 0.01] <= mean["any place", 1.0] == pytest.approx(mean["any place", 9])
    assert (frame[frame["kind"] == "prefix"]["other_tokens"] == 0).all()


# -- timed ----------------------------------------------------------------------------------------------------------


def test_lengths_and_quartiles():
    assert lengths_of(3072) == [96, 192, 384, 768, 1536, 3072]
    assert lengths_of(4) == [1, 2, 4]
    assert quartiles([2.0]) == (2.0, 2.0, 2.0)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)


def test_figure_2_decodes_all_its_steps_past_an_end_token():
    model = word_model()
    result = kr.FullRecompute().prefill(model, rag_prompt(), kr.KVStore())
    model.hf.generation_config.eos_token_id = list(range(VOCAB))
    assert model.generate(result, NEW_TOKENS + 1).token_ids == []
    fed = []
    hook = model.hf.register_forward_pre_hook(
        lambda _, given, named: fed.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    assert decode_seconds(model, result) > 0
    hook.remove()
    assert fed == [1] * NEW_TOKENS


def test_figure_4_times_every_kind_at_every_length(smoke):
    frame = pd.DataFrame(records(smoke, "ragcache.fig04").records)
    assert frame.groupby("prefix_tokens")["kind"].nunique().eq(4).all()
    assert (frame["ttft_s"] > 0).all()


# -- CacheBlend, figure 14 ------------------------------------------------------------------------------------------


def test_a_rate_beyond_the_simulated_ones_is_a_bound():
    def part(*ttft):
        return pd.DataFrame({"rate": [1.0, 2.0, 4.0], "ttft": ttft, "full_s": 1.0})

    between, never, always = keeps_up(part(1.0, 1.5, 2.5)), keeps_up(part(1.0, 1.2, 1.9)), keeps_up(part(3.0, 4.0, 5.0))
    assert (str(between), str(never), str(always)) == ("3", ">= 4", "< 1")
    assert between.over(between) == "1"
    assert (never.over(between), always.over(between)) == (">= 1.33", "< 0.333")
    assert (between.over(never), between.over(always)) == ("<= 0.75", "> 3")
    assert (never.over(always), always.over(never)) == ("> 4", "< 0.25")
    assert (never.over(never), always.over(always)) == ("-", "-")


@pytest.mark.parametrize("seed", range(5))
def test_the_queue_is_the_one_simulated_step_by_step(seed):
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1.0, 200))
    services = rng.exponential(0.9, 200)
    free_at, waited = 0.0, []
    for arrival, service in zip(arrivals, services, strict=True):
        start = max(arrival, free_at)
        waited.append(start - arrival)
        free_at = start + service
    assert fifo_waits(arrivals, services) == pytest.approx(waited, abs=1e-9)


def test_a_queue_by_hand():
    assert fifo_waits(np.array([1.0, 2.0, 10.0]), np.array([3.0, 3.0, 1.0])).tolist() == [0.0, 2.0, 0.0]
    assert fifo_waits(np.array([5.0]), np.array([1.0])).tolist() == [0.0]


def test_figure_14_measures_all_mixes_and_simulates_all_rates(smoke):
    results = records(smoke, "fig14")
    measured = [r for r in results.records if "after_s" in r]
    assert {(r["kind"], r["hits"]) for r in measured} >= {(FULL, 0), (PREFIX, 0), (PREFIX, 2), (BLEND, 0), (BLEND, 2)}
    frame = queue_frame(results)
    assert frame.groupby(["dataset", "share", "kind"]).size().eq(16).all()
    lines = frame[(frame["dataset"] == "musique") & (frame["share"] == 1.0)].set_index(["kind", "load"])
    assert lines.loc[FULL, "ttft"].iloc[0] < lines.loc[FULL, "ttft"].iloc[-1]
    assert lines.loc[BLEND, "cached_share"].iloc[0] > lines.loc[PREFIX, "cached_share"].iloc[0]
    assert (lines.loc[FULL, "cached_share"] == 0).all()
    assert (frame["ttft_low"] <= frame["ttft"]).all()
    assert (frame["ttft"] <= frame["ttft_high"]).all()
