"""Re-rotation of stored keys."""

import pytest
import torch
from tiny import ARCHITECTURES, hf_model, ids, tiny_model
from transformers import DynamicCache

import kvreuse as kr
from kvreuse import compat
from kvreuse.blend.deviation import squared_deviation
from kvreuse.rope import RotaryTable, rotate


def keys_at(model, tokens, start):
    """Layer-0 keys of tokens run at positions ``start ..``, by the model itself."""
    cache = DynamicCache()
    positions = torch.arange(start, start + len(tokens))
    with torch.inference_mode():
        compat.run_decoder(model.hf, tokens[None], positions[None], cache)
    return cache.layers[0].keys


@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - {"phi3-longrope"}))
def test_moved_keys_are_those_of_direct_rotation(name):
    model = tiny_model(name)
    chunk = kr.encode_chunk(model, ids(0, 0), ids(12, 1))
    for place in (1, 50, 200):
        moved = kr.rerotate_keys(model, chunk, place, num_tokens=220)
        # fp32: the model's own tables at both ends, so only the rounding of one product is left
        torch.testing.assert_close(moved[0], keys_at(model, ids(12, 1), place), atol=3e-6, rtol=1e-5)


def test_longrope_short_chunk_in_a_long_prompt():
    """Encoded with short factors on purpose, moved into a long prompt: layer-0 keys follow the long factors."""
    model = tiny_model("phi3-longrope")
    chunk = kr.encode_chunk(model, ids(0, 0), ids(12, 1))
    moved = kr.rerotate_keys(model, chunk, 60, num_tokens=80)[0]
    torch.testing.assert_close(moved, keys_at(model, ids(12, 1), 60), atol=3e-6, rtol=1e-5)
    # and one encoded for a long prompt is there exactly, on all layers, where nothing stands before it
    long = kr.encode_chunk(model, ids(0, 0), ids(12, 1), long_rope=True)
    full = model.prefill(torch.cat([ids(12, 1), ids(60, 2)]))[1]
    for ours, theirs in zip(long.keys, full.layers, strict=True):
        torch.testing.assert_close(ours, theirs.keys[:, :, :12], atol=1e-5, rtol=1e-5)


def test_longrope_prefix_of_a_short_prompt_is_not_reused_in_a_long_one():
    model = tiny_model("phi3-longrope")
    short = kr.RagPrompt(ids(5, 0), [ids(9, 1)], ids(4, 2))
    long = kr.RagPrompt(ids(5, 0), [ids(9, 1), ids(40, 3)], ids(4, 2))
    method, store = kr.PrefixCaching(), kr.KVStore()
    method.prefill(model, short, store)
    assert method.prefill(model, short, store).trace.hits == 2
    assert method.prefill(model, long, store).trace.hits == 0


def test_same_chunk_twice_differs_by_the_rotation_between_its_places():
    model = tiny_model()
    chunk = ids(10, 1)
    prompt = kr.RagPrompt([], [chunk, ids(7, 2), chunk], ids(3, 3))
    method, store = kr.FullReuse(context="bare"), kr.KVStore()
    method.encode(model, prompt, store)
    cache = method.prefill(model, prompt, store).cache
    table = model.rotary_table(0, prompt.num_tokens)
    move = table[17:27].minus(table[0:10])
    for layer in cache.layers:
        first, second = layer.keys[:, :, 0:10], layer.keys[:, :, 17:27]
        torch.testing.assert_close(rotate(first, move, interleaved=False), second, atol=1e-6, rtol=1e-5)
        assert torch.equal(layer.values[:, :, 0:10], layer.values[:, :, 17:27])


def test_there_and_back_is_the_identity():
    model = tiny_model("llama-yarn")  # scales its tables: the scale must cancel
    table = model.rotary_table(0, 60)
    assert not torch.allclose(table.cos.square() + table.sin.square(), torch.ones(()), atol=1e-3)
    keys = torch.randn(1, 2, 10, 8, generator=torch.Generator().manual_seed(0))
    there = rotate(keys, table[50:60].minus(table[:10]), interleaved=False)
    back = rotate(there, table[:10].minus(table[50:60]), interleaved=False)
    torch.testing.assert_close(back, keys, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_k_deviation_is_the_same_before_and_after_rope(interleaved):
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(1, 3, 6, 8, generator=g) for _ in range(2))
    angle = torch.rand(6, 4, generator=g) * 6
    table = RotaryTable(angle.cos(), angle.sin())
    rotated = [rotate(k, table, interleaved) for k in (a, b)]
    before = squared_deviation("k", a, a, b, b)
    torch.testing.assert_close(squared_deviation("k", rotated[0], a, rotated[1], b), before, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_keys_are_rotated_in_fp32(dtype):
    """Error at most half a unit in the last place of the stored type: fp32 inside, one rounding at the end."""
    keys = torch.randn(1, 2, 10, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    angle = torch.linspace(0, 6, 40).view(10, 4)
    table = RotaryTable(angle.cos(), angle.sin())
    exact = rotate(keys.float(), table, interleaved=False)
    assert torch.equal(rotate(keys, table, interleaved=False), exact.to(dtype))


def test_dynamic_rope_is_refused_with_its_reason():
    hf = hf_model("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    with pytest.raises(kr.UnsupportedModelError, match="dynamic NTK RoPE"):
        kr.check_model(kr.ReuseModel(hf, name="dyn"))


def test_learned_positions_are_refused_with_their_reason():
    from transformers import GPT2Config, GPT2LMHeadModel

    hf = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=24, n_layer=2, n_head=2, n_positions=64))
    with pytest.raises(kr.UnsupportedModelError, match="GPT2LMHeadModel"):
        kr.check_model(kr.ReuseModel(hf))


def test_recurrent_layers_are_refused_with_their_reason():
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, max_position_embeddings=64,
    )  # fmt: skip
    with pytest.raises(kr.UnsupportedModelError, match="linear_attention"):
        kr.ReuseModel(Qwen3NextForCausalLM(config))
