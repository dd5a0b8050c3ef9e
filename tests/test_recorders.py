"""Recorders against Hugging Face's own attention weights and full recompute's own K/V; what they leave behind."""

import copy
import io
import math
import time
from itertools import pairwise

import pytest
import torch
from scipy.stats import spearmanr
from tiny import ARCHITECTURES, ids, rag_prompt, tiny_model
from transformers import DynamicCache

import kvreuse as kr
from kvreuse import compat
from kvreuse.record.rank import spearman

EVERYTHING = (
    kr.KVDeviation(),
    kr.AttentionDeviation(),
    kr.AttentionMatrix(),
    kr.RankCorrelation(),
    kr.SelectedTokens(),
)
METHODS = (
    kr.FullRecompute(),
    kr.PrefixCaching(insert=False),
    kr.FullReuse(),
    kr.LegoLink(k=3),
    kr.CacheBlend(ratio=0.3),
    kr.CacheBlend(ratio=0.3, schedule="constant", context="bare"),
    kr.CacheBlend(ratio=0.3, selector=kr.QuestionAttention()),
    kr.CacheBlend(ratio=0.3, selector=kr.OracleDeviation()),
    kr.CacheBlend(ratio=0.3, context="bos", as_released=True),
)
# fp32: queries are computed again on other shapes, which rounds differently; weights are at most 1.
ATOL = 1e-5


@pytest.fixture(params=sorted(ARCHITECTURES), scope="module")
def model(request):
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def llama():
    return tiny_model()


@pytest.fixture(scope="module")
def prompt():
    return rag_prompt()


def stored(method, model, prompt):
    store = kr.KVStore()
    method.encode(model, prompt, store)
    return store


def recorded(model, method, prompt, *recorders, store=None):
    store = stored(method, model, prompt) if store is None else store
    with model.record(*recorders) as rec:
        result = method.prefill(model, prompt, store)
    return rec, result


def eager_weights(model, input_ids, first, cache):
    """[L, H, n, S] of a copy of the model with Hugging Face's eager attention, ``input_ids`` following ``cache``."""
    hf = copy.deepcopy(model.hf)
    hf.set_attn_implementation("eager")
    positions = torch.arange(first, first + input_ids.numel())
    with torch.inference_mode():
        out = hf(
            input_ids=input_ids[None],
            position_ids=positions[None],
            use_cache=True,
            output_attentions=True,
            **{compat.cache_kwarg(hf): cache},
        )
    return torch.stack([a[0] for a in out.attentions])


def context_cache(result):
    """A plain cache with the context's K/V of a prefilled prompt."""
    cache, n = DynamicCache(), result.prompt.num_context
    for layer, held in enumerate(result.cache.layers):
        cache.update(held.keys[:, :, :n].clone(), held.values[:, :, :n].clone(), layer)
    return cache


def hooks(model):
    """How many hooks hang on the model: on decoder layers, on attention modules, and on all modules together."""
    counts = [
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules]
        for modules in (model.layers, map(compat.attention_module, model.layers), model.hf.modules())
    ]
    return tuple(map(sum, counts))


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_recording_changes_no_bit(model, prompt, method):
    store = stored(method, model, prompt)
    before = hooks(model)
    plain = method.prefill(model, prompt, store)
    rec, result = recorded(model, method, prompt, *EVERYTHING, store=store)
    assert hooks(model) == before
    assert torch.equal(plain.logits, result.logits)
    for a, b in zip(plain.cache.layers, result.cache.layers, strict=True):
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.values, b.values)
    assert list(plain.trace.stages) == list(result.trace.stages)
    assert all(torch.equal(a, b) for a, b in zip(plain.trace.selected, result.trace.selected, strict=True))
    layers, n = model.num_layers, prompt.num_context
    assert rec.kv_deviation.shape == (layers, n)
    assert rec.attention_deviation.shape == (layers,)
    assert rec.rank_correlation.shape == (layers - 1,)
    assert rec.selected_tokens.shape == (layers, prompt.num_tokens)
    assert rec.attention_matrix.shape[::2] == (layers, prompt.question.numel())


def test_full_recomputes_attention_is_hugging_faces_own(model, prompt):
    rec, _ = recorded(model, kr.FullRecompute(), prompt, kr.AttentionMatrix(tokens="all"))
    expected = eager_weights(model, prompt.input_ids, 0, DynamicCache())
    torch.testing.assert_close(rec.attention_matrix, expected, atol=ATOL, rtol=1e-4)


