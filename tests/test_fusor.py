"""What a blend recomputes, sees and leaves alone."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from tiny import ids, rag_prompt, tiny_model

import kvreuse as kr
from kvreuse.blend import kernels
from kvreuse.blend.rows import RowMask


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def stored(method, model, *prompts):
    store = kr.KVStore()
    for prompt in prompts:
        method.encode(model, prompt, store)
    return store


def test_mask_rows_follow_true_positions():
    mask = RowMask(torch.tensor([1, 4]), num_keys=6)
    assert mask.visible().int().tolist() == [[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0]]
    window = RowMask(torch.tensor([1, 4]), num_keys=6, window=2)
    assert window.visible().int().tolist() == [[1, 1, 0, 0, 0, 0], [0, 0, 0, 1, 1, 0]]


ROWS = [[1, 4], [0], [199], list(range(0, 200, 3)), *(list(range(start, 200)) for start in (0, 10, 80, 150))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["by-products", "by-pytorch's-kernels"])
@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("window", [None, 7, 40, 300])
@pytest.mark.parametrize("rows", ROWS, ids=[f"{len(rows)}-rows" for rows in ROWS])
def test_block_attention_equals_dense_masked_attention(rows, window, released, dtype):
    """Suffixes, near enough to all rows, as a square of the causal kernel."""
    g = torch.Generator().manual_seed(0)
    n, keys = len(rows), 200
    q = torch.randn(2, 6, n, 8, generator=g, dtype=dtype)
    k, v = (torch.randn(2, 2, keys, 8, generator=g, dtype=dtype) for _ in range(2))
    mask = RowMask(torch.tensor(rows), keys, window, torch.arange(keys - n, keys) if released else None)
    weights = mask.weights(q, k, None)
    dense = weights @ v.float().repeat_interleave(3, dim=1)
    torch.testing.assert_close(mask.attend(q, k, v, None).float(), dense, atol=1e-5, rtol=1e-5)
    assert torch.equal(weights[0, 0] > 0, mask.visible())


def test_masks_are_exact_whatever_the_default_type():
    """In bfloat16 positions above 256 would round, and rows would see tokens behind them."""
    rows = torch.arange(1, 1000, 3)
    query, key = (torch.randn(1, 2, n, 8, dtype=torch.float32) for n in (len(rows), 1000))
    mask = RowMask(rows, 1000)
    expected = mask.weights(query, key, None) @ key
    torch.set_default_dtype(torch.bfloat16)
    try:
        out = mask.attend(query, key, key, None)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_a_later_token_never_moves_an_earlier_output(model):
    """Chunk tokens are changed behind the selected ones; K/V before the change stay equal bit for bit."""
    base = rag_prompt()
    question = base.question.clone()
    question[3:] = ids(3, 99)
    changed = kr.RagPrompt(base.prefix, base.chunks, question)
    method = kr.LegoLink(k=4)
    store = stored(method, model, base)
    a, b = method.prefill(model, base, store), method.prefill(model, changed, store)
    stop = base.num_context + 3
    for x, y in zip(a.cache.layers, b.cache.layers, strict=True):
        assert torch.equal(x.keys[:, :, :stop], y.keys[:, :, :stop])
        assert torch.equal(x.values[:, :, :stop], y.values[:, :, :stop])
    assert not torch.equal(a.logits, b.logits)


def test_the_released_mask_does_show_the_future(model):
    """The fault that as_released reproduces: rows selected early see tokens behind them."""
    base = rag_prompt()
    last = base.chunks[-1].clone()
    last[-3:] = (last[-3:] + 1) % 100 + 3
    changed = kr.RagPrompt(base.prefix, [*base.chunks[:-1], last], base.question)
    chosen = kr.FirstTokens(k=2)
    stop = base.chunk_starts[-1]
    moved = {}
    for released in (True, False):
        method = kr.CacheBlend(ratio=0.5, selector=chosen, schedule="constant", as_released=released)
        store = stored(method, model, base, changed)
        caches = [method.prefill(model, p, store).cache for p in (base, changed)]
        kv = [torch.cat([layer.values[:, :, :stop] for layer in c.layers]) for c in caches]
        moved[released] = not torch.equal(*kv)
    assert moved == {True: True, False: False}


def test_as_released_forces_only_the_last_question_token(model):
    prompt = rag_prompt()
    method = kr.CacheBlend(ratio=0.05, as_released=True, context="bos")
    result = method.prefill(model, prompt, stored(method, model, prompt))
    budget = round(0.05 * (prompt.num_tokens - 1))
    assert [len(rows) for rows in result.trace.selected[1:]] == [budget + 1] * (model.num_layers - 1)
    assert all(int(rows[-1]) == prompt.num_tokens - 1 for rows in result.trace.selected)
    assert result.trace.num_exact == 0


def test_question_is_forced_and_outside_the_budget(model):
    prompt = rag_prompt(question=10)
    method = kr.CacheBlend(ratio=0.01)
    result = method.prefill(model, prompt, stored(method, model, prompt))
    question = set(range(prompt.num_context, prompt.num_tokens))
    assert all(question <= set(rows.tolist()) for rows in result.trace.selected)


@pytest.mark.parametrize("schedule", ["constant", "gradual"])
def test_budget_counts_reused_inexact_tokens(model, schedule):
    prompt = rag_prompt(chunks=(40, 50, 60))
    method = kr.CacheBlend(ratio=0.2, schedule=schedule)
    trace = method.prefill(model, prompt, stored(method, model, prompt)).trace
    assert (trace.num_exact, trace.num_reused) == (5 + 40, 50 + 60)
    counts = [len(rows) - 6 for rows in trace.selected]
    assert counts[0] == 110
    assert sum(counts[1:]) / len(counts[1:]) == pytest.approx(0.2 * 110, abs=1)
    assert counts[1:] == sorted(counts[1:], reverse=True)
    assert (len(set(counts[1:])) > 1) == (schedule == "gradual")


def test_misses_are_recomputed_whole_and_stored_behind_the_first_token(model):
    prompt = rag_prompt()
    method = kr.CacheBlend(ratio=0.1)
    known = kr.RagPrompt(prompt.prefix, [prompt.chunks[0], prompt.chunks[2]], prompt.question)
    store = stored(method, model, known)
    result = method.prefill(model, prompt, store)
    missing = set(range(prompt.chunk_starts[1], prompt.chunk_starts[2]))
    assert result.trace.misses == 1
    assert all(missing <= set(rows.tolist()) for rows in result.trace.selected)
    assert "encode_s" in result.trace.stages
    assert result.ttft_s < sum(result.trace.stages.values())
    assert method.prefill(model, prompt, store).trace.misses == 0
    # what was stored is the chunk alone, not the chunk as this prompt saw it
    fresh = method.prefill(model, prompt, stored(method, model, prompt))
    assert torch.equal(method.prefill(model, prompt, store).logits, fresh.logits)


def test_an_empty_store_gives_full_recompute(model):
    prompt = rag_prompt()
    result = kr.CacheBlend().prefill(model, prompt, kr.KVStore())
    assert torch.equal(result.logits, kr.FullRecompute().prefill(model, prompt).logits)


def test_missing_prefix_with_stored_chunks_still_equals_full_recompute_at_ratio_one(model):
    prompt = rag_prompt()
    method = kr.CacheBlend(ratio=1.0, context="bare")
    store = stored(method, model, kr.RagPrompt([], prompt.chunks, prompt.question))
    result = method.prefill(model, prompt, store)
    assert (result.trace.hits, result.trace.misses) == (3, 1)
    full = kr.FullRecompute().prefill(model, prompt)
    torch.testing.assert_close(result.logits, full.logits, atol=1e-4, rtol=1e-4)


def test_blend_a_b_a_is_the_same_twice(model):
    a, b = rag_prompt(), rag_prompt(seed=1)
    mixed = kr.RagPrompt(a.prefix, [b.chunks[1], a.chunks[0], a.chunks[2]], b.question)
    method = kr.CacheBlend(ratio=0.3)
    store = stored(method, model, a, mixed)
    first = method.prefill(model, a, store)
    model.generate(first, max_new_tokens=4)
    method.prefill(model, mixed, store)
    second = method.prefill(model, a, store)
    assert torch.equal(first.logits, second.logits)
    for x, y in zip(first.cache.layers, second.cache.layers, strict=True):
        assert torch.equal(x.keys, y.keys)
        assert torch.equal(x.values, y.values)


@pytest.mark.parametrize(("context", "prefix"), [("bare", 0), ("prefix", 5), ("prefix", 0)])
def test_an_exact_prefix_chunk_is_untouched(model, context, prefix):
    prompt = rag_prompt(prefix=prefix)
    method = kr.CacheBlend(ratio=0.5, context=context)
    store = stored(method, model, prompt)
    result = method.prefill(model, prompt, store)
    end = prompt.chunk_starts[1]
    assert result.trace.num_exact == end
    kept = kr.FullReuse(context=context).prefill(model, prompt, store)
    alone = kr.encode_chunk(model, prompt.prefix, prompt.chunks[0])
    for i, (layer, reused) in enumerate(zip(result.cache.layers, kept.cache.layers, strict=True)):
        assert torch.equal(layer.keys[:, :, :end], reused.keys[:, :, :end])
        assert torch.equal(layer.keys[:, :, prompt.prefix.numel() : end], alone.keys[i])
        assert torch.equal(layer.values[:, :, prompt.prefix.numel() : end], alone.values[i])


def test_a_single_exact_chunk_gives_full_recompute_at_any_ratio(model):
    prompt = rag_prompt(chunks=(30,))
    full = kr.FullRecompute().prefill(model, prompt)
    for method in (kr.CacheBlend(ratio=0.1), kr.FullReuse(), kr.LegoLink(k=2)):
        result = method.prefill(model, prompt, stored(method, model, prompt))
        torch.testing.assert_close(result.logits, full.logits, atol=1e-4, rtol=1e-4)
        assert result.trace.num_reused == 0


def test_hooks_are_gone_after_success_and_after_an_error(model):
    class Broken(kr.RandomTokens):
        def scores(self, view):
            return torch.zeros(3)

    def traces():
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.hf.modules())
        return hooks, model.hf.config._attn_implementation

    before = traces()
    prompt = rag_prompt()
    good = kr.CacheBlend(ratio=0.2)
    store = stored(good, model, prompt)
    good.prefill(model, prompt, store)
    assert traces() == before
    with pytest.raises(ValueError, match="one per candidate"):
        kr.CacheBlend(selector=Broken()).prefill(model, prompt, store)

    class Interrupted(kr.HKVD):
        def scores(self, view):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kr.CacheBlend(selector=Interrupted()).prefill(model, prompt, store)
    assert traces() == before
    assert torch.equal(good.prefill(model, prompt, store).logits, good.prefill(model, prompt, store).logits)


def test_selectors_choose_what_they_say(model):
    prompt = rag_prompt(chunks=(30, 30, 30))

    def chosen(selector, ratio=0.2):
        method = kr.CacheBlend(ratio=ratio, selector=selector, schedule="constant")
        rows = method.prefill(model, prompt, stored(method, model, prompt)).trace.selected[-1]
        return [p for p in rows.tolist() if p < prompt.num_context]

    second, third = prompt.chunk_starts[1:]
    assert chosen(kr.FirstTokens()) == [*range(second, second + 6), *range(third, third + 6)]
    windows = chosen(kr.Windows(size=6), ratio=0.2)
    assert len(windows) == 12
    assert all(p - second in range(60) for p in windows)
    starts = [p for p in windows if p - 1 not in windows]
    assert len(starts) <= 2
    assert all((p - second) % 6 == 0 for p in starts)
    assert chosen(kr.RandomTokens(1)) == chosen(kr.RandomTokens(1)) != chosen(kr.RandomTokens(2))


def test_hkvd_chooses_the_largest_deviation_from_full_recompute(model):
    """Layer 1's fresh K/V are exact, so HKVD's deviation there is the true one."""
    prompt = rag_prompt(chunks=(30, 30, 30))
    method = kr.CacheBlend(ratio=0.2, schedule="constant", metric="v")
    store = stored(method, model, prompt)
    rows = method.prefill(model, prompt, store).trace.selected[1]
    full = kr.FullRecompute().prefill(model, prompt).cache.layers[1].values
    reused = kr.FullReuse().prefill(model, prompt, store).cache.layers[1].values
    deviation = (full - reused).square().sum(dim=(0, 1, 3))[: prompt.num_context]
    best = deviation.topk(12).indices.sort().values
    assert rows[rows < prompt.num_context].tolist() == best.tolist()


def test_question_attention_is_that_of_the_reused_cache(model):
    """Against Hugging Face's own eager attention weights over the same cache."""
    prompt = rag_prompt(prefix=0, chunks=(30, 30), question=5)
    seen = []

    class Spy(kr.QuestionAttention):
        def scores(self, view):
            seen.append((view.positions, view.question_attention()))
            return super().scores(view)

    method = kr.CacheBlend(ratio=0.2, selector=Spy(), context="bare")
    store = stored(method, model, prompt)
    method.prefill(model, prompt, store)
    positions, attention = seen[0]
    result = kr.FullReuse(context="bare").prefill(model, prompt, store)
    from kvreuse import compat

    compat.truncate(result.cache, prompt.num_context)
    before = model.hf.config._attn_implementation
    model.hf.set_attn_implementation("eager")
    try:
        out = model.hf(prompt.question[None], output_attentions=True, **{compat.cache_kwarg(model.hf): result.cache})
    finally:
        model.hf.set_attn_implementation(before)
    expected = torch.stack([a[0].mean(dim=(0, 1)) for a in out.attentions])[:, positions]
    torch.testing.assert_close(attention, expected, atol=1e-6, rtol=1e-4)


