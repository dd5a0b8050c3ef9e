"""Layers at fixed shapes: what a CUDA graph replays is replayed here operation by operation on the same memory."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import ARCHITECTURES, rag_prompt, save_model, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

import kvreuse as kr
from benchmarks import gpu
from kvreuse.blend.fixed_shape import bucket
from kvreuse.blend.graphs import LayerGraphs

DENSE = {"gemma2"}  # soft-capping takes dense masks: such models run as they are
ASKS = {
    "item",
    "_local_scalar_dense",
    "nonzero",
    "is_nonzero",
    "masked_select",
}  # for numbers: no graph can be made of it


class Recorded(TorchDispatchMode):
    """Notes operations with the tensors they were given and made, as a graph does with their addresses."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ASKS:
            raise RuntimeError(f"{func} is not permitted while a stream is captured")
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, out))
        return out

    def replay(self):
        """Compute again; what was made then is overwritten. Views and written arguments are where they were."""
        for func, args, kwargs, made in self.operations:
            again = func(*args, **kwargs)
            given = {id(t.untyped_storage()): t for t in tensors((args, kwargs))}
            places = {t.untyped_storage().data_ptr() for t in given.values()}
            for old, new in zip(tensors(made), tensors(again), strict=True):
                if old.untyped_storage().data_ptr() not in places:
                    old.copy_(new)


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [t for part in parts for t in tensors(part)]


class Captures:
    """Counts captures and replays."""

    def __init__(self):
        self.captured = self.replayed = 0

    def __call__(self, compute):
        compute()
        recorded = Recorded()
        with recorded:
            compute()
        assert len(recorded.operations) > 15
        self.captured += 1

        def replay():
            self.replayed += 1
            recorded.replay()

        return replay


def with_graphs(name="llama", max_shapes=64):
    model, captures = tiny_model(name), Captures()
    model.require_supported()  # its own passes would be counted
    model.graphs = LayerGraphs(model, max_shapes, captures)
    return model, captures


def prefilled(model, prompt, method):
    store = kr.KVStore()
    method.encode(model, prompt, store)
    return method.prefill(model, prompt, store)


