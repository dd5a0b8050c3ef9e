"""load_model: folders, arguments, errors."""

import pytest
import torch
from tiny import hf_model, save_model

import kvreuse as kr
from kvreuse import loading


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved tiny model with a word tokenizer."""
    return save_model(tmp_path_factory.mktemp("model"))


def test_a_folder_loads_and_reuses(folder):
    model = kr.load_model(folder, device="cpu")
    assert model.dtype == torch.float32  # the fast type on a CPU
    prompt = kr.RagPrompt.from_texts(model, system="w3 w4", chunks=["w5 w6", "w7 w8 w9"], question="w10 w11")
    assert [len(c) for c in prompt.chunks] == [2, 3]
    method, store = kr.CacheBlend(ratio=1.0), kr.KVStore()
    method.encode(model, prompt, store)
    full = kr.FullRecompute().prefill(model, prompt)
    torch.testing.assert_close(method.prefill(model, prompt, store).logits, full.logits, atol=1e-4, rtol=1e-4)
    assert model.generate(full, 4).text


def test_prompt_without_a_chat_template_opens_like_the_tokenizer(folder):
    model = kr.load_model(folder, device="cpu", check=False)
    prompt = kr.RagPrompt.from_texts(model, system="w3", chunks=["w5"], question="w10")
    assert prompt.input_ids.tolist() == [*model.tokenizer("")["input_ids"], 3, 5, 10]


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", torch.bfloat16])
def test_dtype_by_name_or_value(folder, dtype):
    assert kr.load_model(folder, device="cpu", dtype=dtype).dtype == torch.bfloat16


def test_device_map_over_cpu(folder):
    pytest.importorskip("accelerate")
    model = kr.load_model(folder, device_map={"": "cpu"})
    assert model.device.type == "cpu"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dtype": "int3"}, ValueError, "dtype='int3': choose float32"),
        ({"quantization": "2bit"}, ValueError, "quantization='2bit': choose '8bit', '4bit'"),
        ({"device": "cpu", "device_map": "auto"}, ValueError, "give one of the two"),
        ({"max_memory": {"cpu": "1GiB"}}, ValueError, "max_memory=.* without a device_map: give device_map='auto'"),
        ({"offload_folder": "there"}, ValueError, "offload_folder='there' without a device_map"),
    ],
)
def test_arguments_that_do_not_fit(folder, arguments, error, message):
    with pytest.raises(error, match=message):
        kr.load_model(folder, **arguments)


@pytest.mark.parametrize(
    ("library", "arguments"), [("bitsandbytes", {"quantization": "8bit"}), ("accelerate", {"device_map": "auto"})]
)
def test_a_missing_library_says_what_to_install(folder, monkeypatch, library, arguments):
    find = loading.importlib.util.find_spec
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None if name == library else find(name))
    with pytest.raises(ImportError, match=f"pip install {library}"):
        kr.load_model(folder, **arguments)


def test_an_unknown_model_says_what_to_give(tmp_path):
    with pytest.raises(OSError, match=r"(?s)'nobody/no-such-model' could not be loaded.*hub id"):
        kr.load_model("nobody/no-such-model", device="cpu")
    with pytest.raises(OSError, match="holds no config.json"):
        kr.load_model(tmp_path)


def test_soft_capping_loads_eager_attention(tmp_path):
    """sdpa has no soft capping: Gemma-2 must run the attention that has it."""
    hf_model("gemma2", head_dim=16, sliding_window=24).save_pretrained(tmp_path)
    config = loading.AutoConfig.from_pretrained(tmp_path)
    assert loading._attention(config) == "eager"
