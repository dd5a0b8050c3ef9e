"""HybridReuse: exact where the tree goes, blended behind it; nothing approximate ever gets into the tree."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import kvreuse as kr
from tests.tiny import ids, tiny_model

# fp32: suffixes and whole prompts sum in another order.
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def model() -> kr.ReuseModel:
    return tiny_model()


PREFIX = ids(5, 1)
DOCS = [ids(n, 50 + n) for n in (7, 9, 12, 15, 11, 8)]


def prompt(order: str, prefix: torch.Tensor = PREFIX, question: int = 0) -> kr.RagPrompt:
    return kr.RagPrompt(prefix, [DOCS[int(i)] for i in order], ids(6, 900 + question))


def new_store(model: kr.ReuseModel, prefix: torch.Tensor = PREFIX, gpu: Any = "1GiB", **kv: Any) -> kr.HybridStore:
    return kr.HybridStore(kr.TreeCache(model, prefix, gpu, 0 if gpu != "1GiB" else "1GiB"), kr.KVStore(**kv))


def check_tree_is_exact(model: kr.ReuseModel, store: kr.HybridStore, prefix: torch.Tensor = PREFIX) -> int:
    """Every node's K/V equal those of a full prefill of its own path. Returns the number of nodes with K/V."""
    by_id = {store.tree.documents(prompt(str(i), prefix))[0].id: DOCS[i] for i in range(len(DOCS))}
    count = 0
    for node in store.tree.tree.nodes():
        if node.has_kv and node.num_tokens:
            path = torch.cat([prefix, *(by_id[d] for d in node.path)])
            _, full = model.prefill(path)
            kv = node.payload
            for held_k, held_v, layer in zip(kv.keys, kv.values, full.layers, strict=True):
                at = slice(kv.start, kv.start + kv.num_tokens)
                torch.testing.assert_close(held_k, layer.keys[:, :, at], atol=TOLERANCE, rtol=TOLERANCE)
                torch.testing.assert_close(held_v, layer.values[:, :, at], atol=TOLERANCE, rtol=TOLERANCE)
            count += 1
    store.tree.tree.check_integrity()
    return count


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("prefix", [PREFIX, PREFIX[:0]], ids=["prefix", "no prefix"])
@pytest.mark.parametrize("context", ["prefix", "bare"])
def test_nothing_approximate_enters_the_tree(
    model: kr.ReuseModel, kv_dtype: str | None, prefix: torch.Tensor, context: Any
) -> None:
    rng = random.Random(3)
    store = new_store(model, prefix, kv_dtype=kv_dtype)
    for number in range(25):
        method = kr.HybridReuse(ratio=0.2, grow=rng.randint(0, 2), context=context)
        order = "".join(map(str, rng.sample(range(6), rng.randint(1, 4))))
        if number % 5 == 4:
            store.chunks.clear()  # misses are recomputed whole: exact if nothing approximate stands before them
        method.prefill(model, prompt(order, prefix, number), store)
        assert all(n.pins == 0 for n in store.tree.tree.nodes())
    assert check_tree_is_exact(model, store, prefix) > 10


def test_a_sequence_the_tree_has_is_exact(model: kr.ReuseModel) -> None:
    store, request = new_store(model), prompt("0123")
    store.tree.prefill(request)
    kr.CacheBlend().encode(model, request, store.chunks)
    result = kr.HybridReuse(ratio=0.0).prefill(model, request, store)
    full, _ = model.prefill(request.input_ids)
    torch.testing.assert_close(result.logits, full, atol=TOLERANCE, rtol=TOLERANCE)
    assert (result.trace.num_exact, result.trace.num_reused) == (request.num_context, 0)


def test_documents_behind_the_match_are_blended(model: kr.ReuseModel) -> None:
    store, request = new_store(model), prompt("0132")
    store.tree.prefill(prompt("01"))
    kr.CacheBlend().encode(model, request, store.chunks)
    result = kr.HybridReuse(ratio=0.3, grow=0).prefill(model, request, store)
    exact = PREFIX.numel() + DOCS[0].numel() + DOCS[1].numel()
    assert result.trace.num_exact == exact
    assert result.trace.num_reused == DOCS[3].numel() + DOCS[2].numel()
    # No layer, the first included, runs a token of the exact prefix.
    assert min(int(rows[0]) for rows in result.trace.selected) >= exact
    assert store.tree.tree.match(store.tree.documents(request)).cached_documents == 2