def same(ours, theirs):
    """Up to the order of sums: attention runs in another kernel."""
    torch.testing.assert_close(ours.logits, theirs.logits, atol=2e-5, rtol=1e-4)
    for a, b in zip(ours.cache.layers, theirs.cache.layers, strict=True):
        torch.testing.assert_close(a.keys, b.keys, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(a.values, b.values, atol=2e-5, rtol=1e-4)
    for a, b in zip(ours.trace.selected, theirs.trace.selected, strict=True):
        assert torch.equal(a, b)


@given(st.integers(1, 100_000), st.integers(1, 100_000))
def test_buckets(n, m):
    assert n <= bucket(n) < n + max(32, n / 8 + 1)
    assert bucket(bucket(n)) == bucket(n)
    assert bucket(min(n, m)) <= bucket(max(n, m))
    assert bucket(n) % 32 == 0


def test_there_are_few_buckets():
    assert len({bucket(n) for n in range(1, 8193)}) == 16 + 8 * 4
    assert [bucket(n) for n in (1, 32, 33, 492, 513, 3104)] == [32, 32, 64, 512, 576, 3328]


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("schedule", ["constant", "gradual"])
def test_fixed_shapes_change_nothing(name, schedule):
    """Other prompts of the same bucket replay what the first one captured."""
    model, captures = with_graphs(name)
    method, plain = kr.CacheBlend(ratio=0.3, context="bare", schedule=schedule), tiny_model(name)
    captured = []
    for seed, chunks in ((0, (17, 13, 19)), (1, (17, 13, 19)), (2, (16, 14, 17)), (0, (17, 13, 19))):
        prompt = rag_prompt(chunks=chunks, seed=seed)
        same(prefilled(model, prompt, method), prefilled(plain, prompt, method))
        captured.append(captures.captured)
    if name in DENSE:
        assert captures.captured == 0
    else:
        assert captured == [2] * 4  # layers 1 and 2: before the check all rows run, in the last layer one
        assert captures.replayed == 8


def test_a_layer_that_asks_for_numbers_cannot_be_captured():
    def asks(compute):
        with Recorded():
            torch.ones(2).sum().item()

    model = tiny_model()
    model.require_supported()
    model.graphs = LayerGraphs(model, capture=asks)
    with pytest.raises(kr.UnsupportedModelError, match=r"layer 1 could not be captured.*without graphs=True"):
        prefilled(model, rag_prompt(), kr.CacheBlend(ratio=0.3))
    assert all("forward" not in layer.__dict__ for layer in model.layers)


@pytest.mark.parametrize(
    "method",
    [
        kr.LegoLink(k=2),
        kr.Funnel(),
        kr.CacheBlend(ratio=0.2, context="prefix"),
        kr.CacheBlend(ratio=0.3, as_released=True),
    ],
)
def test_other_methods(method):
    # In windows the deviation of tokens whose window lies in their chunk is rounding: what the funnel drops is chance.
    name = "llama" if isinstance(method, kr.Funnel) else "mistral-window"
    model, captures = with_graphs(name)
    prompt = rag_prompt(chunks=(30, 40, 35))
    same(prefilled(model, prompt, method), prefilled(tiny_model(name), prompt, method))
    assert captures.replayed > 0


def test_missing_chunks():
    (model, captures), plain = with_graphs(), tiny_model()
    method, prompt = kr.CacheBlend(ratio=0.3), rag_prompt()
    stores = [kr.KVStore(), kr.KVStore()]
    known = kr.RagPrompt(prompt.prefix, prompt.chunks[::2], prompt.question)
    results = []
    for own, store in zip((model, plain), stores, strict=True):
        method.encode(own, known, store)
        results.append(method.prefill(own, prompt, store))
    same(*results)
    assert results[0].trace.misses == 1
    assert captures.replayed == 2


def test_a_batch():
    model, captures = with_graphs()
    prompts, method = [rag_prompt(seed=1), rag_prompt(chunks=(9, 30), seed=2)], kr.CacheBlend(ratio=0.3)
    results = []
    for own in (model, tiny_model()):
        store = kr.KVStore()
        for prompt in prompts:
            method.encode(own, prompt, store)
        results.append(method.prefill(own, prompts, store))
    for b in range(2):
        same(results[0].row(b), results[1].row(b))
    assert captures.replayed == 4  # between the rows of two prompts there are gaps in every layer


def test_an_answer_goes_on_from_a_blend_over_graphs():
    (model, _), plain, prompt = with_graphs(), tiny_model(), rag_prompt()
    method = kr.CacheBlend(ratio=0.3)
    first = prefilled(model, prompt, method)
    prefilled(model, rag_prompt(seed=5), method)  # writes the same fixed memory
    expected = plain.generate(prefilled(plain, prompt, method), 8)
    assert model.generate(first, 8).token_ids == expected.token_ids


def test_what_a_request_left_behind_the_keys_reaches_no_other():
    """Not even where it is no number, which no mask can hide."""
    model, captures = with_graphs()
    method = kr.CacheBlend(ratio=0.3)
    prefilled(model, rag_prompt(chunks=(18, 13, 19)), method)
    ((shape, _),) = model.graphs._shapes.values()
    with torch.inference_mode():
        for buffer in shape.kv.values():
            buffer.fill_(float("nan"))
    prompt = rag_prompt(seed=3)
    same(prefilled(model, prompt, method), prefilled(tiny_model(), prompt, method))
    assert captures.captured == 2


def test_moved_weights_are_captured_again_and_edited_ones_are_seen():
    model, captures = with_graphs()
    prompt, method = rag_prompt(), kr.CacheBlend(ratio=0.3)
    before = prefilled(model, prompt, method)
    mlp = model.layers[2].mlp
    with torch.no_grad():
        mlp.up_proj.weight.mul_(1.5)
    edited = prefilled(model, prompt, method)
    assert captures.captured == 2
    mlp.up_proj.weight = torch.nn.Parameter(mlp.up_proj.weight / 1.5)
    assert not torch.allclose(edited.logits, before.logits)
    same(prefilled(model, prompt, method), before)
    assert captures.captured == 3


def test_a_layer_with_hooks_inside_runs_as_it_is():
    model, captures = with_graphs()
    prompt, method, seen = rag_prompt(), kr.CacheBlend(ratio=0.3), []
    prefilled(model, prompt, method)
    before = captures.replayed
    handle = model.layers[2].mlp.register_forward_hook(lambda *_: seen.append(1))
    same(prefilled(model, prompt, method), prefilled(tiny_model(), prompt, method))
    handle.remove()
    assert captures.replayed == before + 1  # layer 1
    assert seen


def test_what_would_become_part_of_a_graph_keeps_a_layer_out_of_it():
    model, captures = with_graphs()
    prompt, method = rag_prompt(), kr.CacheBlend(ratio=0.3)
    handle = model.layers[1].register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "seen_before": {"layer": torch.ones(1)}}), with_kwargs=True
    )
    same(prefilled(model, prompt, method), prefilled(tiny_model(), prompt, method))
    handle.remove()
    assert captures.captured == 1  # layer 2