@pytest.mark.parametrize("method", [m for m in METHODS if not getattr(m, "as_released", False)], ids=repr)
def test_the_questions_attention_is_that_over_the_blended_kv(model, prompt, method):
    """Independent: Hugging Face decodes the question over the context's K/V that the method ended with."""
    rec, result = recorded(model, method, prompt, kr.AttentionMatrix(), kr.AttentionDeviation())
    expected = eager_weights(model, prompt.question, prompt.num_context, context_cache(result))
    torch.testing.assert_close(rec.attention_matrix, expected, atol=ATOL, rtol=1e-4)
    full = eager_weights(model, prompt.input_ids, 0, DynamicCache())[:, :, -prompt.question.numel() :]
    difference = (expected - full)[..., : prompt.num_context]
    torch.testing.assert_close(rec.attention_deviation, difference.flatten(1).norm(dim=1), atol=1e-4, rtol=1e-3)


def test_kv_deviation_is_the_squared_distance_to_full_recompute(model, prompt):
    for metric in ("k", "v", "kv"):
        rec, result = recorded(model, kr.FullReuse(), prompt, kr.KVDeviation(metric))
        _, full = model.prefill(prompt.input_ids)
        n, at_first_chunk = prompt.num_context, prompt.chunk_starts[1]
        for layer, (ours, true) in enumerate(zip(result.cache.layers, full.layers, strict=True)):
            parts = {"k": [(ours.keys, true.keys)], "v": [(ours.values, true.values)]}
            parts["kv"] = parts["k"] + parts["v"]
            by_hand = sum((a - b)[0, :, :n].transpose(0, 1).flatten(1).square().sum(1) for a, b in parts[metric])
            torch.testing.assert_close(rec.kv_deviation[layer], by_hand)
        # layer 0 depends on token and position alone; prefix and first chunk are exact. K/V here are of order 1.
        assert float(rec.kv_deviation[0].max()) < 1e-6
        assert float(rec.kv_deviation[:, :at_first_chunk].max()) < 1e-6
        assert float(rec.kv_deviation[1:, at_first_chunk:].min(dim=1).values.max()) > 1e-4


def test_deviations_vanish_with_the_ratio(llama, prompt):
    sums = []
    for ratio in (0.0, 0.2, 0.5, 1.0):
        method = kr.CacheBlend(ratio=ratio, selector=kr.OracleDeviation())
        rec, _ = recorded(llama, method, prompt, kr.KVDeviation(), kr.AttentionDeviation())
        sums.append((float(rec.kv_deviation.sum()), float(rec.attention_deviation.mean())))
    assert sums == sorted(sums, reverse=True)
    assert [a > b for a, b in zip(sums[-2], sums[-1], strict=True)] == [True, True]
    assert sums[-1][0] < 1e-6
    assert sums[-1][1] < 1e-4


def test_released_rows_are_masked_by_rank_and_missing_ones_are_nan(llama, prompt):
    method = kr.CacheBlend(ratio=0.3, context="bos", as_released=True)
    rec, result = recorded(llama, method, prompt, kr.AttentionMatrix(tokens="all"))
    total = prompt.num_tokens
    for layer, rows in enumerate(result.trace.selected):
        weights = rec.attention_matrix[layer]
        missing = torch.ones(total, dtype=torch.bool)
        missing[rows] = False
        assert bool(weights[:, missing].isnan().all())
        torch.testing.assert_close(weights[:, rows].sum(-1), torch.ones(weights.shape[0], rows.numel()))
        last_seen = [int(weights[0, r].nonzero().max()) for r in rows]
        by_rank = list(range(total - rows.numel(), total)) if layer else rows.tolist()
        assert last_seen == by_rank


def test_rows_that_did_not_run_are_nan_and_the_others_see_only_what_stands_before(llama, prompt):
    rec, result = recorded(llama, kr.CacheBlend(ratio=0.3), prompt, kr.AttentionMatrix((1, -1), tokens="all"))
    for weights, rows in zip(rec.attention_matrix, (result.trace.selected[1], result.trace.selected[-1]), strict=True):
        assert sorted(set((~weights.isnan()).nonzero()[:, 1].tolist())) == rows.tolist()
        future = torch.ones(prompt.num_tokens, prompt.num_tokens).triu(1).bool()[rows]
        assert float(weights[:, rows][:, future].abs().max()) == 0


def test_selected_tokens_are_the_traces(llama, prompt):
    rec, result = recorded(llama, kr.CacheBlend(ratio=0.3), prompt, kr.SelectedTokens())
    found = [row.nonzero()[:, 0].tolist() for row in rec.selected_tokens]
    assert found == [rows.tolist() for rows in result.trace.selected]


def test_rank_correlation_is_spearmans_over_the_reused_tokens(llama, prompt):
    rec, result = recorded(llama, kr.FullReuse(), prompt, kr.RankCorrelation(), kr.KVDeviation())
    reused = rec.kv_deviation[:, prompt.chunk_starts[1] :]
    assert result.trace.reused.tolist() == list(range(prompt.chunk_starts[1], prompt.num_context))
    expected = [spearmanr(a, b).statistic for a, b in pairwise(reused[1:])]
    assert rec.rank_correlation[1:].tolist() == pytest.approx(expected, abs=1e-6)
    assert bool(rec.rank_correlation[0].isnan())