def test_equals_cacheblend_where_the_tree_has_only_what_is_exact_anyway(model: kr.ReuseModel) -> None:
    store, request = new_store(model), prompt("0132")
    store.tree.prefill(prompt("0"))
    blend = kr.CacheBlend(ratio=0.3)
    blend.encode(model, request, store.chunks)
    expected = blend.prefill(model, request, store.chunks)
    result = kr.HybridReuse(ratio=0.3, grow=0).prefill(model, request, store)
    torch.testing.assert_close(result.logits, expected.logits, atol=TOLERANCE, rtol=TOLERANCE)
    assert [r.tolist() for r in result.trace.selected] == [r.tolist() for r in expected.trace.selected]


def test_ratio_one_is_full_recompute(model: kr.ReuseModel) -> None:
    store, request = new_store(model), prompt("41320")
    store.tree.prefill(prompt("41"))
    kr.CacheBlend().encode(model, request, store.chunks)
    result = kr.HybridReuse(ratio=1.0).prefill(model, request, store)
    full, _ = model.prefill(request.input_ids)
    torch.testing.assert_close(result.logits, full, atol=TOLERANCE, rtol=TOLERANCE)


def test_the_tree_grows_by_what_it_is_told(model: kr.ReuseModel) -> None:
    request = prompt("0123")
    for grow, expected in ((0, [1, 1]), (1, [2, 3]), (2, [3, 4])):
        store = new_store(model)
        kr.CacheBlend().encode(model, request, store.chunks)
        method, depths = kr.HybridReuse(grow=grow), []
        for _ in range(2):
            method.prefill(model, request, store)
            depths.append(store.tree.tree.match(store.tree.documents(request)).cached_documents)
        assert depths == expected  # the first document is exact in the chunk store: it comes for nothing
        check_tree_is_exact(model, store)


def test_without_chunks_a_request_is_recomputed_and_known_whole(model: kr.ReuseModel) -> None:
    store, request = new_store(model), prompt("0123")
    result = kr.HybridReuse().prefill(model, request, store)
    full, _ = model.prefill(request.input_ids)
    torch.testing.assert_close(result.logits, full, atol=TOLERANCE, rtol=TOLERANCE)
    assert store.tree.tree.match(store.tree.documents(request)).cached_documents == 4
    assert check_tree_is_exact(model, store) == 5
    assert len(store.chunks) == 5


def test_encode_is_offline(model: kr.ReuseModel) -> None:
    store, request = new_store(model), prompt("0123")
    method = kr.HybridReuse()
    assert method.encode(model, request, store) > 0
    assert len(store.chunks) == 5
    assert store.tree.tree.match(store.tree.documents(request)).cached_documents == 1
    assert store.tree.tree.now == 0
    assert method.prefill(model, request, store).trace.misses == 0
    assert store.tree.tree.now == 1


def test_a_tree_without_room_changes_nothing(model: kr.ReuseModel) -> None:
    store = new_store(model, gpu=3000)
    request = prompt("0123")
    kr.CacheBlend().encode(model, request, store.chunks)
    expected = kr.CacheBlend().prefill(model, request, store.chunks)
    for _ in range(2):
        result = kr.HybridReuse().prefill(model, request, store)
        torch.testing.assert_close(result.logits, expected.logits, atol=TOLERANCE, rtol=TOLERANCE)


def test_bad_input(model: kr.ReuseModel) -> None:
    with pytest.raises(ValueError, match="grow=-1"):
        kr.HybridReuse(grow=-1)
    with pytest.raises(ValueError, match="ratio=2"):
        kr.HybridReuse(ratio=2)
    with pytest.raises(TypeError, match="HybridStore"):
        kr.HybridReuse().prefill(model, prompt("0"), kr.KVStore())  # type: ignore[arg-type]
    other = new_store(tiny_model("qwen2"))
    with pytest.raises(ValueError, match="make a TreeCache for this model"):
        kr.HybridReuse().prefill(model, prompt("0"), other)
    with pytest.raises(ValueError, match="not the one this tree was made for"):
        kr.HybridReuse().prefill(model, prompt("0", ids(4, 7)), new_store(model))
