"""Selection rules: what they cost, what they look at, and the funnel."""

from itertools import pairwise

import pytest
import torch
from tiny import ARCHITECTURES, rag_prompt, tiny_model

import kvreuse as kr
from kvreuse import compat
from kvreuse.blend.budget import ratio_for_budget, spent_budget
from kvreuse.blend.schedule import Constant, Gradual, layer_ratio

SCHEDULES = [Constant(), Gradual(), Gradual(0.9), kr.Narrowing(), kr.Narrowing(1.4), kr.Narrowing(2.5, 2.0)]
RULES = [
    kr.CacheBlend(),
    kr.CacheBlend(metric="v", schedule="constant"),
    kr.CacheBlend(selector=kr.AttendedDeviation()),
    kr.CacheBlend(selector=kr.FirstTokens(), schedule="constant"),
    kr.CacheBlend(selector=kr.QuestionAttention(), schedule="gradual"),
    kr.CacheBlend(selector=kr.RandomTokens(), schedule=kr.Narrowing()),
    kr.Funnel(),
    kr.Funnel(start=1.8, drop="attended", question_tokens=None),
    kr.Funnel(start=1.8, drop="deviation", question_tokens=2),
]


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_hidden_layers=6)


@pytest.fixture(scope="module")
def prompt():
    return rag_prompt(chunks=(40, 70, 90), question=9)


def prefill(method, model, prompt):
    store = kr.KVStore()
    method.encode(model, prompt, store)
    return method.prefill(model, prompt, store)


# -- budget ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
@pytest.mark.parametrize("layers", [1, 2, 4, 18, 30])
def test_a_schedule_falls_and_keeps_its_average(schedule, layers):
    for ratio in (0.0, 0.05, 0.15, 0.5, 0.9, 1.0):
        ratios = [layer_ratio(schedule, ratio, layer, layers) for layer in range(layers)]
        assert all(-1e-12 <= r <= 1 + 1e-12 for r in ratios)
        assert all(a >= b - 1e-12 for a, b in pairwise(ratios))
        behind = ratios if schedule.from_layer_0 else ratios[1:]
        if behind:
            assert sum(behind) / len(behind) == pytest.approx(ratio)
        if ratio in (0.0, 1.0):
            assert ratios == pytest.approx([ratio] * layers)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
@pytest.mark.parametrize("full_layers", [0, 1, 2])
def test_the_ratio_for_a_budget_spends_it(schedule, full_layers):
    for layers in (4, 18, 30):
        for budget in (0.05, 0.15, 0.3, 0.6, 1.0):
            if budget < full_layers / layers:
                with pytest.raises(ValueError, match=f"{full_layers} full layers of {layers} cost"):
                    ratio_for_budget(budget, layers, schedule, full_layers)
                continue
            ratio = ratio_for_budget(budget, layers, schedule, full_layers)
            assert 0 <= ratio <= 1
            assert spent_budget(ratio, layers, schedule, full_layers) == pytest.approx(budget, abs=1e-9)


def test_full_layers_are_paid_for():
    """Worked by hand: 30 layers, two of them full, leave (15% x 30 - 2) / 28 for each of the others."""
    assert ratio_for_budget(0.15, 30, Constant(), 2) == pytest.approx(2.5 / 28)
    assert ratio_for_budget(0.15, 30, Constant(), 0) == pytest.approx(0.15)
    with pytest.raises(ValueError, match=r"budget=1\.2"):
        ratio_for_budget(1.2, 30, Constant())


@pytest.mark.parametrize("method", RULES, ids=repr)
def test_every_rule_spends_the_budget_it_is_given(model, prompt, method):
    from experiments.budgets import AtBudget

    trace = prefill(AtBudget("rule", method, 0.4), model, prompt).trace
    assert trace.num_reused == 160
    # counts are rounded to whole tokens on every layer: half a token of 160
    assert trace.budget == pytest.approx(0.4, abs=0.5 / 160)
    by_hand = [len(rows) - 9 for rows in trace.selected]
    fresh = getattr(method, "selector", None) is None and isinstance(method, kr.CacheBlend)
    if fresh or isinstance(getattr(method, "selector", None), kr.AttendedDeviation):
        assert by_hand[0] == 160
        by_hand[1] = 160  # all K/V are fresh on the check layer
    assert trace.budget == pytest.approx(sum(by_hand) / (6 * 160))