def test_spearman_shares_the_ranks_of_equal_values():
    g = torch.Generator().manual_seed(0)
    for high in (3, 1000):
        a, b = (torch.randint(0, high, (50,), generator=g).float() for _ in range(2))
        assert spearman(a, b) == pytest.approx(spearmanr(a, b).statistic, abs=1e-12)
    assert spearman(torch.arange(5.0), torch.arange(5.0).exp()) == pytest.approx(1.0)
    assert math.isnan(spearman(torch.zeros(3), torch.arange(3.0)))
    with pytest.raises(ValueError, match="same length"):
        spearman(torch.zeros(3), torch.zeros(4))


def test_misses_are_recomputed_and_do_not_deviate(llama, prompt):
    method = kr.FullReuse()
    known = kr.RagPrompt(prompt.prefix, [prompt.chunks[0], prompt.chunks[2]], prompt.question)
    rec, result = recorded(
        llama, method, prompt, kr.KVDeviation(), kr.RankCorrelation(), store=stored(method, llama, known)
    )
    first, _, third = prompt.chunk_starts
    assert result.trace.misses == 1
    assert result.trace.reused.tolist() == list(range(third, prompt.num_context))
    assert float(rec.kv_deviation[:, first:third].max()) < 1e-6 < float(rec.kv_deviation[1:, third:].max())


def test_hooks_are_gone_after_an_error_and_the_model_records_again(llama, prompt):
    class Broken(kr.HKVD):
        def scores(self, view):
            raise KeyboardInterrupt

    method = kr.CacheBlend(ratio=0.3)
    store = stored(method, llama, prompt)
    before = hooks(llama)
    with llama.record(*EVERYTHING):
        inside = hooks(llama)
    # the count looks where the hooks are: one on every layer and one on every attention module
    assert [a - b for a, b in zip(inside, before, strict=True)] == [llama.num_layers, llama.num_layers, 8]
    with pytest.raises(KeyboardInterrupt), llama.record(*EVERYTHING):
        kr.CacheBlend(selector=Broken()).prefill(llama, prompt, store)
    assert hooks(llama) == before
    recording = llama.record(*EVERYTHING)
    rec = recording.__enter__()
    method.prefill(llama, prompt, store)
    assert recording.__exit__(ZeroDivisionError, ZeroDivisionError(), None) is False
    assert hooks(llama) == before
    assert rec.kv_deviation.shape[0] == llama.num_layers  # what was seen before the error stays
    recorded(llama, method, prompt, *EVERYTHING, store=store)


def test_recorders_without_attention_need_no_hook(llama):
    before = hooks(llama)
    with llama.record(kr.KVDeviation(), kr.RankCorrelation(), kr.SelectedTokens()):
        assert hooks(llama) == before


def test_the_reference_runs_once_per_prompt_and_in_no_stage(llama, prompt, monkeypatch):
    runs, prefill = [], llama.prefill

    def slow(input_ids):
        runs.append(input_ids)
        time.sleep(0.5)
        return prefill(input_ids)

    reuse, blend = kr.FullReuse(), kr.CacheBlend(ratio=0.3)
    store = stored(reuse, llama, prompt)
    other = rag_prompt(seed=1)
    reuse.encode(llama, other, store)
    monkeypatch.setattr(llama, "prefill", slow)
    with llama.record(kr.KVDeviation(), kr.AttentionDeviation()) as rec:
        a = reuse.prefill(llama, prompt, store)
        reused = rec.kv_deviation
        b = blend.prefill(llama, prompt, store)
        assert float(rec.kv_deviation.sum()) < float(reused.sum())
        assert len(runs) == 1
        c = reuse.prefill(llama, other, store)
    assert len(runs) == 2
    assert torch.equal(runs[1], other.input_ids)
    assert all(result.ttft_s < 0.5 for result in (a, b, c))
    assert rec.prompt is other


def test_an_answer_goes_on_unrecorded(llama, prompt):
    method = kr.CacheBlend(ratio=0.3)
    store = stored(method, llama, prompt)
    alone, _ = recorded(llama, method, prompt, kr.AttentionMatrix(), store=store)
    plain = method.answer(llama, prompt, store, max_new_tokens=5)
    with llama.record(kr.AttentionMatrix()) as rec:
        answer = method.answer(llama, prompt, store, max_new_tokens=5)
    assert answer.token_ids == plain.token_ids
    assert torch.equal(rec.attention_matrix, alone.attention_matrix)


