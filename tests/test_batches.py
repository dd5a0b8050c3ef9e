"""Batches of ragged prompts: every row equals the same prompt run alone."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from tiny import ids, rag_prompt, tiny_model

import kvreuse as kr
from kvreuse.blend.packing import Packing
from kvreuse.blend.row_pass import RowPass
from kvreuse.blend.rows import PackedMask, RowMask

# The same products over matrices of other heights: fp32 rounding over four layers of logits and K/V of order one; the
# largest difference seen is 4e-6.
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
NAMES = ["llama", "qwen3", "gemma2", "gemma3", "phi-partial", "mixtral-moe", "cohere-interleaved", "gpt_neox-partial"]
METHODS = [
    kr.CacheBlend(ratio=0.3),
    kr.CacheBlend(ratio=0.4, schedule="constant", metric="v", context="bare"),
    kr.CacheBlend(ratio=0.3, selector=kr.AttendedDeviation(), context="bos"),
    kr.CacheBlend(ratio=0.3, selector=kr.RandomTokens(seed=1)),
    kr.CacheBlend(ratio=0.3, as_released=True),
    kr.Funnel(ratio=0.3, question_tokens=4),
    kr.Funnel(ratio=0.3, drop="attended"),
    kr.LegoLink(k=3),
    kr.FullReuse(),
]
# Other lengths, other numbers of chunks, one exact chunk alone (nothing to choose), a shared chunk, no prefix.
PROMPTS = [
    rag_prompt(chunks=(17, 13, 19), question=6),
    rag_prompt(chunks=(30,), question=9, seed=1),
    rag_prompt(chunks=(9, 14, 11, 8, 12), question=3, seed=2),
    kr.RagPrompt([], [ids(21, 77), rag_prompt().chunks[1]], ids(7, 78)),
]


def stored(method, model, prompts):
    """A store with all chunks but the third of the third prompt."""
    store = kr.KVStore()
    kept = [replace_chunks(p, [c for j, c in enumerate(p.chunks) if (i, j) != (2, 2)]) for i, p in enumerate(prompts)]
    method.encode(model, kept, store)
    return store


def replace_chunks(prompt, chunks):
    return kr.RagPrompt(prompt.prefix, chunks, prompt.question)


def layers(cache):
    return [(layer.keys, layer.values) for layer in cache.layers]


def assert_row(row, single):
    """Logits and K/V within rounding; the trace the same."""
    torch.testing.assert_close(row.logits, single.logits, **TOLERANCE)
    for ours, alone in zip(layers(row.cache), layers(single.cache), strict=True):
        for a, b in zip(ours, alone, strict=True):
            torch.testing.assert_close(a, b, **TOLERANCE)
    assert row.prompt is single.prompt
    assert [r.tolist() for r in row.trace.selected] == [r.tolist() for r in single.trace.selected]
    for name in ("hits", "misses", "num_exact", "num_reused", "num_forced", "num_checked", "ratio"):
        assert getattr(row.trace, name) == getattr(single.trace, name), name


@pytest.fixture(scope="module")
def models():
    return {name: tiny_model(name) for name in NAMES}


@pytest.fixture(scope="module")
def model(models):
    return models["llama"]


@pytest.fixture(params=NAMES)
def any_model(request, models):
    return models[request.param]


FEW = [METHODS[0], METHODS[1], METHODS[5]]
CASES = [("llama", m) for m in METHODS] + [(name, m) for name in NAMES[1:] for m in FEW]


@pytest.mark.parametrize(("name", "method"), CASES, ids=str)
def test_rows_equal_the_prompts_run_alone(models, name, method):
    any_model = models[name]
    singles = [method.prefill(any_model, p, stored(method, any_model, PROMPTS)) for p in PROMPTS]
    batch = method.prefill(any_model, PROMPTS, stored(method, any_model, PROMPTS))
    assert batch.logits.shape == (len(PROMPTS), any_model.config.vocab_size)
    longest = max(p.num_tokens for p in PROMPTS)
    assert all(t.shape[::2] == (len(PROMPTS), longest) for pair in layers(batch.cache) for t in pair)
    assert [trace.misses for trace in batch.traces] == [0, 0, 1, 0]
    for i, single in enumerate(singles):
        assert_row(batch.row(i), single)


def test_full_recompute_of_a_batch(any_model):
    batch = kr.FullRecompute().prefill(any_model, PROMPTS)
    for i, prompt in enumerate(PROMPTS):
        assert_row(batch.row(i), kr.FullRecompute().prefill(any_model, prompt))


def test_ratio_one_is_full_recompute(any_model):
    method = kr.CacheBlend(ratio=1.0)
    batch = method.prefill(any_model, PROMPTS, stored(method, any_model, PROMPTS))
    full = kr.FullRecompute().prefill(any_model, PROMPTS)
    torch.testing.assert_close(batch.logits, full.logits, **TOLERANCE)


@pytest.mark.parametrize("method", [*METHODS, kr.FullRecompute()], ids=repr)
def test_a_list_of_one_is_the_prompt_bit_for_bit(model, method):
    prompt = PROMPTS[0]
    store = kr.KVStore()
    method.encode(model, prompt, store)
    batch, single = method.prefill(model, [prompt], store), method.prefill(model, prompt, store)
    assert isinstance(batch, kr.BatchPrefill)
    assert torch.equal(batch.logits, single.logits)
    assert all(
        torch.equal(a, b)
        for x, y in zip(layers(batch.cache), layers(single.cache), strict=True)
        for a, b in zip(x, y, strict=True)
    )
    assert model.generate(batch, 6)[0].token_ids == model.generate(single, 6).token_ids


def test_the_order_of_prompts_changes_no_row(model):
    method = kr.CacheBlend(ratio=0.3)
    store = kr.KVStore()
    method.encode(model, PROMPTS, store)
    there, back = method.prefill(model, PROMPTS, store), method.prefill(model, PROMPTS[::-1], store)
    for i in range(len(PROMPTS)):
        assert_row(there.row(i), back.row(len(PROMPTS) - 1 - i))


def test_a_batch_without_any_stored_chunk_is_full_recompute_and_fills_the_store(model):
    method, store = kr.CacheBlend(ratio=0.2), kr.KVStore()
    batch = method.prefill(model, PROMPTS, store)
    full = kr.FullRecompute().prefill(model, PROMPTS)
    assert torch.equal(batch.logits, full.logits)
    assert [t.hits for t in batch.traces] == [0] * len(PROMPTS)
    assert "encode_s" in batch.stages
    again = method.prefill(model, PROMPTS, store)
    assert [t.misses for t in again.traces] == [0] * len(PROMPTS)
    assert_row(again.row(0), method.prefill(model, PROMPTS[0], store))


# -- going on from a batch --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "phi-partial"])
def test_greedy_answers_equal_those_of_single_prompts_ours_and_hugging_face(name):
    model = tiny_model(name)
    method, store = kr.CacheBlend(ratio=0.3), kr.KVStore()
    method.encode(model, PROMPTS, store)
    singles = [method.prefill(model, p, store) for p in PROMPTS]
    model.hf.generation_config.eos_token_id = model.generate(singles[1], 5).token_ids[-1]  # one answer ends early
    expected = [model.generate(s, 12).token_ids for s in singles]
    assert len({len(answer) for answer in expected}) > 1
    batch = method.prefill(model, PROMPTS, store)
    assert [a.token_ids for a in model.generate(batch, 12)] == expected
    assert [a.token_ids for a in model.generate(batch, 12)] == expected  # the cache was cut back
    begun = [model.generate(s, 9, begin=[7, 8]).token_ids for s in singles]
    assert [a.token_ids for a in model.generate(batch, 9, begin=[7, 8])] == begun
    inputs = model.generate_inputs(batch)
    out = model.hf.generate(**inputs, max_new_tokens=6, do_sample=False)
    given = inputs["input_ids"].shape[1]
    ended = model.eos_token_ids
    for row, answer in zip(out[:, given - 1 :].tolist(), expected, strict=True):
        if answer:  # ours does not go on behind an end token that comes first
            stop = next((i for i, token in enumerate(row) if token in ended), len(row))
            assert row[:stop] == answer[:stop]
            assert stop == min(len(answer), 7)


def test_rows_are_scored_and_continued_on_their_own(model):
    method, store = kr.CacheBlend(ratio=0.3), kr.KVStore()
    method.encode(model, PROMPTS, store)
    batch = method.prefill(model, PROMPTS, store)
    for i, prompt in enumerate(PROMPTS):
        single = method.prefill(model, prompt, store)
        torch.testing.assert_close(model.score(batch.row(i), [5, 9]), model.score(single, [5, 9]), **TOLERANCE)
    assert torch.equal(batch.row(-1).logits, batch.row(3).logits)
    assert len(batch) == 4


# -- from disk --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pipelined", [True, False])
@pytest.mark.parametrize("method", [METHODS[0], kr.Funnel(ratio=0.3), kr.FullReuse()], ids=repr)
def test_a_batch_from_disk_equals_one_from_memory(model, method, pipelined, tmp_path):
    memory, disk = kr.KVStore(), kr.KVStore(memory=None, disk=tmp_path)
    for store in (memory, disk):
        method.encode(model, PROMPTS, store)
    expected = method.prefill(model, PROMPTS, memory)
    result = method.prefill(model, PROMPTS, disk, pipelined=pipelined)
    assert torch.equal(result.logits, expected.logits)
    assert all(trace.read_bytes > 0 for trace in result.traces)


def test_what_prompts_share_is_read_once_and_kept_in_memory(model, tmp_path):
    method = kr.FullReuse()
    kr.FullReuse().encode(model, PROMPTS[0], kr.KVStore(memory=None, disk=tmp_path))
    alone = method.prefill(model, PROMPTS[0], kr.KVStore(memory=None, disk=tmp_path)).trace
    store = kr.KVStore(disk=tmp_path)
    twice = method.prefill(model, [PROMPTS[0], PROMPTS[0]], store)
    assert [t.read_bytes for t in twice.traces] == [alone.read_bytes] * 2
    assert store.stats().hits == alone.hits
    assert "promote_s" in twice.stages
    again = method.prefill(model, [PROMPTS[0], PROMPTS[0]], store)
    assert [t.read_bytes for t in again.traces] == [0, 0]
    assert torch.equal(again.logits, twice.logits)


def test_a_damaged_entry_is_a_miss_of_every_row_that_has_it(model, tmp_path):
    method = kr.CacheBlend(ratio=0.3)
    shared = PROMPTS[0].chunks[1]
    prompts = [PROMPTS[0], kr.RagPrompt(PROMPTS[0].prefix, [ids(12, 5), shared], ids(4, 6))]
    others = [replace_chunks(p, [c for c in p.chunks if not torch.equal(c, shared)]) for p in prompts]
    store = kr.KVStore(memory=None, disk=tmp_path)
    method.encode(model, others, store)
    before = set(tmp_path.rglob("*.safetensors"))
    method.encode(model, prompts, store)
    (file,) = set(tmp_path.rglob("*.safetensors")) - before
    data = bytearray(file.read_bytes())
    data[-20] ^= 255  # in the last layer: found when the pass is nearly done
    file.write_bytes(data)
    with pytest.warns(UserWarning, match="is damaged"):
        batch = method.prefill(model, prompts, store)
    assert [t.misses for t in batch.traces] == [1, 1]
    for i, prompt in enumerate(prompts):
        known = kr.KVStore()
        method.encode(model, others, known)
        assert_row(batch.row(i), method.prefill(model, prompt, known))
    assert [t.misses for t in method.prefill(model, prompts, store).traces] == [0, 0]  # stored anew


# -- what cannot be done ----------------------------------------------------------------------------------------------


def test_longrope_prompts_of_both_regimes_have_to_be_split():
    model = tiny_model("phi3-longrope")  # long factors from 41 tokens on
    method, store = kr.CacheBlend(ratio=0.3), kr.KVStore()
    short = [rag_prompt(chunks=(7, 6), question=4, seed=s) for s in (1, 2)]
    long = [rag_prompt(chunks=n, seed=3) for n in ((17, 13, 19), (20, 20))]
    method.encode(model, [*short, *long], store)
    for both in (method, kr.FullRecompute()):
        with pytest.raises(ValueError, match=r"prompt 1 has 60 tokens and prompt 0 22: .* split the batch"):
            both.prefill(model, [short[0], long[0]], store)
    for group in (short, long):
        batch = method.prefill(model, group, store)
        for i, prompt in enumerate(group):
            assert_row(batch.row(i), method.prefill(model, prompt, store))
    crossing = method.prefill(model, [rag_prompt(chunks=(7, 6), question=21), short[0]], store)
    assert len(model.generate(crossing, 1)) == 2
    with pytest.raises(ValueError, match="one by one"):
        model.generate(crossing, 10)


def test_a_funnel_keeps_a_long_prompts_factors_while_it_asks():
    """The question's last tokens alone would make a prompt short enough for the other factors."""
    model = tiny_model("phi3-longrope")
    prompt = rag_prompt(chunks=(8, 7), question=25)
    assert model.long_rope(prompt.num_tokens)
    assert not model.long_rope(prompt.num_context + 4)
    store = kr.KVStore()
    method = kr.Funnel(ratio=0.4, question_tokens=4)
    method.encode(model, prompt, store)
    few, all_ = (replace(method, question_tokens=n).prefill(model, prompt, store) for n in (4, None))
    assert torch.equal(few.logits, all_.logits)