def test_oracle_deviation_is_zero_for_a_perfect_cache(model):
    prompt = rag_prompt(prefix=0, chunks=(20, 20))
    seen = []

    class Spy(kr.OracleDeviation):
        def scores(self, view):
            seen.append(view.true_deviation("kv"))
            return super().scores(view)

    method = kr.CacheBlend(ratio=0.3, selector=Spy(), context="bare", schedule="constant")
    method.prefill(model, prompt, stored(method, model, prompt))
    assert seen[0].shape == (model.num_layers, 20)
    assert seen[0][0].max() < 1e-8  # layer 0 depends on token and position alone
    assert seen[0][1:].min() > 1e-8


def test_a_finished_request_leaves_nothing_behind(model):
    """No reference cycle keeps a dropped result's K/V alive until the garbage collector comes."""
    prompt = rag_prompt()
    method = kr.CacheBlend(ratio=0.3)
    store = stored(method, model, prompt)
    gc.collect()
    gc.disable()
    try:
        for selector in (None, kr.QuestionAttention(), kr.RandomTokens()):
            result = replace(method, selector=selector).prefill(model, prompt, store)
            keys = weakref.ref(result.cache.layers[0].keys)
            del result
            assert keys() is None
    finally:
        gc.enable()


def test_an_exact_chunk_stays_exact_when_its_prefix_is_gone(model):
    prompt = rag_prompt()
    method, store = kr.CacheBlend(ratio=0.5), kr.KVStore()
    method.encode(model, prompt, store)
    store.delete(method.segments(model, prompt)[0].key(model.fingerprint()))
    trace = method.prefill(model, prompt, store).trace
    first = prompt.chunks[0].numel()
    assert (trace.misses, trace.num_exact) == (1, first)
    assert trace.num_reused == prompt.num_context - prompt.prefix.numel() - first
    kept = set(range(prompt.prefix.numel(), prompt.prefix.numel() + first))
    assert not any(kept & set(rows.tolist()) for rows in trace.selected)