def test_frames_have_a_row_per_number(llama, prompt):
    rec, _ = recorded(llama, kr.CacheBlend(ratio=0.3), prompt, *EVERYTHING)
    layers, n, total, asked = llama.num_layers, prompt.num_context, prompt.num_tokens, prompt.question.numel()
    sizes = {
        "kv_deviation": layers * n,
        "attention_deviation": layers,
        "attention_matrix": layers * 6 * asked * total,
        "rank_correlation": layers - 1,
        "selected_tokens": layers * total,
    }
    for name, size in sizes.items():
        frame = rec.frame(name)
        assert len(frame) == size
        assert torch.equal(torch.tensor(frame[name].to_numpy().copy()), rec[name].flatten()) or rec[name].isnan().any()
    together = rec.frame()
    assert together.groupby("quantity").size().to_dict() == sizes
    deviation = rec.frame("kv_deviation")
    by_chunk = deviation[deviation.layer == 0].groupby("chunk").size().to_dict()
    assert by_chunk == {-1: prompt.prefix.numel()} | {i: c.numel() for i, c in enumerate(prompt.chunks)}
    matrix = rec.frame("attention_matrix")
    row = matrix[(matrix.layer == 2) & (matrix["head"] == 3) & (matrix.position == total - 1)]
    assert row.attention_matrix.tolist() == rec.attention_matrix[2, 3, -1].tolist()


@pytest.mark.parametrize("name", [None, *(r.name for r in EVERYTHING)])
def test_every_quantity_is_drawn(llama, prompt, name):
    rec, _ = recorded(llama, kr.FullReuse(), prompt, *EVERYTHING)
    figure, file = rec.plot(name), io.BytesIO()
    figure.savefig(file, dpi=50)
    assert len(file.getvalue()) > 3000
    axes = [a for a in figure.axes if a.get_title()]
    assert len(axes) == (1 if name else len(EVERYTHING))
    assert all(a.get_xlabel() for a in axes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: m.record().__enter__(), "no recorder"),
        (lambda m: m.record(kr.KVDeviation(), kr.KVDeviation("v")).__enter__(), "two recorders write kv_deviation"),
        (lambda m: m.record(kr.AttentionMatrix((9,))).__enter__(), "layers 0 to 3"),
        (lambda m: kr.AttentionMatrix((1, 1)), "each once"),
        (lambda m: kr.AttentionDeviation(tokens=0), "tokens=0"),
        (lambda m: kr.AttentionMatrix(tokens="last"), "tokens='last'"),
        (lambda m: kr.KVDeviation("x"), "metric='x'"),
        (lambda m: kr.RankCorrelation("x"), "metric='x'"),
    ],
)
def test_wrong_requests_say_so(llama, make, message):
    before = hooks(llama)
    with pytest.raises(ValueError, match=message):
        make(llama)
    assert hooks(llama) == before


def test_reading_what_is_not_there_says_so(llama, prompt):
    with llama.record(kr.SelectedTokens()) as rec:
        with pytest.raises(ValueError, match="nothing was prefilled"):
            _ = rec.selected_tokens
        with pytest.raises(RuntimeError, match="being recorded already"), llama.record(kr.KVDeviation()):
            pass
        kr.FullRecompute().prefill(llama, prompt)
    for read in (lambda: rec.kv_deviation, lambda: rec.frame("kv_deviation"), lambda: rec.plot("kv_deviation")):
        with pytest.raises(KeyError, match="kv_deviation was not recorded; this recording has selected_tokens"):
            read()


def test_attention_code_of_its_own_is_refused_with_a_remedy(prompt):
    """A model whose attention neither goes through the interface nor returns weights."""
    model = tiny_model()

    class Silent(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, *args, **kwargs):
            return self.inner(*args, **kwargs)[0], None

    for layer in model.layers:
        layer.self_attn = Silent(layer.self_attn)
    model.hf.set_attn_implementation("eager")
    with pytest.raises(kr.UnsupportedModelError, match="eager"), model.record(kr.AttentionMatrix()):
        kr.FullRecompute().prefill(model, prompt)
    assert hooks(model) == (0, 0, 0)


def test_longer_windows_of_the_prompt_can_be_looked_at(llama):
    prompt = kr.RagPrompt(ids(4, 1), [ids(20, 2), ids(20, 3)], ids(3, 4))
    rec, _ = recorded(llama, kr.FullRecompute(), prompt, kr.AttentionMatrix((2,), tokens=10))
    every, _ = recorded(llama, kr.FullRecompute(), prompt, kr.AttentionMatrix((2,), tokens="all"))
    torch.testing.assert_close(rec.attention_matrix, every.attention_matrix[:, :, -10:], atol=ATOL, rtol=1e-4)
    assert rec.attention_matrix.shape == (1, 6, 10, prompt.num_tokens)