def test_a_models_own_forward_comes_back():
    """A pass puts its own in front of it while it runs."""
    model, captures = with_graphs()
    layer, calls = model.layers[2], []
    original = layer.forward

    def own(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    layer.forward = own
    prefilled(model, rag_prompt(), kr.CacheBlend(ratio=0.3))
    assert layer.__dict__["forward"] is own
    assert calls
    assert captures.captured == 2
    assert all("forward" not in other.__dict__ for other in model.layers if other is not layer)


@pytest.mark.parametrize(("max_shapes", "expected"), [(2, [2, 4, 4, 6, 6, 8]), (1, [2, 4, 6, 8, 10, 12])])
def test_the_shape_used_longest_ago_goes(max_shapes, expected):
    model, captures = with_graphs(max_shapes=max_shapes)
    method, captured = kr.CacheBlend(ratio=0.3), []
    for question in (6, 70, 6, 130, 6, 70):  # rows and keys of three buckets
        prefilled(model, rag_prompt(question=question), method)
        captured.append(captures.captured)
    assert captured == expected


def test_shapes_of_as_many_keys_share_their_kv():
    model, captures = with_graphs()
    for ratio in (0.1, 0.9):
        prefilled(model, rag_prompt(), kr.CacheBlend(ratio=ratio, schedule="constant"))
    first, second = (shape for shape, _ in model.graphs._shapes.values())
    assert first.num_rows != second.num_rows
    assert first.kv is second.kv
    assert captures.captured == 4


def test_the_benchmark_has_a_line_with_graphs_for_every_ratio_below_one():
    lines = gpu.timed_methods((0.1, 1.0), graphs=True)
    assert [(t.label, t.graphs) for t in lines[-3:]] == [
        ("CacheBlend, ratio 0.1", False),
        ("CacheBlend, ratio 1", False),
        ("CacheBlend, ratio 0.1, graphs", True),
    ]


def test_bad_input(tmp_path):
    with pytest.raises(ValueError, match=r"graphs=True: CUDA graphs are for a model that is whole.*is on cpu"):
        kr.load_model(save_model(tmp_path), device="cpu", graphs=True)
    with pytest.raises(ValueError, match="max_shapes=0"):
        LayerGraphs(tiny_model(), 0, Captures())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("schedule", ["constant", "gradual"])
def test_captured_on_a_gpu(schedule):
    plain = tiny_model()
    plain.hf.to("cuda")
    model, method = kr.ReuseModel(plain.hf, graphs=True), kr.CacheBlend(ratio=0.3, schedule=schedule)
    for seed in (0, 1, 0):
        prompt = rag_prompt(seed=seed)
        same(prefilled(model, prompt, method), prefilled(plain, prompt, method))
