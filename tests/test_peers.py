"""benchmarks.peers with workers that have no model: what is asked, timed, compared, and told of those that fail."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.peer_env import PEERS, ROOT, Peer, PeerUnavailable, python_of
from benchmarks.peer_process import PeerProcess
from benchmarks.peer_prompts import Workload, workload
from benchmarks.peer_workers.protocol import Prompt, pack, unpack
from benchmarks.peers import NEW_ORDER, REFERENCE, SAME_PREFIX, Measured, measure, table

PROMPTS = [[Prompt([0], [[r], [9]], [q]) for q in (1, 2)] for r in (1, 2, 3)]
WORK = Workload(Prompt([0], [[9], [1]], [3]), PROMPTS, "made up")


@pytest.fixture
def fake(tmp_path: Path) -> Callable[..., Callable[[], PeerProcess]]:
    """What starts a fake worker."""

    def fake(name: str, row: str = "sure", behaviour: str = "", methods: tuple[str, ...] = ("one",)):
        command = [sys.executable, str(ROOT / "tests" / "fake_peer.py"), row, behaviour, *methods]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        return lambda: PeerProcess(name, command, env, tmp_path / f"{name}.txt")

    return fake


def run(starts: dict[str, Callable[[], PeerProcess]]) -> Measured:
    return measure(starts, "no model", WORK, lambda ids: " ".join(map(str, ids)))


def test_every_method_gets_every_prompt_and_is_compared_on_it(fake):
    measured = run(
        {
            "transformers": fake("transformers", behaviour="sleeps", methods=(REFERENCE[1], "other")),
            "b": fake("b", row="unsure"),
            "c": fake("c", behaviour="text"),
        }
    )
    assert measured.unavailable == {}
    assert set(measured.versions["b"]) == {"torch"}
    asked = {(r["peer"], r["method"], r["round"], r["question"]) for r in measured.records}
    methods = [("transformers", REFERENCE[1]), ("transformers", "other"), ("b", "one"), ("c", "one")]
    assert asked == {(*m, r, q) for m in methods for r in range(3) for q in range(2)}
    assert len(measured.records) == len(asked)
    first_of_round = [next(r for r in measured.records if r["round"] == n) for n in range(3)]
    assert len({(r["peer"], r["method"]) for r in first_of_round}) == 3  # the order rotates
    kl = 0.7 * math.log(0.7 / 0.4) + 0.3 * math.log(0.1 / 0.2)
    for r in measured.records:
        assert r["situation"] == (SAME_PREFIX if r["question"] else NEW_ORDER)
        assert r["waited_s"] >= r["inside_s"] >= (0.05 if r["peer"] == "transformers" else 0)
        assert r["answer"] == str(r["round"] + 1)
        expected = {"transformers": 0.0, "b": kl, "c": None}[r["peer"]]
        assert r["kl"] == (expected if expected is None else pytest.approx(expected, abs=1e-6))
    new, same = (part.splitlines()[2:6] for part in table(measured).split(" it reports, s |")[1:])
    assert [line.split(" | ")[:2] for line in new] == [[f"| {peer}", method] for peer, method in methods]
    for lines in (new, same):
        assert "| 1.000 | 1.000 | 0.0000 | 3 of 3 | 0.12 |" in lines[0]
        assert f"| {kl:.4f} | 3 of 3 |" in lines[2]
        assert "| n/a | 3 of 3 |" in lines[3]


@pytest.mark.parametrize(
    ("behaviour", "error", "answered"),
    [("raises", "first: ValueError: out of pages", 2), ("dies", "ended (code 3): Segmentation fault", 0)],
)
def test_a_peer_that_fails_is_named_and_the_others_go_on(fake, behaviour, error, answered):
    measured = run(
        {
            "transformers": fake("transformers", methods=(REFERENCE[1],)),
            "bad": fake("bad", behaviour=behaviour, methods=("one", "two")),
        }
    )
    assert error in measured.unavailable["bad"]
    assert sum(r["peer"] == "transformers" for r in measured.records) == 6
    assert sum(r["peer"] == "bad" for r in measured.records) == answered  # whole turns only
    assert f"bad failed: {measured.unavailable['bad']}" in table(measured)


def test_a_peer_that_cannot_start_is_named(fake, tmp_path):
    def missing() -> PeerProcess:
        raise PeerUnavailable("not installed: no matching distribution")

    broken = [sys.executable, "-c", "raise SystemExit('no such model')"]
    measured = run(
        {
            "transformers": fake("transformers", methods=(REFERENCE[1],)),
            "missing": missing,
            "broken": lambda: PeerProcess("broken", broken, os.environ, tmp_path / "broken.txt"),
        }
    )
    assert measured.unavailable["missing"] == "not installed: no matching distribution"
    assert "no such model" in measured.unavailable["broken"]
    assert len(measured.records) == 6


def test_a_peer_that_hangs_is_stopped(fake):
    process = fake("slow", behaviour="hangs")()
    process.ask("load", model="", context=0)
    with pytest.raises(PeerUnavailable, match="first: the worker ended"):
        process.ask("first", timeout_s=0.2, method="one", prompt=WORK.first.message())
    process.close()


def test_a_peer_that_does_not_rest_while_others_work_is_found_out(fake):
    spins, rests = fake("spins", behaviour="spins")(), fake("rests")()
    working = fake("working", behaviour="sleeps")()
    for process in (spins, rests, working):
        process.ask("load", model="", context=0)
    for _ in range(6):
        working.ask("first", method="one", prompt=WORK.first.message())
    for process in (spins, rests):
        process.ask("first", method="one", prompt=WORK.first.message())
    assert spins.idle_cpu_s > 0.03 > rests.idle_cpu_s
    for process in (spins, rests, working):
        process.close()


def test_an_environment_that_pip_cannot_make_says_so_and_a_whole_one_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("KVREUSE_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    peer = Peer("nobody", ("kvreuse-no-such-package==1.0",))
    with pytest.raises(PeerUnavailable, match="not installed: ERROR"):
        python_of(peer)
    assert not (peer.home / "installed.txt").exists()
    (peer.home / "installed.txt").write_text("kvreuse-no-such-package==1.0")
    assert python_of(peer) == peer.home / "venv" / "bin" / "python"


def test_peers_have_a_worker_each_and_pinned_versions():
    for peer in PEERS:
        assert (ROOT / "benchmarks" / "peer_workers" / f"{peer.name}.py").is_file()
        assert all("==" in requirement for requirement in peer.requirements + peer.alone)


def test_log_probabilities_travel_as_float32():
    assert list(unpack(pack([0.5, -1e30, -0.25]))) == pytest.approx([0.5, -1e30, -0.25])


def test_orders_begin_differently_and_text_gives_the_same_tokens(demo_model):
    work = workload(demo_model, 4, 128, rounds=3, questions=2, data_dir="small")
    prompts = [work.first] + [prompt for prompts in work.rounds for prompt in prompts]
    assert len(prompts) == 7
    assert len({tuple(p.chunks[0]) for p in prompts}) == 4
    for prompt in prompts:
        assert len(prompt.prefix) % 128 == 0
        assert {len(chunk) for chunk in prompt.chunks} == {128}
        assert sorted(prompt.chunks) == sorted(work.first.chunks)
        assert demo_model.tokenize(demo_model.tokenizer.decode(prompt.ids)).tolist() == prompt.ids
    for same_order in work.rounds:
        assert len({tuple(p.question) for p in same_order}) == 2
        assert len({tuple(p.context) for p in same_order}) == 1
    assert work.longest == max(len(p.ids) for p in prompts)
    with pytest.raises(ValueError, match="rounds=4: with 4 chunks give 1 to 3"):
        workload(demo_model, 4, 128, rounds=4, questions=2, data_dir="small")
    with pytest.raises(ValueError, match="questions=40"):
        workload(demo_model, 4, 128, rounds=3, questions=40, data_dir="small")
