"""Models that do not fit on one device: sharded checkpoints, layers on disk (device_map), 8-bit weights."""

import importlib.util

import pytest
import torch
from tiny import rag_prompt, save_model

import kvreuse as kr
from kvreuse.checks import _relative_error, _tolerance

pytest.importorskip("accelerate")

LAYERS = [f"model.layers.{i}" for i in range(4)]
EVERYTHING = ["model.embed_tokens", *LAYERS, "model.norm", "model.rotary_emb", "lm_head"]
METHODS = [
    kr.FullRecompute(),
    kr.PrefixCaching(),
    kr.FullReuse(),
    kr.CacheBlend(ratio=0.3),
    kr.CacheBlend(ratio=0.3, selector=kr.QuestionAttention()),
    kr.Funnel(),
]


def on(device, *parts):
    """A map of the whole model: these parts on ``device``, the others in main memory."""
    return dict.fromkeys(EVERYTHING, "cpu") | dict.fromkeys(parts, device)


MAPS = {
    "in memory": {"": "cpu"},
    "two layers on disk": on("disk", *LAYERS[1:3]),
    "all layers on disk": on("disk", *LAYERS),
    "embedding and head on disk": on("disk", "model.embed_tokens", "lm_head"),
    "everything on disk": {"": "disk"},
}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request, tmp_path_factory):
    """A checkpoint in small shards, with and without tied embeddings."""
    path = save_model(tmp_path_factory.mktemp("sharded"), "64KB", tie_word_embeddings=request.param)
    assert len(list(path.glob("*.safetensors"))) > 3
    return path


@pytest.fixture(scope="module")
def whole(folder):
    return kr.load_model(folder, device="cpu")


def prefilled(model, method, prompt):
    store = kr.KVStore()
    method.encode(model, prompt, store)
    return method.prefill(model, prompt, store)


@pytest.mark.parametrize("name", MAPS)
def test_a_mapped_model_gives_the_same(folder, whole, name, tmp_path):
    """Logits, K/V, rows and answers, bit for bit; on the CPU nothing differs but where weights wait."""
    model = kr.load_model(folder, device_map=MAPS[name], offload_folder=tmp_path)
    is_offloaded = "disk" in MAPS[name].values()
    assert any(p.is_meta for p in model.hf.parameters()) == is_offloaded
    assert model.device == torch.device("cpu")
    assert {model.layer_device(layer) for layer in range(4)} == {torch.device("cpu")}
    prompt = rag_prompt()
    for method in METHODS:
        expected, got = prefilled(whole, method, prompt), prefilled(model, method, prompt)
        assert torch.equal(got.logits, expected.logits), method
        for ours, theirs in zip(got.cache.layers, expected.cache.layers, strict=True):
            assert torch.equal(ours.keys, theirs.keys)
            assert torch.equal(ours.values, theirs.values)
        assert all(map(torch.equal, got.trace.selected, expected.trace.selected))
        assert model.generate(got, 5).token_ids == whole.generate(expected, 5).token_ids
    assert any(p.is_meta for p in model.hf.parameters()) == is_offloaded  # nothing stayed behind


@pytest.mark.parametrize("name", MAPS)
def test_the_fingerprint_is_of_content_wherever_it_lies(folder, whole, name, tmp_path):
    model = kr.load_model(folder, device_map=MAPS[name], offload_folder=tmp_path, check=False)
    before = model.fingerprint()
    prefilled(model, kr.CacheBlend(), rag_prompt())
    assert before == model.fingerprint() == whole.fingerprint()


def test_the_fingerprint_sees_other_weights_on_disk(folder, tmp_path):
    """Two checkpoints of one name would share K/V if names were looked at."""
    tied = kr.load_model(folder, device="cpu", check=False).config.tie_word_embeddings
    prints = []
    for seed in (0, 1):
        path = save_model(tmp_path / "model", "64KB", tie_word_embeddings=tied, seed=seed)
        prints.append(kr.load_model(path, device_map={"": "disk"}, check=False).fingerprint())
    assert prints[0] != prints[1]


