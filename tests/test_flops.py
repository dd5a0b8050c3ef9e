"""Counted work: against PyTorch's own counter, and by hand."""

import pytest
import torch
from tiny import hf_model, rag_prompt, tiny_model
from torch.utils.flop_counter import FlopCounterMode

import kvreuse as kr
from benchmarks.flops import Costs, Work, scored_keys
from benchmarks.rates import Rates

# of tests/tiny.py: hidden 48, MLP 64, 4 layers, 6 heads of 8, 2 K/V heads, vocabulary 128
KV_ROW = 2 * 48 * 16  # multiply-adds of K and V
ROW = KV_ROW + 2 * 48 * 48 + 3 * 48 * 64  # and of Q, O and the MLP
HEAD = 48 * 128
PER_KEY = 4 * 6 * 8


def linear_flops(run):
    """What PyTorch counts in ``mm`` and ``addmm``."""
    with FlopCounterMode(display=False) as counter:
        result = run()
    counts = counter.get_flop_counts()["Global"]
    return result, sum(n for op, n in counts.items() if op in (torch.ops.aten.mm, torch.ops.aten.addmm))


@pytest.fixture(scope="module")
def model():
    model = tiny_model()
    kr.check_model(model)
    return model


def prefilled(model, method, prompt):
    store = kr.KVStore()
    method.encode(model, prompt, store)
    return lambda: method.prefill(model, prompt, store)


def test_full_prefill_by_hand(model):
    prompt = rag_prompt(prefix=5, chunks=(17, 13, 19), question=6)
    result, counted = linear_flops(prefilled(model, kr.FullRecompute(), prompt))
    work = Costs.of(model).work(result)
    assert work.linear == 2 * (4 * 60 * ROW + HEAD) == counted
    assert work.attention == 4 * PER_KEY * 60 * 61 // 2
    assert work.weight_bytes == 4 * (4 * ROW + HEAD)  # fp32
    assert work.kv_bytes == 0


def test_a_blend_by_hand(model):
    """Prefix and first chunk are exact: 32 of 54 context tokens are reused; a quarter of them on every layer."""
    prompt = rag_prompt(prefix=5, chunks=(17, 13, 19), question=6)
    method = kr.CacheBlend(ratio=0.25, schedule="constant")
    result, counted = linear_flops(prefilled(model, method, prompt))
    rows = 8 + 6
    assert [own.numel() for own in result.trace.selected] == [32 + 6, rows, rows, rows]
    kv_alone = KV_ROW * (38 + rows) + 2 * 48 * 48  # the check layer's and the last one's; one row's query each
    work = Costs.of(model).work(result)
    assert work.linear == 2 * (ROW * (38 + rows + rows + 1) + kv_alone + HEAD) == counted
    seen = [int((own + 1).sum()) for own in result.trace.selected]
    assert work.attention == PER_KEY * (seen[0] + seen[1] + seen[2] + 60)  # on the last layer the last token alone
    per_token = 2 * 16 * 4  # bytes of a layer's K/V
    assert work.kv_bytes == 2 * per_token * (22 + 3 * 54)  # layer 0's inexact K/V are not looked at


METHODS = [
    kr.FullReuse(),
    kr.PrefixCaching(),
    kr.CacheBlend(ratio=0.3),
    kr.CacheBlend(ratio=1.0),
    kr.CacheBlend(ratio=0.0),
    kr.LegoLink(k=4),
]


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_linear_layers_as_pytorch_counts_them(model, method):
    result, counted = linear_flops(prefilled(model, method, rag_prompt()))
    assert Costs.of(model).work(result).linear == counted


@pytest.mark.parametrize("name", ["phi3-longrope", "gpt_neox-partial", "qwen3", "cohere-interleaved", "gemma3"])
def test_other_architectures_as_pytorch_counts_them(name):
    """Packed projections have no query of their own to leave out; biases, norms and windows change nothing here."""
    model = tiny_model(name)
    kr.check_model(model)
    for method in (kr.FullRecompute(), kr.CacheBlend(ratio=0.3)):
        result, counted = linear_flops(prefilled(model, method, rag_prompt()))
        assert Costs.of(model).work(result).linear == counted


def test_a_batch_is_the_sum_of_its_prompts(model):
    """But for the one query row of a projection of K/V alone, which the whole pass shares."""
    prompts, store, method = [rag_prompt(), rag_prompt(chunks=(9, 21), seed=3)], kr.KVStore(), kr.CacheBlend(ratio=0.3)
    method.encode(model, prompts, store)
    together, counted = linear_flops(lambda: method.prefill(model, prompts, store))
    costs = Costs.of(model)
    work = costs.work(together)
    single = [costs.work(method.prefill(model, prompt, store)) for prompt in prompts]
    assert work.linear == counted == sum(w.linear for w in single) - 2 * 2 * 48 * 48
    assert work.attention == sum(w.attention for w in single)
    assert work.kv_bytes == sum(w.kv_bytes for w in single)


def test_windows_cut_the_keys_that_are_seen():
    rows = torch.tensor([0, 3, 30, 59])
    assert scored_keys(rows, None) == 1 + 4 + 31 + 60
    assert scored_keys(rows, 24) == 1 + 4 + 24 + 24
    model = tiny_model("gemma3")
    result = kr.FullRecompute().prefill(model, rag_prompt())
    window, full = 24 * 25 // 2 + 36 * 24, 60 * 61 // 2
    assert Costs.of(model).work(result).attention == 4 * 6 * 16 * (3 * window + full)


def test_experts_are_refused():
    model = kr.ReuseModel(hf_model("mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=None))
    with pytest.raises(ValueError, match="outside of a linear layer"):
        Costs.of(model)


def test_a_trace_of_another_model_is_refused(model):
    other = tiny_model(num_hidden_layers=3)
    with pytest.raises(ValueError, match="4 layers, the model 3"):
        Costs.of(other).work(kr.FullRecompute().prefill(model, rag_prompt()))


def test_the_floor_adds_what_cannot_overlap():
    rates = Rates(gemm=100.0, attention=50.0, copy=10.0)
    assert rates.floor_s(Work(linear=1000, attention=100, weight_bytes=20, kv_bytes=30)) == 10 + 2 + 3
    assert rates.floor_s(Work(linear=1000, attention=100, weight_bytes=400, kv_bytes=0)) == 40 + 2
    assert rates.gemm_floor_s(Work(linear=1000, attention=100, weight_bytes=400, kv_bytes=30)) == 11