@pytest.mark.parametrize("selector", [kr.RandomTokens(), kr.FirstTokens(), kr.QuestionAttention()], ids=repr)
def test_every_selector_has_the_same_budget_and_none_narrows_by_layer_0(model, selector):
    """On layer 0 nothing deviates: what drops out behind it would be rounding noise."""
    prompt = rag_prompt(chunks=(40, 50, 60))
    method = kr.CacheBlend(ratio=0.2, selector=selector)
    trace = method.prefill(model, prompt, stored(method, model, prompt)).trace
    assert torch.equal(trace.selected[0], trace.selected[1])
    counts = [len(rows) - 6 for rows in trace.selected[1:]]
    assert counts == sorted(counts, reverse=True)
    assert sum(counts) / len(counts) == pytest.approx(0.2 * 110, abs=1)


@pytest.mark.parametrize("asked", ["question_attention", "true_deviation"])
def test_a_selector_in_the_middle_of_a_pass_cannot_start_another(model, asked):
    class Greedy(kr.HKVD):
        def scores(self, view):
            return getattr(view, asked)(*(["kv"] if asked == "true_deviation" else []))

    prompt = rag_prompt()
    method = kr.CacheBlend(selector=Greedy())
    with pytest.raises(ValueError, match="need needs_fresh_kv = False"):
        method.prefill(model, prompt, stored(method, model, prompt))