def test_one_store_serves_a_mapped_and_a_whole_model(folder, whole, tmp_path):
    mapped = kr.load_model(folder, device_map=MAPS["two layers on disk"], offload_folder=tmp_path)
    method, prompt, store = kr.CacheBlend(), rag_prompt(), kr.KVStore()
    method.encode(whole, prompt, store)
    result = method.prefill(mapped, prompt, store)
    assert (result.trace.hits, result.trace.misses) == (4, 0)


def test_auto_maps_what_does_not_fit_to_disk(folder, whole, tmp_path):
    model = kr.load_model(folder, device_map="auto", max_memory={"cpu": "250KB"}, offload_folder=tmp_path)
    assert {"cpu", "disk"} <= set(model.hf.hf_device_map.values())
    prompt = rag_prompt()
    for method in METHODS:
        assert torch.equal(prefilled(model, method, prompt).logits, prefilled(whole, method, prompt).logits)


def test_batches_recorders_and_rotations_over_layers_on_disk(folder, whole, tmp_path):
    model = kr.load_model(folder, device_map=MAPS["all layers on disk"], offload_folder=tmp_path)
    prompts, method = [rag_prompt(), rag_prompt(chunks=(9, 21), seed=3)], kr.CacheBlend(ratio=0.3)
    expected, got = prefilled(whole, method, prompts), prefilled(model, method, prompts)
    assert torch.equal(got.logits, expected.logits)
    for layer in range(4):
        ours, theirs = model.rotary_table(layer, 60), whole.rotary_table(layer, 60)
        assert torch.equal(ours.cos, theirs.cos)
        assert torch.equal(ours.sin, theirs.sin)
    seen = []
    for m in (model, whole):
        store = kr.KVStore()
        method.encode(m, prompts[0], store)
        with m.record(kr.KVDeviation(), kr.AttentionDeviation()) as rec:
            method.prefill(m, prompts[0], store)
        seen.append((rec.kv_deviation, rec.attention_deviation))
    for ours, theirs in zip(*seen, strict=True):
        assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))


needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="pip install bitsandbytes"
)


@pytest.fixture(scope="module")
def wider(tmp_path_factory):
    """bitsandbytes' 4-bit kernel for CPUs takes multiples of 64."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
    return save_model(tmp_path_factory.mktemp("wider"), **sizes)


@needs_bitsandbytes
@pytest.mark.parametrize("quantization", ["8bit", "4bit"])
def test_quantized_weights_on_the_cpu(wider, quantization):
    """The gate passes; ratio 1 is full recompute and ratio 0 full reuse, within what the gate allows; keys stay."""
    model, whole = kr.load_model(wider, device="cpu", quantization=quantization), kr.load_model(wider, device="cpu")
    kinds = {type(module).__name__ for module in model.layers[0].modules()}
    assert {"8bit": "Linear8bitLt", "4bit": "Linear4bit"}[quantization] in kinds
    prompt, before = rag_prompt(), model.fingerprint()
    full = prefilled(model, kr.FullRecompute(), prompt).logits
    limit = _tolerance(model)
    for ratio, method in ((1.0, kr.FullRecompute()), (0.0, kr.FullReuse())):
        expected = prefilled(model, method, prompt).logits
        got = prefilled(model, kr.CacheBlend(ratio=ratio), prompt).logits
        assert _relative_error(got, expected) <= limit
    assert model.generate(prefilled(model, kr.CacheBlend(), prompt), 5).token_ids
    assert model.fingerprint() == before != whole.fingerprint()
    assert 0 < _relative_error(full, prefilled(whole, kr.FullRecompute(), prompt).logits) < 1


@needs_bitsandbytes
def test_the_gate_takes_an_8_bit_model_whose_roundings_agree_by_chance(folder):
    """Of this model's first prompt no logit changes when it is split; of other prompts' they do."""
    assert kr.load_model(folder, device="cpu", quantization="8bit").hf.is_quantized


@needs_bitsandbytes
def test_the_fingerprint_of_8_bit_weights_is_the_same_before_they_have_run(folder):
    """bitsandbytes moves the scales to another place in the first forward."""
    model = kr.load_model(folder, device="cpu", quantization="8bit", check=False)
    before = model.fingerprint()
    kr.check_model(model)
    assert model.fingerprint() == before