def test_budgets_of_methods_that_select_nothing(model, prompt):
    assert prefill(kr.FullReuse(), model, prompt).trace.budget == 0
    full = kr.FullRecompute().prefill(model, prompt).trace.budget
    assert full != full  # nothing was reused


def test_what_a_budget_is_made_of_is_checked():
    from experiments.budgets import AtBudget

    with pytest.raises(TypeError, match="give a method with a ratio"):
        AtBudget("rule", kr.FullRecompute(), 0.1)
    with pytest.raises(TypeError, match="give a method with a ratio"):
        AtBudget("rule", kr.LegoLink(), 0.1)


# -- what rules look at ---------------------------------------------------------------------------------------------


def eager_attention(model, cache, ids, start):
    """Hugging Face's own eager attention of ``ids`` behind ``start`` cached tokens: [L, H, T, start + T]."""
    compat.truncate(cache, start)
    positions = torch.arange(start, start + ids.numel())[None]
    before = model.hf.config._attn_implementation
    model.hf.set_attn_implementation("eager")
    try:
        kwargs = {compat.cache_kwarg(model.hf): cache, "position_ids": positions, "output_attentions": True}
        return torch.cat(model.hf(ids[None], **kwargs).attentions)
    finally:
        model.hf.set_attn_implementation(before)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma2", "gemma3", "qwen3", "cohere-interleaved"])
@pytest.mark.parametrize("asked", [None, 4, 100])
def test_question_attention_is_eager_attention_over_the_reused_cache(name, asked):
    model, prompt = tiny_model(name), rag_prompt(chunks=(17, 13, 19), question=9)
    seen = []

    class Spy(kr.Funnel):
        def fusor(self):
            fusor = super().fusor()

            class Look(kr.QuestionAttention):
                def scores(self, view):
                    seen.append((view.positions, view.question_attention()))
                    return super().scores(view)

            from dataclasses import replace

            return replace(fusor, selector=Look())

    method = Spy(question_tokens=asked)
    prefill(method, model, prompt)
    positions, attention = seen[0]
    cache = prefill(kr.FullReuse(), model, prompt).cache
    question = prompt.question[-asked:] if asked else prompt.question
    expected = eager_attention(model, cache, question, prompt.num_context).mean(dim=(1, 2))
    if name.startswith(("mistral", "gemma")):  # a window's cache hands eager attention fewer keys: compare what it has
        expected = torch.nn.functional.pad(expected, (prompt.num_context + question.numel() - expected.shape[1], 0))
    torch.testing.assert_close(attention, expected[:, positions], atol=1e-5, rtol=1e-4)


def test_question_attention_is_asked_once(model, prompt, monkeypatch):
    from kvreuse.blend import request

    calls = []
    true = request.question_attention
    monkeypatch.setattr(request, "question_attention", lambda *a: calls.append(1) or true(*a))
    prefill(kr.Funnel(), model, prompt)
    prefill(kr.CacheBlend(selector=kr.AttendedDeviation()), model, prompt)
    assert len(calls) == 2


def test_attended_deviation_is_deviation_times_attention(model, prompt):
    seen = {}

    class Spy(kr.AttendedDeviation):
        def scores(self, view):
            seen.update(deviation=view.deviation("kv"), attention=view.question_attention(), mine=super().scores(view))
            return seen["mine"]

    result = prefill(kr.CacheBlend(ratio=0.2, selector=Spy(), schedule="constant"), model, prompt)
    expected = seen["deviation"] * seen["attention"][2:].mean(dim=0)
    torch.testing.assert_close(seen["mine"], expected)
    best = expected.topk(32).indices.sort().values + 45  # prefix and first chunk are exact
    assert result.trace.selected[1][:32].tolist() == best.tolist()