def test_chunks_that_cannot_be_encoded(model):
    with pytest.raises(ValueError, match="ids is empty"):
        kr.encode_chunk(model, ids(3, 0), ids(0, 0))
    with pytest.raises(ValueError, match="start=2 is inside the 5 context tokens"):
        kr.encode_chunk(model, ids(5, 0), ids(3, 1), start=2)
    with pytest.raises(ValueError, match="no longrope model"):
        kr.encode_chunk(model, ids(5, 0), ids(3, 1), long_rope=True)
    with pytest.raises(ValueError, match="place=-3"):
        kr.rerotate_keys(model, kr.encode_chunk(model, ids(0, 0), ids(3, 1)), -3, 10)


@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral-moe", "phi3-longrope"])
def test_an_mlp_in_blocks_of_rows_is_the_same(name, monkeypatch):
    """Twenty rows, in blocks of about 9: two of ten, no remainder; experts, which look at all rows, stay whole."""
    method, prompt, model = kr.CacheBlend(ratio=0.3), rag_prompt(), tiny_model(name)
    store, sizes = stored(method, model, prompt), []
    mlp = model.layers[1].mlp
    handle = getattr(mlp, "down_proj", mlp).register_forward_pre_hook(lambda _, args: sizes.append(args[0].shape[1]))
    whole = method.prefill(model, prompt, store)
    sizes.clear()
    monkeypatch.setattr(kernels, "_MLP_ROWS", 9)
    blocks = method.prefill(model, prompt, store)
    handle.remove()
    torch.testing.assert_close(blocks.logits, whole.logits, atol=1e-5, rtol=1e-5)
    assert sizes == ([20] if name == "mixtral-moe" else [10, 10])
    assert all("forward" not in layer.mlp.__dict__ for layer in model.layers)
