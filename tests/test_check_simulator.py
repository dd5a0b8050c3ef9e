"""The simulator's check against the server: a smoke run on a tiny model and the small set, its records, its picture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from experiments.ragcache.check_report import draw, tabulate
from experiments.ragcache.check_run import Check, CheckConfig
from experiments.ragcache.check_simulator import check_app
from experiments.results import Results, partial_path, read_results
from kvreuse.ragcache.cost_models import MeasuredCosts
from tests.tiny import hf_model

pytest.importorskip("faiss")
pytest.importorskip("simpy")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a tokenizer of one token a byte, and room for results."""
    place = tmp_path_factory.mktemp("check")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {letter: i for i, letter in enumerate(alphabet, 3)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    hf_model("llama", vocab_size=len(vocabulary), max_position_embeddings=1024).save_pretrained(place / "toy")
    tokenizer.save_pretrained(place / "toy")
    return place


def arguments(folder: Path) -> list[str]:
    places = ["--out", str(folder / "results"), "--figures", str(folder / "figures")]
    return ["--smoke", "--model", str(folder / "toy"), "--rates", "20", *places]


def run(arguments: list[str], status: int = 0) -> None:
    with pytest.raises(SystemExit) as ended:
        check_app()(arguments)
    assert (ended.value.code or 0) == status


@pytest.fixture(scope="module")
def results(folder: Path) -> Path:
    """The records of a smoke run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVREUSE_CACHE", str(folder / "cache"))
        run(arguments(folder))
    (path,) = (folder / "results").iterdir()
    return path


def test_both_runs_of_every_cell_are_recorded(results: Path, folder: Path) -> None:
    found = read_results(results)
    assert found.complete
    assert [(r["case_id"], r["method"]) for r in found.records] == [
        (f"20 {policy}", run) for policy in ("PGDSF", "LRU") for run in ("server", "simulator")
    ]
    for real, simulated in zip(found.records[::2], found.records[1::2], strict=True):
        assert {len(v) for v in (*real["values"].values(), *simulated["values"].values())} == {6}
        assert all(MeasuredCosts.from_record(p).prefill_s(16, 16) > 0 for p in simulated["profiles"])
        assert simulated["values"]["arrived_s"] == pytest.approx(real["values"]["arrived_s"], abs=0.5)
    first, second = (found.records[i]["profiles"] for i in (1, 3))
    assert len(first) == len(second) == 3  # before, half-way, behind
    assert first[-1] == second[0]  # one between two cells
    assert (folder / "figures" / "ragcache-check_simulator-toy.png").stat().st_size > 10_000
    assert "Largest error of a TTFT" in (folder / "figures" / "ragcache-check_simulator-toy.md").read_text()


def test_a_run_that_was_stopped_goes_on_behind_its_last_cell(
    results: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVREUSE_CACHE", str(folder / "cache"))
    lines = results.read_text().splitlines(keepends=True)
    partial_path(results).write_text("".join(lines[:4]))  # a cell, and half of the next
    results.unlink()
    run([*arguments(folder), "--plot-only"])
    assert "Unfinished" in capsys.readouterr().out
    run(arguments(folder))
    again = results.read_text().splitlines(keepends=True)
    assert again[1:3] == lines[1:3]
    assert again[3] != lines[3]
    assert read_results(results).complete
    run(arguments(folder))
    assert "--force runs it again" in capsys.readouterr().err


def test_the_table_says_what_the_records_say(results: Path) -> None:
    found = read_results(results)
    real = found.records[0]["values"]
    later = [2 * f - a for f, a in zip(real["first_token_s"], real["arrived_s"], strict=True)]
    half = {**real, "first_token_s": later, "hit_documents": [0] * 6}
    records = [found.records[0], {**found.records[1], "values": half}]
    frame, notes = tabulate(Results(found.header, records, True))
    (row,) = frame.to_dict("records")
    assert row["mean error"] == row["p95 error"] == "+100.0%"
    assert row["simulated, %"] == 0
    assert "error of a TTFT: 100.0%" in notes
    assert len(draw(found).axes) == 2
    with pytest.raises(ValueError, match="no cell"):
        tabulate(Results(found.header, records[:1], False))


def test_the_simulator_hits_what_the_server_hits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow arrivals, so that requests do not meet: then hits do not depend on any time."""
    monkeypatch.setenv("KVREUSE_CACHE", str(folder / "cache"))
    config = CheckConfig(str(folder / "toy"), requests=12, questions=4, rates=(8.0,), gpu_tokens=400, small=True)
    check = Check(replace(config, host_tokens=200, repeats=1, max_new_tokens=2))
    costs = check.profile()
    real, profiles = check.serve(8.0, "LRU", costs)
    assert [p.prefill.cached_tokens for p in profiles] == 3 * [costs.prefill.cached_tokens]  # four segments
    assert sorted(real["arrived_s"]) == real["arrived_s"]
    simulated = check.simulate(8.0, "LRU", [costs, *profiles, costs], real["iterations"])
    assert simulated["hit_documents"] == real["hit_documents"]
    assert simulated["cached_tokens"] == real["cached_tokens"]
    assert sum(real["hit_documents"]) > 0


def test_bad_input(folder: Path) -> None:
    options = {"--policies=FIFO": "policies=('FIFO',): choose some of PGDSF, LRU, LFU", "--rates=0": "rates=(0.0,)"}
    for option, message in options.items():
        with pytest.raises(SystemExit) as ended:
            check_app()([*arguments(folder), option])
        assert message in str(ended.value.code)