# -- the funnel -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop", ["ahead", "attended", "deviation"])
@pytest.mark.parametrize("question_tokens", [None, 3])
def test_the_funnel_only_narrows(model, prompt, drop, question_tokens):
    method = kr.Funnel(ratio=0.25, start=1.8, drop=drop, question_tokens=question_tokens)
    result = prefill(method, model, prompt)
    question = set(range(prompt.num_context, prompt.num_tokens))
    sets = [set(rows.tolist()) for rows in result.trace.selected]
    assert all(later < earlier for earlier, later in pairwise(sets))
    assert all(question <= rows for rows in sets)
    counts = [len(rows) - 9 for rows in sets]
    schedule = kr.Narrowing(1.8)
    assert counts == [round(160 * schedule.ratio(0.25, layer, 6)) for layer in range(6)]
    assert counts[0] == 72  # 1.8 x 0.25 x 160
    assert counts[-1] == 8
    assert result.trace.num_checked == 0


def test_the_funnel_starts_with_what_the_question_attends_to(model, prompt):
    funnel = prefill(kr.Funnel(ratio=0.2, start=1.4, question_tokens=None), model, prompt)
    attention = prefill(kr.CacheBlend(ratio=0.28, selector=kr.QuestionAttention(), schedule="constant"), model, prompt)
    assert torch.equal(funnel.trace.selected[0], attention.trace.selected[0])


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_funnel_at_the_ends_of_the_scale(name):
    """Ratio 1 is full recompute, ratio 0 full reuse; fp32 rounding over four layers, as in test_architectures."""
    model, prompt = tiny_model(name), rag_prompt()
    full = kr.FullRecompute().prefill(model, prompt)
    every = prefill(kr.Funnel(ratio=1.0, question_tokens=3), model, prompt)
    torch.testing.assert_close(every.logits, full.logits, atol=1e-4, rtol=1e-4)
    for ours, theirs in zip(every.cache.layers, full.cache.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(ours.values, theirs.values, atol=1e-4, rtol=1e-4)
    none = prefill(kr.Funnel(ratio=0.0), model, prompt)
    assert torch.equal(none.logits, prefill(kr.FullReuse(), model, prompt).logits)


def test_the_question_pass_leaves_no_trace_in_the_blend(model, prompt):
    """Which question tokens were asked decides who is chosen and nothing else."""
    method = kr.CacheBlend(ratio=0.3, selector=kr.FirstTokens(), schedule="constant")
    plain = prefill(method, model, prompt)

    class Curious(kr.FirstTokens):
        def scores(self, view):
            view.question_attention()
            return super().scores(view)

    curious = prefill(kr.CacheBlend(ratio=0.3, selector=Curious(), schedule="constant"), model, prompt)
    assert torch.equal(plain.logits, curious.logits)
    for a, b in zip(plain.cache.layers, curious.cache.layers, strict=True):
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.values, b.values)


def test_the_question_pass_counts_as_checking(model, prompt):
    stages = prefill(kr.Funnel(), model, prompt).trace.stages
    assert stages["check_s"] > 0
    assert set(stages) <= {"lookup_s", "load_s", "rotate_s", "check_s", "recompute_s", "first_token_s"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ratio": 1.5}, "ratio=1.5"),
        ({"start": 0.5}, "start=0.5: give a number from 1 to"),
        ({"drop": "never"}, "drop='never': choose one of"),
        ({"question_tokens": 0}, "question_tokens=0"),
        ({"from_layer": 1.0}, "from_layer=1.0"),
        ({"metric": "q"}, "metric='q'"),
        ({"context": "alone"}, "context='alone'"),
    ],
)
def test_a_wrong_setting_is_named(settings, words):
    with pytest.raises(ValueError, match=words):
        kr.Funnel(**settings)
    with pytest.raises(ValueError, match="power=0"):
        kr.Narrowing(power=0)
