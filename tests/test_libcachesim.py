"""The tree's evictions against libcachesim's GDSF, on a flat trace of constant cost: an implementation not ours."""

from __future__ import annotations

import random

import pytest

import kvreuse as kr

lcs = pytest.importorskip("libcachesim", reason="pip install libcachesim")

DOCUMENTS, CAPACITY, REQUESTS = 400, 4000, 20_000


def trace(seed: int) -> tuple[list[int], list[int]]:
    """Sizes of the documents, and which one each request retrieves."""
    rng = random.Random(seed)
    sizes = [rng.randint(1, 100) for _ in range(DOCUMENTS)]
    return sizes, rng.choices(range(DOCUMENTS), weights=[1 / (i + 1) ** 0.7 for i in range(DOCUMENTS)], k=REQUESTS)


@pytest.mark.parametrize("seed", range(3))
def test_evictions_agree_with_libcachesims_gdsf(seed):
    """Victim by victim, in order. Both rank by clock + frequency / size, forget the frequency of what was evicted, and
    evict, then insert, then rank.

    Driven by find / evict / insert and not by its ``get``, which puts an admission filter in front that the paper does
    not have: an object that would rank below its victims is not inserted at all. What is left over 20,000 requests are
    a handful of ties that round differently (it computes 1e6 * frequency / size, the tree frequency / size).
    """
    sizes, requests = trace(seed)
    theirs = lcs.GDSF(cache_size=CAPACITY, hashpower=14)
    tree = kr.KnowledgeTree(CAPACITY, policy=kr.GDSF(cost="constant", persistent=False))
    gone: list[int] = []
    tree.subscribe(lambda node, has_kv: None if has_kv else gone.append(node.id))
    decisions = agree = same_hits = 0
    for document in requests:
        request = lcs.Request(obj_id=document + 1, obj_size=sizes[document])
        their_hit, victims = theirs.find(request, True) is not None, []
        if not their_hit:
            while theirs.get_occupied_byte() + sizes[document] > CAPACITY:
                victims.append(theirs.to_evict(request).obj_id - 1)
                theirs.evict(request)
            theirs.insert(request)
        gone.clear()
        match = tree.serve([kr.Document(document, sizes[document])], question_tokens=1)
        same_hits += their_hit == (match.cached_documents == 1)
        decisions += max(len(victims), len(gone))
        agree += sum(a == b for a, b in zip(victims, gone, strict=False))
    assert decisions > 5000
    assert agree / decisions > 0.999
    assert same_hits / REQUESTS > 0.999
