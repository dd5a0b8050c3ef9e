"""Every architecture against its own full recompute."""

from itertools import pairwise

import pytest
import torch
from tiny import ARCHITECTURES, rag_prompt, tiny_model
from transformers import DynamicCache

import kvreuse as kr
from kvreuse import compat

# fp32 rounding over four layers of logits and K/V of order one; the largest error seen is 2e-5.
ATOL = 1e-4


@pytest.fixture(params=sorted(ARCHITECTURES), scope="module")
def model(request):
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def prompt():
    return rag_prompt()


def assert_same_kv(cache, reference):
    for ours, full in zip(cache.layers, reference.layers, strict=True):
        torch.testing.assert_close(ours.keys, full.keys, atol=ATOL, rtol=1e-4)
        torch.testing.assert_close(ours.values, full.values, atol=ATOL, rtol=1e-4)


def encoded(method, model, prompt):
    store = kr.KVStore()
    method.encode(model, prompt, store)
    return store


def test_gate_passes(model):
    kr.check_model(model)


@pytest.mark.parametrize("schedule", ["constant", "gradual"])
@pytest.mark.parametrize("context", ["bare", "bos", "prefix"])
def test_ratio_one_is_full_recompute(model, prompt, schedule, context):
    method = kr.CacheBlend(ratio=1.0, schedule=schedule, context=context)
    result = method.prefill(model, prompt, encoded(method, model, prompt))
    full = kr.FullRecompute().prefill(model, prompt)
    assert result.trace.misses == 0
    torch.testing.assert_close(result.logits, full.logits, atol=ATOL, rtol=1e-4)
    assert_same_kv(result.cache, full.cache)
    assert result.cache.get_seq_length() == prompt.num_tokens


@pytest.mark.parametrize("context", ["bare", "bos", "prefix"])
def test_ratio_zero_is_full_reuse(model, prompt, context):
    blend, reuse = kr.CacheBlend(ratio=0.0, context=context), kr.FullReuse(context=context)
    store = encoded(blend, model, prompt)
    a, b = blend.prefill(model, prompt, store), reuse.prefill(model, prompt, store)
    assert torch.equal(a.logits, b.logits)
    full = kr.FullRecompute().prefill(model, prompt)
    assert not torch.allclose(a.logits, full.logits, atol=1e-2), (
        "reuse without cross-attention cannot equal full recompute"
    )


@pytest.mark.parametrize("context", ["bare", "prefix"])
def test_position_buffer_agrees_with_rotation(model, prompt, context):
    results = []
    for position in ("rotate", "buffer"):
        method = kr.FullReuse(context=context, position=position)
        results.append(method.prefill(model, prompt, encoded(method, model, prompt)))
    torch.testing.assert_close(results[0].logits, results[1].logits, atol=ATOL, rtol=1e-4)
    assert_same_kv(results[0].cache, results[1].cache)


def test_prefix_caching_is_exact(model, prompt):
    method, store = kr.PrefixCaching(), kr.KVStore()
    full = kr.FullRecompute().prefill(model, prompt)
    method.encode(model, prompt, store)
    for hits in (2, 4):  # prefix and first chunk, then the whole served context
        result = method.prefill(model, prompt, store)
        assert result.trace.hits == hits
        torch.testing.assert_close(result.logits, full.logits, atol=ATOL, rtol=1e-4)
        assert_same_kv(result.cache, full.cache)


SELECTIVE = [
    kr.LegoLink(k=3),
    kr.LegoLink(k=4, context="bare"),
    kr.CacheBlend(ratio=0.3, schedule="constant"),
    kr.CacheBlend(ratio=0.3, schedule="gradual", context="bare"),
    kr.CacheBlend(ratio=0.4, schedule=kr.Gradual(0.9), metric="v"),
    kr.CacheBlend(ratio=0.3, selector=kr.QuestionAttention(), schedule="constant"),
    kr.CacheBlend(ratio=0.3, selector=kr.RandomTokens(seed=1), schedule="gradual"),
]


@pytest.mark.parametrize("method", SELECTIVE, ids=repr)
def test_selective_recompute_equals_decoding_token_by_token(model, prompt, method):
    """An independent reference: Hugging Face's own decoding, one token at a time over a plain cache.

    A selected token at position p sees keys 0..p, of which the selected ones are fresh and the others stored; that is
    what decoding token p sees if the cache holds exactly those. Where a token is not selected on a layer the cache gets
    the stored K/V; on layer 0 and the check layer of HKVD, those of full recompute.
    """
    if "longrope" in model.name:
        pytest.skip("decoding one token at a time lets longrope choose its factors by the token, not by the prompt")
    store = encoded(method, model, prompt)
    result = method.prefill(model, prompt, store)
    stored = kr.FullReuse(context=method.context).prefill(model, prompt, store).cache
    full = kr.FullRecompute().prefill(model, prompt).cache
    checks = getattr(method, "selector", True) is None
    selected = [set(rows.tolist()) for rows in result.trace.selected]
    assert all(later <= earlier for earlier, later in pairwise(selected))
    reference = DynamicCache()
    for p, token in enumerate(prompt.input_ids.tolist()):
        before = [(c.keys[:, :, p : p + 1], c.values[:, :, p : p + 1]) for c in stored.layers]
        exact = [(c.keys[:, :, p : p + 1], c.values[:, :, p : p + 1]) for c in full.layers]
        if p not in selected[1]:
            for layer in range(model.num_layers):
                kv = exact if checks and layer < 2 else before
                reference.update(*kv[layer], layer)
            continue
        logits = compat.run_model(model.hf, torch.tensor([[token]]), torch.tensor([[p]]), reference)
        for layer in range(model.num_layers):
            if p not in selected[layer]:
                for mine, theirs in zip(
                    (reference.layers[layer].keys, reference.layers[layer].values), before[layer], strict=True
                ):
                    mine[:, :, p : p + 1] = theirs
    torch.testing.assert_close(result.logits, logits[:, -1], atol=ATOL, rtol=1e-4)
    assert_same_kv(result.cache, reference)


def test_hf_generate_continues_from_the_cache(model, prompt):
    method = kr.CacheBlend(ratio=1.0)
    result = method.prefill(model, prompt, encoded(method, model, prompt))
    ours = model.generate(result, max_new_tokens=6)
    settings = {"do_sample": False, "max_new_tokens": 5}
    continued = model.hf.generate(**model.generate_inputs(result), **settings)[0, prompt.num_tokens :]
    ids = prompt.input_ids[None]
    scratch = model.hf.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)[0]
    scratch = scratch[prompt.num_tokens :]
    assert ours.token_ids == [t for t in continued.tolist() if t not in model.eos_token_ids]
    assert continued.tolist() == scratch.tolist()
