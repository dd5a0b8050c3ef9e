"""The shared runner, its results files, tables, pictures and command line, on a tiny random model."""

import gc
import json
import shutil

import pandas as pd
import pytest
from tiny import WORDS, word_model

import kvreuse as kr
from experiments.__main__ import COUNTED, EXPERIMENTS, SIMULATED, TIMED, main
from experiments.contexts import make_chunker, resolve_context
from experiments.datasets import TASKS, Case, Dataset, Document
from experiments.measure import gold_ids, method_names
from experiments.options import PRESETS, configurations
from experiments.results import Results, partial_path, read_results
from experiments.runner import RunConfig, run
from experiments.tables import make_table

METHODS = (
    kr.FullRecompute(),
    kr.PrefixCaching(insert=False),
    kr.FullReuse(context="bare"),
    kr.CacheBlend(context="bare", ratio=0.2),
    kr.FullReuse(context="prefix"),
    kr.CacheBlend(context="prefix", ratio=0.2),
)
PAIR = (kr.FullRecompute(), kr.FullReuse(context="bare"))
TIMED_HERE = {name: TIMED[name] for name in ("fig10", "pipelining", "controller")}  # others: test_ragcache_figures.py


def text(start, count):
    return " ".join(WORDS[(start + 7 * i) % len(WORDS)] for i in range(count))


def documents(seed, lengths=(17, 13, 19, 15)):
    return tuple(Document(f"word{i}", text(seed + i, n), gold=i < 2) for i, n in enumerate(lengths))


CASES = tuple(Case(f"case-{i}", text(i, 6), (text(3 * i, 2), "word1"), documents(10 * i)) for i in range(3))
DATASET = Dataset("toy", "made here", CASES, TASKS["musique"])


