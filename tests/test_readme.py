"""The README's snippets run."""

import re
from pathlib import Path

import pytest

import kvreuse as kr

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_there_are_snippets():
    assert len(SNIPPETS) == 2


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippet_runs(number, demo_model, monkeypatch, capsys):
    monkeypatch.setattr(kr, "load_model", lambda name: demo_model)
    names = {}
    exec(compile(SNIPPETS[number], "README.md", "exec"), names)
    if number == 0:
        ttft, answer = capsys.readouterr().out.splitlines()[:2]
        assert float(ttft.split()[0]) > 0
        assert answer.strip()
    else:
        prompt = kr.RagPrompt([1, 2], [[3, 4, 5, 6], [7, 8, 9, 10]], [11])
        store = kr.KVStore()
        names["method"].encode(demo_model, prompt, store)
        assert names["method"].prefill(demo_model, prompt, store).trace.hits == 3
