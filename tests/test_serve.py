"""The terminal front end on a tiny model and a folder of texts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import kvreuse as kr
from kvreuse.ragcache import serve
from tests.test_server import Letters
from tests.tiny import tiny_model

pytest.importorskip("faiss")
pytest.importorskip("langchain_text_splitters")


class HashedWords:
    """Embeds a text as the sum of its words' random vectors: shared words are near."""

    def __init__(self, name: str) -> None:
        self.name = name

    def encode(self, texts: Sequence[str], progress: bool = False) -> torch.Tensor:
        return torch.stack([sum((self._word(w) for w in t.lower().split()), torch.zeros(16)) for t in texts])

    @staticmethod
    def _word(word: str) -> torch.Tensor:
        seed = int(hashlib.sha256(word.encode()).hexdigest()[:8], 16)
        return torch.randn(16, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    (tmp_path / "lamp.txt").write_text("the lamp was lit by oda")
    (tmp_path / "deep" / "boat.md").write_text("boats are built in vessel\n\n" + "long words here " * 12)
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "image.png").write_bytes(b"\x89")
    return tmp_path


def test_answers_and_says_what_was_reused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = kr.ReuseModel(tiny_model(max_position_embeddings=1024).hf, Letters(), name="tiny")
    monkeypatch.setattr(serve.kr, "load_model", lambda *_, **__: model)
    monkeypatch.setattr(serve, "Embedder", HashedWords)
    profile = folder / "cost.json"
    monkeypatch.setattr(serve, "_measured", lambda model: kr.CostProfiler.measure(model, (0, 16), (1, 16), repeats=1))
    question = "who lit the lamp oda"
    arguments = ["--corpus", str(folder), "--chunk-tokens", "100", "--max-new-tokens", "3", "--profile", str(profile)]
    serve.main([*arguments, "--ask", question, question, "x" * 3000])
    out = capsys.readouterr().out
    assert profile.exists()
    assert "lamp.txt" in out
    assert "boat.md #1" in out
    reused = re.findall(r"(\d+) of (\d+) context tokens reused", out)
    assert reused[0][0] == "0"
    assert reused[1][0] == reused[1][1] != "0"
    assert out.count("computed  ") == out.count("reused    ") == 2
    assert "retrieve fewer or shorter chunks" in out


def test_typed_questions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["one?", "two?", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    assert list(serve._typed()) == ["one?", "two?"]


def test_a_folder_without_texts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model: Any = None
    with pytest.raises(FileNotFoundError, match=r"no \.txt or \.md file"):
        serve.read_folder(tmp_path, model, 100)
    with pytest.raises(SystemExit):
        serve.main(["--corpus", str(tmp_path / "nowhere")])
    assert "no such folder" in capsys.readouterr().err