def test_bad_batches(model):
    method, store = kr.CacheBlend(), kr.KVStore()
    for any_method in (method, kr.FullRecompute()):
        with pytest.raises(ValueError, match="list of prompts is empty"):
            any_method.prefill(model, [], store)
        with pytest.raises(TypeError, match="prompt is a str"):
            any_method.prefill(model, [PROMPTS[0], "text"], store)
    with pytest.raises(TypeError, match="one prompt at a time"):
        kr.PrefixCaching().prefill(model, PROMPTS, store)
    with pytest.raises(kr.PromptTooLongError):
        method.prefill(model, [PROMPTS[0], rag_prompt(chunks=(200, 80))], store)

    with model.record(kr.SelectedTokens()), pytest.raises(ValueError, match="one prompt at a time"):
        method.prefill(model, PROMPTS, store)
    with model.record(kr.SelectedTokens()) as recording:
        method.prefill(model, PROMPTS[:1], store)
    assert recording.selected_tokens.shape == (model.num_layers, PROMPTS[0].num_tokens)

    @dataclass(frozen=True)
    class Mixed(kr.CacheBlend):
        def request_fusor(self, model, prompt, segments, fingerprint):
            return replace(self.fusor(), measure="v" if prompt is PROMPTS[0] else "k")

    with pytest.raises(ValueError, match="more than their ratios"):
        Mixed().prefill(model, PROMPTS, store)


