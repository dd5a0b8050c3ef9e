"""Answers with the knowledge tree equal full recompute's, whatever is evicted; K/V go where the tree says."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch

import kvreuse as kr
from tests.tiny import ARCHITECTURES, ids, rag_prompt, tiny_model

ATOL = 2e-4  # fp32 through four layers of larger than usual weights; the order of additions differs
DOCS = [ids(n, 50 + i) for i, n in enumerate((3, 11, 7, 14, 5, 9, 1, 12))]
PREFIX = ids(4, 49)


def capacities(model: kr.ReuseModel, gpu_tokens: int, host_tokens: int) -> tuple[int, int]:
    size = kr.ragcache.kv.bytes_per_token(model)
    return gpu_tokens * size, host_tokens * size


def sequences(count: int, seed: int, pool: int = len(DOCS), longest: int = 4):
    """Skewed random document sequences; repeats and permutations of earlier ones are frequent."""
    rng, seen = random.Random(seed), []
    for _ in range(count):
        choice = rng.random()
        if seen and choice < 0.25:
            yield list(rng.choice(seen))
        elif seen and choice < 0.5:
            again = list(rng.choice(seen))
            rng.shuffle(again)
            yield again
        else:
            weights = [1 / (i + 1) for i in range(pool)]
            seen.append(rng.choices(range(pool), weights=weights, k=rng.randint(1, longest)))
            yield list(seen[-1])


def check_equal(model: kr.ReuseModel, prompt: kr.RagPrompt, result: kr.Prefill, atol: float = ATOL) -> None:
    full = kr.FullRecompute().prefill(model, prompt)
    torch.testing.assert_close(result.logits, full.logits, atol=atol, rtol=1e-4)
    for ours, theirs in zip(result.cache.layers, full.cache.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, atol=atol, rtol=1e-4)
        torch.testing.assert_close(ours.values, theirs.values, atol=atol, rtol=1e-4)


POLICIES = [kr.PGDSF(), kr.GDSF(), kr.LRU(), kr.LFU(), kr.LFU(persistent=False)]
SHORT = [name for name in ARCHITECTURES if name != "llama"]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_200_random_sequences_equal_full_recompute(policy):
    model = tiny_model("llama")
    cache = kr.TreeCache(model, PREFIX, *capacities(model, 50, 80), policy=policy)
    method, found = kr.RagCache(), 0
    for number, chosen in enumerate(sequences(200, seed=7)):
        prompt = kr.RagPrompt(PREFIX, [DOCS[i] for i in chosen], ids(3 + number % 4, number))
        result = method.prefill(model, prompt, cache)
        check_equal(model, prompt, result)
        cache.tree.check_integrity()
        found += result.trace.hits > 1
    assert cache.tree.gpu.evictions > 100
    assert cache.tree.host.evictions > 100, "capacities must force evictions in both tiers"
    assert found > 40
    assert cache.tree.gpu.bytes_in > 0


@pytest.mark.parametrize("name", SHORT)
def test_every_architecture_equals_full_recompute(name):
    model = tiny_model(name)
    cache = kr.TreeCache(model, PREFIX, *capacities(model, 40, 60))
    reused = 0
    for number, chosen in enumerate(sequences(24, seed=3)):
        prompt = kr.RagPrompt(PREFIX, [DOCS[i] for i in chosen], ids(5, number))
        result = kr.RagCache().prefill(model, prompt, cache)
        check_equal(model, prompt, result)
        cache.tree.check_integrity()
        reused += result.trace.num_exact
    assert reused > 100
    assert cache.tree.gpu.evictions > 5


def test_the_demo_model_equals_full_recompute(demo_model):
    texts = [
        "The lighthouse of Kerrin Point was built in 1871 by the engineer Oda Malling.\n\n",
        "Oda Malling was born in the town of Vessel and studied in the capital.\n\n",
        "The ferry to Vessel leaves every morning at six, except on Sundays and in heavy fog.\n\n",
    ]
    chunks = [demo_model.tokenize(text) for text in texts]
    prefix, question = demo_model.tokenize("Answer from the passages.\n\n"), demo_model.tokenize("Where is Vessel?")
    cache = kr.TreeCache(demo_model, prefix, *capacities(demo_model, 60, 60))
    for chosen in ([0, 1], [1, 0], [0, 1, 2], [2], [0, 1], [1, 0, 0]):
        prompt = kr.RagPrompt(prefix, [chunks[i] for i in chosen], question)
        result = kr.RagCache().prefill(demo_model, prompt, cache)
        check_equal(demo_model, prompt, result, atol=5e-3)  # thirty layers, logits up to 30
        cache.tree.check_integrity()
    assert cache.tree.gpu.evictions
    assert cache.tree.host.evictions


def test_a_longrope_tree_serves_one_kind_of_prompt():
    model = tiny_model("phi3-longrope")
    long = kr.RagPrompt(PREFIX, [DOCS[3], DOCS[1], DOCS[7]], ids(4, 1))
    short = kr.RagPrompt(PREFIX, [DOCS[3]], ids(4, 2))
    for flag in (False, True):
        cache = kr.TreeCache(model, PREFIX, long_rope=flag)
        for prompt in (long, short, long, short):
            check_equal(model, prompt, kr.RagCache().prefill(model, prompt, cache))
        assert cache.tree.now == 2
        assert cache.tree.match(cache.documents(long)).cached_documents == (3 if flag else 1)


def test_trace_says_what_was_reused():
    model, prompt = tiny_model(), rag_prompt()
    cache, method = kr.TreeCache(model, prompt.prefix), kr.RagCache()
    first, second = method.prefill(model, prompt, cache), method.prefill(model, prompt, cache)
    assert (first.trace.hits, first.trace.misses) == (0, 4)
    assert (second.trace.hits, second.trace.misses) == (4, 0)
    assert second.trace.num_exact == prompt.num_context
    assert second.ttft_s > 0
    assert "insert_s" in second.trace.stages


def test_encode_keeps_and_does_not_count():
    model, prompt = tiny_model(), rag_prompt()
    cache, method = kr.TreeCache(model, prompt.prefix), kr.RagCache(insert=False)
    method.encode(model, prompt, cache)
    assert method.encode(model, prompt, cache) < 1
    assert cache.tree.now == 0
    other = kr.RagPrompt(prompt.prefix, [prompt.chunks[0], ids(5, 9)], prompt.question)
    result = method.prefill(model, other, cache)
    assert result.trace.hits == 2
    assert cache.tree.match(cache.documents(other)).cached_documents == 1, "insert=False keeps nothing new"


def test_without_system_prompt():
    model = tiny_model()
    cache = kr.TreeCache(model, [], *capacities(model, 25, 0))
    for number, chosen in enumerate(([1, 2], [1], [3], [1, 2], [2, 1])):
        prompt = kr.RagPrompt([], [DOCS[i] for i in chosen], ids(3, number))
        check_equal(model, prompt, kr.RagCache().prefill(model, prompt, cache))
        cache.tree.check_integrity()
    cache.tree.lose_gpu()
    check_equal(model, prompt, kr.RagCache().prefill(model, prompt, cache))


def test_after_an_edit_of_the_weights_nothing_old_is_used():
    model, prompt = tiny_model(), rag_prompt()
    cache = kr.TreeCache(model, prompt.prefix)
    kr.RagCache().prefill(model, prompt, cache)
    with torch.no_grad():
        model.hf.model.layers[1].self_attn.v_proj.weight.mul_(1.5)
    result = kr.RagCache().prefill(model, prompt, cache)
    assert result.trace.hits == 0
    check_equal(model, prompt, result)
    assert kr.RagCache().prefill(model, prompt, cache).trace.hits == 4


def test_a_lost_gpu_is_recovered_from_host_replicas():
    model, prompt = tiny_model(), rag_prompt()
    cache = kr.TreeCache(model, prompt.prefix)
    for _ in range(2):
        kr.RagCache().prefill(model, prompt, cache)
    assert cache.tree.replicate(22 * cache.tree.bytes_per_token)  # system prompt and first document
    for node in list(cache.tree.nodes()):
        if node.in_gpu:
            for tensor in (*node.kv[0].keys, *node.kv[0].values):
                tensor.fill_(float("nan"))  # what was in GPU memory is garbage now
    cache.tree.lose_gpu()
    result = kr.RagCache().prefill(model, prompt, cache)
    assert (result.trace.hits, result.trace.misses) == (2, 2)
    check_equal(model, prompt, result)


def test_results_do_not_change_with_what_the_tree_does_later():
    model, prompt = tiny_model(), rag_prompt()
    cache = kr.TreeCache(model, prompt.prefix)
    kr.RagCache().prefill(model, prompt, cache)
    result = kr.RagCache().prefill(model, prompt, cache)
    before = [layer.keys.clone() for layer in result.cache.layers]
    model.generate(result, max_new_tokens=4)
    cache.tree.clear()
    assert all(torch.equal(a, layer.keys) for a, layer in zip(before, result.cache.layers, strict=True))
    assert cache.tree.gpu.used_bytes == cache.tree.host.used_bytes == 0
    cache.tree.check_integrity()


def test_a_failing_prefill_leaves_nothing_pinned():
    model, prompt = tiny_model(), rag_prompt()
    cache = kr.TreeCache(model, prompt.prefix)
    kr.RagCache().prefill(model, prompt, cache)

    def fail(*_):
        raise RuntimeError("out of memory")

    hook = model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        kr.RagCache().prefill(model, prompt, cache)
    hook.remove()
    assert all(node.pins == 0 for node in cache.tree.nodes())
    check_equal(model, prompt, kr.RagCache().prefill(model, prompt, cache))


def test_wrong_stores_and_prompts_say_what_to_pass():
    model, prompt = tiny_model(), rag_prompt()
    cache = kr.TreeCache(model, prompt.prefix)
    with pytest.raises(TypeError, match=r"pass kr.TreeCache\(model, prefix\)"):
        kr.RagCache().prefill(model, prompt, kr.KVStore())
    with pytest.raises(ValueError, match="make a TreeCache for each system prompt"):
        kr.RagCache().prefill(model, kr.RagPrompt([9], prompt.chunks, prompt.question), cache)
    with pytest.raises(ValueError, match="make a TreeCache for this model"):
        kr.RagCache().prefill(tiny_model("qwen2"), prompt, cache)


def test_the_example_in_the_docs_runs(demo_model, monkeypatch, capsys):
    text = (Path(__file__).parents[1] / "docs" / "ragcache.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    monkeypatch.setattr(kr, "load_model", lambda name: demo_model)
    exec(compile(example, "docs/ragcache.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert [line[:3] for line in lines[:3]] == ["0 3", "3 1", "1 3"]
    assert lines[3].startswith("Match(2 of 2 documents")