@pytest.fixture(scope="module", autouse=True)
def _quick_collections():
    """The runner collects garbage after each case: do not search all that pytest and torch hold each time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def model():
    return word_model()


def config(**settings):
    defaults = {"figure": "toy", "model": "tiny", "dataset": "toy", "methods": PAIR, "max_new_tokens": 4}
    return RunConfig(**{**defaults, **settings})


def run_here(folder, model, dataset=DATASET, force=False, methods=PAIR):
    return run(config(methods=methods), folder, lambda: model, force, dataset)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, model):
    """A complete results file."""
    return run_here(tmp_path_factory.mktemp("results"), model, methods=METHODS)


@pytest.fixture(scope="module")
def short(tmp_path_factory, model):
    """A complete results file of two methods."""
    return run_here(tmp_path_factory.mktemp("short"), model)


@pytest.fixture
def folder(tmp_path, short):
    """A folder with a copy of it, to be changed."""
    shutil.copy(short, tmp_path)
    return tmp_path


def ttfts(path):
    return {(r["case_id"], r["method"]): r["ttft_s"] for r in read_results(path).records}


def cut(path, lines, torn=""):
    """What a killed run leaves: the file under its partial name, cut behind so many lines."""
    kept = "\n".join(path.read_text().split("\n")[:lines]) + "\n" + torn
    partial_path(path).write_text(kept)
    path.unlink()


# -- records --------------------------------------------------------------------------------------------------------


def test_a_record_per_case_and_method_with_what_tables_need(finished):
    results = read_results(finished)
    assert results.complete
    assert len(results.records) == len(CASES) * len(METHODS)
    assert {r["method"] for r in results.records} == {repr(m) for m in METHODS}
    for record in results.records:
        assert record["error"] is None
        assert record["ttft_s"] == pytest.approx(sum(record["stages"].values()))
        assert record["prompt_tokens"] > record["question_tokens"] > 0
        assert record["kl"] >= 0
        assert record["nll"] > 0
        assert record["hits"] + record["misses"] <= 5
    by_method = {m: [r for r in results.records if r["method"] == repr(m)] for m in METHODS}
    assert [r["kl"] for r in by_method[METHODS[0]]] == [0.0] * 3
    assert all(r["kl"] < 1e-6 and r["misses"] == 3 and r["hits"] == 2 for r in by_method[METHODS[1]])
    assert all(r["recomputed_tokens"] == 0 and r["kl"] > 1e-6 for r in by_method[METHODS[2]])
    assert all(0 < r["recomputed_tokens"] < r["num_reused"] for r in by_method[METHODS[3]])
    assert all(r["encode_s"] == 0 for r in by_method[METHODS[0]])
    assert by_method[METHODS[2]][0]["encode_s"] == by_method[METHODS[3]][0]["encode_s"] > 0


def test_full_recompute_comes_first_and_the_others_take_turns(finished):
    orders = [[r["method"] for r in read_results(finished).records if r["case_id"] == case.case_id] for case in CASES]
    assert all(order[0] == "FullRecompute()" for order in orders)
    assert len({order[1] for order in orders}) > 1


def test_the_header_says_what_was_run(finished, model):
    header = read_results(finished).header
    assert header["config"] == repr(config(methods=METHODS))
    assert header["fingerprint"] == model.fingerprint()
    assert (header["source"], header["num_cases"], header["context"]) == ("made here", 3, "paragraphs")
    assert set(header["versions"]) == {"python", "torch", "transformers", "kvreuse"}
    assert {"date", "command", "commit", "device", "threads", "dtype", "max_new_tokens"} <= set(header)


def test_repeats_record_their_median(tmp_path, model):
    records = read_results(run(config(repeats=3), tmp_path, lambda: model, dataset=DATASET)).records
    for record in records:
        assert len(record["ttft_runs_s"]) == 3
        assert record["ttft_s"] == sorted(record["ttft_runs_s"])[1]


def test_map_methods_record_their_passes(tmp_path, model):
    methods = (kr.FullRecompute(), kr.MapReduce(map_tokens=3), kr.MapRerank())
    records = {r["method"]: r for r in read_results(run_here(tmp_path, model, methods=methods)).records}
    reduce, rerank = (records[repr(m)] for m in methods[1:])
    assert reduce["kl"] > 0
    assert (rerank["kl"], rerank["nll"], rerank["recomputed_tokens"]) == (None, None, None)
    for record in (reduce, rerank):
        assert 0 < record["stages"]["map_prefill_s"] + record["stages"]["map_decode_s"] <= record["ttft_s"]


def test_gold_answers_follow_the_prompt_as_text_would(model, monkeypatch):
    seen = []
    monkeypatch.setattr(model, "tokenize", lambda text: seen.append(text) or [5])
    prompt = kr.RagPrompt([1], [[3, 4]], [7])
    for last in ("Answer:", "assistant\n", ""):
        monkeypatch.setattr(model, "decode", lambda ids, last=last: last)
        gold_ids(model, prompt, " Paris ")
    assert seen == [" Paris", "Paris", "Paris"]


def test_names_tell_methods_apart():
    names = method_names([kr.FullRecompute(), kr.FullReuse(context="bare"), kr.CacheBlend(), kr.CacheBlend(ratio=0.3)])
    labels = list(names.values())
    assert labels[:2] == ["FullRecompute", "FullReuse (bare)"]
    assert labels[2:] == ["CacheBlend (prefix, ratio=0.15)", "CacheBlend (prefix, ratio=0.3)"]
    names = method_names([kr.CacheBlend(), kr.CacheBlend(selector=kr.RandomTokens()), kr.CacheBlend(context="bare")])
    assert list(names.values()) == [
        "CacheBlend (prefix)",
        "CacheBlend (prefix, selector=RandomTokens(seed=0))",
        "CacheBlend (bare)",
    ]


# -- resume ---------------------------------------------------------------------------------------------------------


def test_a_killed_run_is_continued_behind_its_last_whole_case(folder, model):
    path = folder / config().file_name
    before = ttfts(path)
    cut(path, 1 + len(PAIR) + 1, torn='{"case_id": "case-1", "meth')
    assert run_here(folder, model) == path
    after = ttfts(path)
    assert set(after) == set(before)
    assert not partial_path(path).exists()
    kept = {key for key in before if after[key] == before[key]}
    assert kept == {("case-0", repr(m)) for m in PAIR}


@pytest.mark.parametrize("change", [{"fingerprint": "other weights"}, {"versions": {"torch": "1.0"}}])
def test_a_partial_file_of_another_run_is_started_over(folder, model, change):
    path = folder / config().file_name
    before = ttfts(path)
    cut(path, 1 + len(PAIR))
    partial = partial_path(path)
    header, *rest = partial.read_text().split("\n")
    partial.write_text("\n".join([json.dumps(json.loads(header) | change), *rest]))
    after = ttfts(run_here(folder, model))
    assert not any(after[key] == before[key] for key in before)


def test_another_date_is_the_same_run(folder, model):
    path = folder / config().file_name
    before = ttfts(path)
    cut(path, 1 + len(PAIR))
    partial = partial_path(path)
    header, *rest = partial.read_text().split("\n")
    partial.write_text("\n".join([json.dumps(json.loads(header) | {"date": "y"}), *rest]))
    after = ttfts(run_here(folder, model))
    assert after["case-0", "FullRecompute()"] == before["case-0", "FullRecompute()"]


@pytest.mark.parametrize("left", ["", '{"config": "cut o', "not JSON\nat all\n"])
def test_a_partial_file_without_a_header_is_started_over(tmp_path, model, left):
    path = tmp_path / config().file_name
    partial_path(path).write_text(left)
    assert len(read_results(run_here(tmp_path, model)).records) == 6


def test_a_complete_run_is_kept_unless_forced(folder, model, capsys):
    path = folder / config().file_name
    before = path.read_bytes()

    def load():
        raise AssertionError("a complete run needs no model")

    assert run(config(), folder, load, dataset=DATASET) == path
    assert path.read_bytes() == before
    assert "--force" in capsys.readouterr().err
    run_here(folder, model, force=True)
    assert not set(ttfts(path).values()) & {r["ttft_s"] for r in map(json.loads, before.decode().splitlines()[1:])}


class Interrupted(kr.FullReuse):
    """Full reuse that is hit by an exception in one case."""

    error: BaseException = KeyboardInterrupt()
    question = text(2, 6)

    def prefill(self, model, prompt, store):
        if self.question in model.decode(prompt.question):
            raise self.error
        return super().prefill(model, prompt, store)


def test_ctrl_c_keeps_what_is_done(tmp_path, model):
    methods = (kr.FullRecompute(), Interrupted())
    with pytest.raises(KeyboardInterrupt):
        run_here(tmp_path, model, methods=methods)
    path = tmp_path / config(methods=methods).file_name
    left = read_results(partial_path(path))
    assert not path.exists()
    assert not left.complete
    assert make_table(left).num_cases == 2


def test_a_failed_request_is_recorded_and_left_out(tmp_path, model, monkeypatch, capsys):
    monkeypatch.setattr(Interrupted, "error", RuntimeError("out of memory"))
    results = read_results(run_here(tmp_path, model, methods=(kr.FullRecompute(), Interrupted())))
    failed = [r for r in results.records if r["error"]]
    assert [(r["case_id"], r["error"]) for r in failed] == [("case-2", "RuntimeError: out of memory")]
    table = make_table(results)
    assert (table.num_cases, table.failed) == (2, 1)
    assert "1 failed" in table.markdown()
    assert "1 cases failed" in capsys.readouterr().err


def test_a_failure_in_the_first_case_ends_the_run(tmp_path, model, monkeypatch):
    monkeypatch.setattr(Interrupted, "error", RuntimeError("wrong device"))
    monkeypatch.setattr(Interrupted, "question", text(0, 6))
    with pytest.raises(RuntimeError, match="wrong device"):
        run_here(tmp_path, model, methods=(kr.FullRecompute(), Interrupted()))


def test_a_resumed_run_may_begin_with_a_failing_case(tmp_path, model, monkeypatch):
    monkeypatch.setattr(Interrupted, "error", RuntimeError("out of memory"))
    monkeypatch.setattr(Interrupted, "question", text(1, 6))
    methods = (kr.FullRecompute(), Interrupted())
    path = run_here(tmp_path, model, methods=methods)
    cut(path, 1 + len(methods))  # killed behind case-0
    results = read_results(run_here(tmp_path, model, methods=methods))
    assert results.complete
    assert {r["case_id"] for r in results.records if r["error"]} == {"case-1"}


def test_cases_that_do_not_fit_are_skipped_and_counted(tmp_path, model, capsys):
    long = Case("long", "word5", ("word6",), documents(0, (17, 5000)))
    results = read_results(run_here(tmp_path, model, Dataset("toy", "made here", (*CASES, long), TASKS["musique"])))
    assert "takes 4096" in next(r["skipped"] for r in results.records if r["case_id"] == "long")
    table = make_table(results)
    assert (table.num_cases, table.skipped) == (3, 1)
    assert "3 of 4 cases (1 too long)" in table.markdown()
    assert "1 of 4 cases are too long for tiny" in capsys.readouterr().err


# -- tables ---------------------------------------------------------------------------------------------------------


def hand_made():
    """Two cases, four methods, numbers that can be worked out by hand."""
    methods = [
        ("FullRecompute()", "FullRecompute", None),
        ("FullReuse(context='bare')", "FullReuse (bare)", "bare"),
        ("FullReuse(context='prefix')", "FullReuse (prefix)", "prefix"),
        ("CacheBlend(context='prefix')", "CacheBlend (prefix)", "prefix"),
    ]
    header = {
        **{"config": "by hand", "figure": "fig12", "dataset": "musique", "source": "small set", "num_cases": 2},
        **{"metric": "f1", "context": "paragraphs", "max_new_tokens": 32, "model": "demo", "dtype": "float32"},
        **{"device": "cpu", "threads": 1, "date": "2026-01-01T00:00:00+00:00"},
        "methods": [{"method": m, "label": label, "context": context} for m, label, context in methods],
    }
    # answer, kl, nll, ttft_s, recomputed_tokens of case a and case b
    numbers = {
        methods[0][0]: [("the red house", 0.0, 1.0, 4.0, 90.0), ("blue", 0.0, 3.0, 6.0, 90.0)],
        methods[1][0]: [("", 0.8, 2.0, 0.5, 0.0), ("green", 0.2, 4.0, 0.5, 0.0)],
        methods[2][0]: [("red", 0.3, 2.0, 0.5, 0.0), ("green", 0.1, 2.0, 0.5, 0.0)],
        methods[3][0]: [("red house", 0.1, 1.0, 1.0, 9.0), ("blue", 0.1, 2.0, 2.0, 18.0)],
    }
    fields = ("answer", "kl", "nll", "ttft_s", "recomputed_tokens")
    records = [
        {
            **{"case_id": case_id, "method": method, "gold": gold, "prompt_tokens": 100, "question_tokens": 10},
            **{"num_chunks": 6, "encode_s": 1.0, "stages": {}, "error": None},
            **dict(zip(fields, values[place], strict=True)),
        }
        for method, values in numbers.items()
        for place, (case_id, gold) in reversed(list(enumerate([("a", ["Red House"]), ("b", ["blue", "navy"])])))
    ]
    return Results(header, records, complete=True)


def test_numbers_of_a_hand_made_file():
    table = make_table(hand_made())
    full, bare, prefix, blend = (row for _, row in table.frame.iterrows())
    assert (full["score"], bare["score"], blend["score"]) == (1.0, 0.0, 1.0)
    assert prefix["score"] == pytest.approx(1 / 3)  # "red" of "red house": 2/3, then 0
    assert prefix["score_difference"] == pytest.approx(-2 / 3)
    assert (bare["kl"], bare["kl_low"], bare["kl_high"]) == pytest.approx((0.5, 0.2, 0.8))
    assert blend["nll"] == 1.5
    assert blend["gap_same"] == pytest.approx(1 - 0.2 / 0.4)
    assert blend["gap_bare"] == pytest.approx(1 - 0.2 / 1.0)
    assert (bare["gap_same"], prefix["gap_bare"]) == pytest.approx((0.0, 0.6))
    assert pd.isna(full["gap_same"])
    assert full["gap_bare"] == 1.0
    assert (blend["ttft_s"], blend["ttft_q25"], blend["ttft_q75"]) == (1.5, 1.25, 1.75)
    assert (blend["speedup"], bare["speedup"]) == (3.5, 10.0)  # medians of 4/1 and 6/2, of 4/0.5 and 6/0.5
    assert (full["share"], blend["share"]) == pytest.approx((1.0, 0.15))


def test_a_case_that_lacks_a_method_is_left_out():
    results = hand_made()
    table = make_table(Results(results.header, results.records[:-1], complete=False))
    assert table.num_cases == 1
    assert make_table(Results(results.header, results.records[:2], complete=False)) is None


def test_markdown_says_metric_source_and_what_is_missing():
    lines = make_table(hand_made()).markdown().splitlines()
    assert lines[0] == "### fig12: musique, demo"
    assert "2 of 2 cases from small set" in lines[2]
    heading = next(line for line in lines if line.startswith("| method"))
    assert "| F1 " in heading
    assert "gap to FullReuse, same encoder" in heading
    full = next(line for line in lines if line.startswith("| FullRecompute"))
    assert full.split("|")[6].strip() == "-"
    assert len({len(line) for line in lines if line.startswith("|")}) == 1  # columns line up


# -- context --------------------------------------------------------------------------------------------------------


def test_the_context_follows_task_and_gold_marks(model):
    unmarked = Dataset("toy", "x", (Case("0", "q", ("a",), (Document("", text(0, 9)),)),), TASKS["musique"])
    assert resolve_context(DATASET, "auto") == "paragraphs"
    assert resolve_context(unmarked, "auto") == "retrieve"
    shots = Dataset("toy", "x", CASES, TASKS["samsum"])
    assert resolve_context(shots, "auto") == "few-shot groups"
    assert make_chunker(shots, model, "few-shot groups", 2, 512, 0)(CASES[0]) == [
        CASES[0].chunk_text(d) for d in CASES[0].documents[:2]
    ]
    with pytest.raises(ValueError, match="context='all': choose one of auto, paragraphs, retrieve"):
        resolve_context(DATASET, "all")


def test_texts_to_summarise_are_cut_into_pieces(model):
    pytest.importorskip("langchain_text_splitters")
    news = Dataset("toy", "x", CASES, TASKS["multinews"])
    assert resolve_context(news, "retrieve") == "first pieces"
    pieces = make_chunker(news, model, "first pieces", 3, 8, 0)(CASES[0])
    assert len(pieces) == 3
    assert all(len(model.tokenize(piece)) <= 8 for piece in pieces)


# -- command line ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, model):
    folder = tmp_path_factory.mktemp("models") / "toy-llama"
    model.hf.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def smoke(tmp_path_factory, model_folder):
    """One smoke run of figures 12 and 13 and of the timed ones on one small set: the arguments, and its folder."""
    folder = tmp_path_factory.mktemp("smoke")
    places = ["--out", str(folder / "results"), "--figures", str(folder / "figures")]
    arguments = ["--smoke", "--model", str(model_folder), "--dataset", "musique", "--threads", "1", *places]
    with pytest.MonkeyPatch.context() as patch:  # the other figures: tests/test_figures.py
        patch.setattr(
            "experiments.__main__.EXPERIMENTS", {name: EXPERIMENTS[name] for name in ("fig12", "fig13", "fig17")}
        )
        patch.setattr("experiments.__main__.TIMED", TIMED_HERE)
        patch.setattr("experiments.__main__.COUNTED", {})
        patch.setattr("experiments.__main__.SIMULATED", {})
        assert main(["all", *arguments]) == 0
    return arguments, folder


def test_smoke_writes_records_tables_and_pictures(smoke):
    _, folder = smoke
    names = {p.name for p in (folder / "figures").iterdir()}
    for figure in ("fig12", "fig13", "fig17"):
        assert {f"{figure}-toy-llama-musique-small-n1.{suffix}" for suffix in ("md", "csv", "png")} <= names
    for figure in TIMED_HERE:
        assert {f"{figure}-toy-llama.{suffix}" for suffix in ("md", "csv", "png")} <= names
    frame = pd.read_csv(folder / "figures" / "fig12-toy-llama-musique-small-n1.csv")
    assert len(frame) == 8
    assert frame["cases"].tolist() == [1] * 8


def test_plot_only_needs_no_model(smoke, model_folder, capsys):
    arguments, folder = smoke
    picture = folder / "figures" / "fig13-toy-llama-musique-small-n1.png"
    picture.unlink()
    hidden = model_folder.rename(model_folder.with_name("hidden"))
    try:
        assert main(["fig13", "--plot-only", "--paper", *arguments]) == 0
    finally:
        hidden.rename(model_folder)
    assert picture.stat().st_size > 10_000
    out = capsys.readouterr().out
    assert "MapRerank" in out
    assert "map decode (s)" in out
    assert "Mistral-7B" in picture.with_suffix(".md").read_text()


def test_figure_17_gives_one_answer_wherever_the_kv_lie(smoke):
    _, folder = smoke
    (path,) = (folder / "results").glob("fig17-*.jsonl")
    records = read_results(path).records
    answers, places = {}, {}
    for record in records:
        method, _, place = record["method"].partition(" on ")
        answers.setdefault((record["case_id"], method), set()).add((record["answer"], record["kl"]))
        places.setdefault(method, set()).add(place)
    assert all(len(found) == 1 for found in answers.values())
    devices = {"memory", "this disk, cold", "4 Gbps, throttled", "1 Gbps, throttled", "0.15 Gbps, throttled"}
    assert places.pop("FullRecompute()") == {""}
    assert all(found == devices for found in places.values())
    assert all(r["hits"] for r in records if not r["method"].startswith("FullRecompute"))


@pytest.mark.parametrize("figure", TIMED_HERE)
def test_timed_figures_are_drawn_without_a_model(figure, smoke, model_folder, capsys):
    arguments, folder = smoke
    picture = folder / "figures" / f"{figure}-toy-llama.png"
    picture.unlink()
    hidden = model_folder.rename(model_folder.with_name("hidden"))
    try:
        assert main([figure, "--plot-only", *arguments]) == 0
    finally:
        hidden.rename(model_folder)
    assert picture.stat().st_size > 10_000
    assert "throttle" in capsys.readouterr().out  # what was braked says so


@pytest.mark.parametrize("figure", TIMED_HERE)
def test_a_timed_figure_that_is_complete_is_kept(figure, smoke, capsys):
    arguments, folder = smoke
    (path,) = (folder / "results").glob(f"{figure}-*.jsonl")
    before = path.read_bytes()
    assert main([figure, *arguments]) == 0
    assert path.read_bytes() == before
    assert "--force" in capsys.readouterr().err
    assert main([figure, "--plot-only", "--out", str(folder / "empty")]) == 1
    assert main([figure, "--repeats", "0", "--out", str(folder / "empty")]) == 1
    assert "repeats=0" in capsys.readouterr().err


def test_pipelining_is_compared_within_rounds(smoke):
    _, folder = smoke
    frame = pd.read_csv(folder / "figures" / "pipelining-toy-llama.csv")
    assert frame["load / recompute"].tolist() == [0.3, 1.0, 3.0]
    # the bucket holds: three times the load takes at least three times as long as recompute was found to take
    assert (frame["serial TTFT, s"] > frame["load, s"]).all()
    assert frame["load, s"].is_monotonic_increasing


def test_records_are_drawn_whatever_made_them(smoke, tmp_path, capsys):
    _, folder = smoke
    (records,) = (folder / "results").glob("fig12-*.jsonl")
    moved = shutil.copy(records, tmp_path / "reference.jsonl")
    assert main(["fig12", "--records", str(moved), "--figures", str(tmp_path)]) == 0
    assert (tmp_path / "fig12-toy-llama-musique-small-n1.png").exists()


def test_plot_only_without_results_says_so(tmp_path, capsys):
    status = main(["fig12", "--plot-only", "--dataset", "musique", "--out", str(tmp_path)])
    assert status == 1
    assert "no results to draw" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fig12", "--preset", "huge"], "preset 'huge' is unknown: choose one of default, demo, paper, smoke"),
        (["fig12", "--num-chunks", "0"], "num_chunks=0: must be at least 1"),
        (["fig12", "--dataset", "hotpot"], "unknown dataset 'hotpot'"),
        (["fig99"], "there is no experiment 'fig99'"),
    ],
)
def test_wrong_arguments_end_in_one_line(arguments, message, tmp_path, capsys):
    assert main([*arguments, *(["--out", str(tmp_path)] if len(arguments) > 1 else [])]) != 0
    assert message in capsys.readouterr().err


def test_without_a_name_the_figures_are_listed(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == len(EXPERIMENTS | TIMED | COUNTED | SIMULATED) + 2  # check_simulator, all
    for name, experiment in (EXPERIMENTS | TIMED | COUNTED | SIMULATED).items():
        line = next(line for line in out.splitlines() if f"python -m experiments.{name} " in line)
        assert all(part in line for part in (experiment.shows, experiment.section, experiment.cost))
        assert all((experiment.shows, experiment.section, experiment.cost))


def test_the_command_line_comes_before_the_preset():
    fig12 = EXPERIMENTS["fig12"]
    demo = configurations(fig12, PRESETS["demo"], {})
    assert [c.dataset for c in demo] == ["musique", "2wikimqa"]
    given = configurations(fig12, PRESETS["smoke"], {"limit": 0, "dataset": "samsum", "model": "m", "data_dir": "d"})
    assert [(c.dataset, c.limit, c.model, c.small) for c in given] == [("samsum", None, "m", False)]
    assert [c.dataset for c in configurations(fig12, PRESETS["paper"], {})] == [
        *("musique", "2wikimqa", "samsum", "multinews")
    ]


def test_every_configuration_has_its_own_file():
    names = {config(**s).file_name for s in ({}, {"limit": 3}, {"seed": 1}, {"cut_words": 9}, {"methods": METHODS[:2]})}
    assert len(names) == 5
    with pytest.raises(ValueError, match="twice"):
        config(methods=(kr.FullRecompute(), kr.FullRecompute()))