def test_each_row_may_have_its_own_ratio(model):
    @dataclass(frozen=True)
    class ByLength(kr.CacheBlend):
        def request_fusor(self, model, prompt, segments, fingerprint):
            return replace(self.fusor(), ratio=0.0 if prompt is PROMPTS[0] else 4 / prompt.num_tokens)

    method, store = ByLength(), kr.KVStore()
    method.encode(model, PROMPTS, store)
    batch = method.prefill(model, PROMPTS, store)
    for i, prompt in enumerate(PROMPTS):
        assert_row(batch.row(i), method.prefill(model, prompt, store))


@pytest.mark.parametrize("needs_fresh", [True, False])
def test_hooks_are_gone_after_an_error_in_one_rows_selector(model, needs_fresh):
    class Fails(kr.Selector):
        needs_fresh_kv: ClassVar[bool] = needs_fresh

        def scores(self, view):
            if view.positions.numel() == 32:  # the first prompt's; its row is not the first that is asked
                raise KeyboardInterrupt
            return view.offset.float()

    def traces():
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.hf.modules())
        return hooks, model.hf.config._attn_implementation

    before = traces()
    method, store = kr.CacheBlend(ratio=0.2, selector=Fails()), kr.KVStore()
    method.encode(model, PROMPTS, store)
    with pytest.raises(KeyboardInterrupt):
        method.prefill(model, PROMPTS[::-1], store)
    assert traces() == before
    good = kr.CacheBlend(ratio=0.2)
    assert_row(good.prefill(model, PROMPTS, store).row(0), good.prefill(model, PROMPTS[0], store))


# -- parts ------------------------------------------------------------------------------------------------------------


def test_packing():
    packing = Packing.of([3, 5, 2])
    assert packing.starts == (2, 5, 13)
    assert packing.num_slots == 15
    own = [torch.tensor([0, 2]), torch.tensor([1, 4]), torch.tensor([1])]
    slots = packing.join(own)
    assert slots.tolist() == [2, 4, 6, 9, 14]
    assert [s.tolist() for s in packing.split(slots)] == [s.tolist() for s in own]
    assert packing.positions(slots).tolist() == [0, 2, 1, 4, 1]
    assert packing.ids([ids(n, n) for n in (3, 5, 2)])[5:10].equal(ids(5, 5))
    buffer = torch.arange(15.0).view(1, 1, 15, 1) + 1
    packing.clear_padding(buffer)
    assert packing.batch(buffer)[..., 0].tolist() == [[[0, 0, 3, 4, 5]], [[6, 7, 8, 9, 10]], [[0, 0, 0, 14, 15]]]
    assert Packing.of([7]) == Packing((0,), (7,))


@pytest.mark.parametrize("window", [None, 3])
def test_a_packed_mask_shows_each_row_its_own_prompt_alone(window):
    parts = tuple(RowMask(torch.tensor(rows), n, window) for rows, n in (([1, 3], 4), ([0, 5], 6)))
    mask = PackedMask(parts, (2, 6), 12)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, n, 8, generator=g) for h, n in ((6, 4), (2, 12), (2, 12)))
    dense = mask.additive(torch.float32)
    seen = dense == 0
    assert seen[0].nonzero()[:, 0].tolist() == [2, 3]
    assert seen[2].nonzero()[:, 0].tolist() == [6]
    assert seen[3].nonzero()[:, 0].tolist() == list(range(6 if window is None else 9, 12))
    scores = q @ k.repeat_interleave(3, dim=1).transpose(-1, -2) * 8**-0.5 + dense
    expected = scores.softmax(dim=-1)
    torch.testing.assert_close(mask.attend(q, k, v, None), expected @ v.repeat_interleave(3, dim=1))
    for own, (_, rows, keys) in zip(mask.weights(q, k, None), mask.cut(), strict=True):
        torch.testing.assert_close(own, expected[:, :, rows, keys])


def test_a_pass_takes_a_single_prompts_length_for_its_packing(model):
    prompt = PROMPTS[0]
    full = kr.FullRecompute().prefill(model, prompt)
    last = torch.tensor([prompt.num_tokens - 1])
    from kvreuse.blend.cache import new_blend_cache

    cache = new_blend_cache([(k.clone(), v.clone()) for k, v in layers(full.cache)])
    logits = RowPass(model, cache, last, prompt.num_tokens).run(prompt.input_ids)
    torch.testing.assert_close(logits, full.logits, **TOLERANCE)
