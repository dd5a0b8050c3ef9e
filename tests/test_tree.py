"""The knowledge tree's rules, one by one (ALGORITHMS, "RAGCache"), and an integrity check that sees each one broken."""

from __future__ import annotations

import random

import pytest

import kvreuse as kr
from kvreuse.ragcache.heap import NodeHeap
from kvreuse.ragcache.node import GPU, HOST, Node


def docs(text: str, size: int = 10) -> list[kr.Document]:
    """One document per letter."""
    return [kr.Document(letter, size) for letter in text]


def node(tree: kr.KnowledgeTree, text: str) -> Node:
    found = tree.root
    for letter in text:
        found = found.children[letter]
    return found


def where(tree: kr.KnowledgeTree) -> dict[str, str]:
    """Path to tiers: g, h or gh."""
    return {"".join(n.path): "g" * n.in_gpu + "h" * n.in_host for n in tree.nodes() if n.has_kv and n.parent}


def filled(**settings) -> kr.KnowledgeTree:
    """System prompt (5), A -> B, A -> C, D in a GPU of 45 and a host of 100: full."""
    tree = kr.KnowledgeTree(45, settings.pop("host", 100), system_tokens=5, policy=kr.LRU(), **settings)
    for text in ("AB", "AC", "D"):
        tree.serve(docs(text), 3)
    tree.check_integrity()
    return tree


def test_order_of_documents_matters():
    tree = kr.KnowledgeTree(1000)
    tree.serve(docs("AB"), 3)
    assert tree.match(docs("AB")).cached_documents == 2
    assert tree.match(docs("BA")).cached_documents == 0
    assert tree.match(docs("AC")).cached_documents == 1
    assert tree.match(docs("ABB")).cached_documents == 2


def test_a_match_changes_nothing():
    tree = filled()
    before = (tree.now, tree.num_nodes, where(tree), [n.frequency for n in tree.nodes()])
    match = tree.match(docs("ABXYZ"))
    assert (match.cached_tokens, match.new_tokens, match.cached_documents) == (25, 30, 2)
    assert match.uncached == tuple(docs("XYZ"))
    assert before == (tree.now, tree.num_nodes, where(tree), [n.frequency for n in tree.nodes()])
    with pytest.raises(AttributeError):
        match.num_cached = 3  # type: ignore[misc]


def test_gpu_evicts_leaves_to_host_and_swaps_in_top_down():
    tree = filled()
    assert where(tree) == {"A": "g", "AB": "g", "AC": "g", "D": "g"}
    tree.serve(docs("E"), 3)  # AB was retrieved least recently
    assert where(tree) == {"A": "g", "AB": "h", "AC": "g", "D": "g", "E": "g"}
    tree.serve(docs("F"), 3)
    tree.serve(docs("G"), 3)  # A became a leaf when AC left, and is the oldest
    assert where(tree) == {"A": "h", "AB": "h", "AC": "h", "D": "g", "E": "g", "F": "g", "G": "g"}
    match = tree.acquire(docs("AB"))
    assert (match.gpu_tokens, match.host_tokens) == (5, 20)
    assert tree.promote(match) == 20
    assert where(tree) == {"A": "gh", "AB": "gh", "AC": "h", "D": "h", "E": "h", "F": "g", "G": "g"}
    tree.release(match)
    tree.check_integrity()


def test_swap_out_only_once():
    tree = filled()
    tree.serve(docs("E"), 3)  # AB goes to host
    assert tree.host.bytes_in == 10
    tree.serve(docs("AB"), 3)  # comes back: its host copy stays; AC leaves
    assert where(tree)["AB"] == "gh"
    assert tree.host.bytes_in == 20
    for text in ("F", "G", "H", "I"):
        tree.serve(docs(text), 3)
    assert where(tree)["AB"] == "h"
    assert tree.host.bytes_in == 50, "AB, AC, D, E, A: everything once, AB not again"
    assert tree.host.used_bytes == 50, "a host copy counts while its node is in GPU, too"


def test_a_host_copy_of_a_gpu_node_cannot_be_evicted():
    tree = filled(host=10)
    tree.serve(docs("E"), 3)
    tree.serve(docs("AB"), 3)
    assert where(tree)["AB"] == "gh"
    tree.serve(docs("F"), 3)
    assert where(tree)["AB"] == "gh", "what had to leave GPU found no room on host and was freed"
    tree.check_integrity()


def test_a_node_that_leaves_the_cache_takes_what_stands_behind_it_along():
    tree = kr.KnowledgeTree(20, 10, policy=kr.LRU())
    tree.serve(docs("AB"), 3)
    tree.serve(docs("C"), 3)
    assert where(tree) == {"A": "g", "AB": "h", "C": "g"}
    match = tree.acquire(docs("C"))
    tree.promote(match)
    other = tree.acquire(docs("X"))
    other = tree.insert(other)  # A must go; the host has room only if AB, behind it, goes first
    assert where(tree) == {"A": "h", "C": "g", "X": "g"}
    tree.release(match)
    tree.release(other)
    blocked = kr.KnowledgeTree(20, 9, policy=kr.LRU())
    blocked.serve([kr.Document("A", 10), kr.Document("B", 9)], 3)
    blocked.serve(docs("C"), 3)
    assert where(blocked) == {"A": "g", "AB": "h", "C": "g"}
    blocked.serve(docs("D"), 3)
    assert where(blocked) == {"C": "g", "D": "g"}, "A does not fit on host, and AB is nothing without it"
    blocked.check_integrity()


def test_a_document_that_finds_no_room_bypasses_the_tier_and_changes_nothing():
    tree = filled()
    before = where(tree)
    tree.serve([kr.Document("big", 60)], 3)
    assert where(tree) == {**before, "big": "h"}
    tree.serve([kr.Document("huge", 200), kr.Document("x", 1)], 3)
    assert where(tree) == {**before, "big": "h"}, "what stands behind it bypasses too"
    assert tree.gpu.evictions == tree.host.evictions == 0
    assert tree.root.children["huge"].frequency == 1, "but it is remembered"


def test_the_requests_own_path_is_pinned():
    tree = kr.KnowledgeTree(20, policy=kr.LRU())
    tree.serve(docs("AB"), 3)
    held = tree.acquire(docs("AB"))
    tree.serve(docs("C"), 3)
    assert where(tree) == {"A": "g", "AB": "g"}
    tree.release(held)
    tree.serve(docs("C"), 3)
    assert where(tree) == {"A": "g", "C": "g"}


def test_inserting_does_not_evict_its_own_path():
    tree = kr.KnowledgeTree(25, policy=kr.LRU())
    held = tree.insert(tree.acquire(docs("ABC")))
    assert [n.id for n in held.nodes] == [tree.root.id, "A", "B"]
    tree.check_integrity()
    tree.release(held)
    tree.check_integrity()


def test_handles_are_used_up_once():
    tree = filled()
    match = tree.match(docs("A"))
    with pytest.raises(ValueError, match="is not locked"):
        tree.release(match)
    tree.lock(match)
    with pytest.raises(ValueError, match="is locked already"):
        tree.lock(match)
    longer = tree.insert(match)
    for use in (tree.release, tree.insert, tree.promote):
        with pytest.raises(ValueError, match="is not locked"):
            use(match)
    tree.release(longer)
    stale = tree.match(docs("D"))
    tree.host.capacity_bytes = 0
    for text in "EFGHIJ":
        tree.serve(docs(text), 3)
    with pytest.raises(ValueError, match="match again"):
        tree.lock(stale)


def test_two_requests_that_compute_the_same_document():
    tree = kr.KnowledgeTree(100, 100)
    first, second = tree.acquire(docs("A")), tree.acquire(docs("AB"))
    first, second = tree.insert(first), tree.insert(second)
    tree.update(first, 5)
    tree.update(second, 5)
    assert node(tree, "A").num_computed == 2
    assert tree.gpu.bytes_in == 20
    tree.release(second)
    tree.release(first)
    tree.check_integrity()


def test_costs_and_priorities_are_the_papers():
    tree = kr.KnowledgeTree(1000, 1000, cost=lambda alpha, beta: 2.0 * beta + alpha, system_tokens=4)
    tree.serve(docs("AB"), 6)  # alpha 0, beta 4 + 20 + 6
    tree.serve(docs("AC"), 6)  # alpha 14, beta 10 + 6
    assert node(tree, "A").mean_cost == node(tree, "AB").mean_cost == 2.0
    assert node(tree, "AC").mean_cost == (2.0 * 16 + 14) / 16
    assert node(tree, "A").priority[GPU] == 0 + 2 * 2.0
    assert node(tree, "AC").priority[GPU] == 0 + 1 * (2.0 * 16 + 14) / 16
    tree.gpu.clock = 7.0
    tree.serve(docs("AC"), 6)  # cached: frequency and clock move, the cost does not
    assert node(tree, "AC").priority[GPU] == 7.0 + 2 * (2.0 * 16 + 14) / 16
    assert node(tree, "AB").priority[GPU] == 2.0


def test_evict_then_insert_then_rank():
    """The new node's priority contains the clock that its own eviction set."""
    tree = kr.KnowledgeTree(10, 10, policy=kr.GDSF(cost="constant"))
    tree.serve(docs("A"), 1)
    tree.serve(docs("B"), 1)
    assert tree.gpu.clock == pytest.approx(0.1)
    assert node(tree, "B").priority[GPU] == pytest.approx(0.2)
    assert node(tree, "A").priority[HOST] == pytest.approx(0.1), "the host has a clock of its own"
    assert tree.host.clock == 0


def test_frequency_survives_or_is_forgotten():
    for persistent, left in ((True, 3), (False, 0)):
        tree = kr.KnowledgeTree(10, policy=kr.LFU(persistent=persistent))
        for _ in range(3):
            tree.serve(docs("A"), 1)
        tree.serve(docs("B"), 1)
        assert where(tree) == {"B": "g"}
        assert node(tree, "A").frequency == left


def test_frequency_windows():
    sliding = kr.KnowledgeTree(100, policy=kr.LFU(window=kr.SlidingWindow(3)))
    halving = kr.KnowledgeTree(100, policy=kr.LFU(window=kr.HalvingWindow(4)))
    for text in "AAABBAB":
        sliding.serve(docs(text), 1)
        halving.serve(docs(text), 1)
    # as of their last retrieval, requests 6 and 7
    assert (node(sliding, "A").frequency, node(sliding, "B").frequency) == (1, 2)
    # requests 1-3 and 6 retrieved A, 4, 5 and 7 B; the counts are halved when request 4 comes
    assert (node(halving, "A").frequency, node(halving, "B").frequency) == (3 / 2 + 1, 3)


def test_free_nodes_are_forgotten_beyond_max_nodes():
    tree = kr.KnowledgeTree(30, 30, max_nodes=20)
    rng = random.Random(0)
    for _ in range(300):
        tree.serve(docs("".join(rng.sample("ABCDEFGHIJ", 3))), 2)
        assert tree.num_nodes <= 20
    tree.check_integrity()


def test_max_depth_keeps_only_the_first_documents():
    tree = kr.KnowledgeTree(1000, max_depth=2)
    tree.serve(docs("ABCDE"), 2)
    assert where(tree) == {"A": "g", "AB": "g"}
    match = tree.match(docs("ABCDE"))
    assert (match.cached_tokens, match.new_tokens) == (20, 30)


def test_a_lost_gpu_leaves_what_has_an_unbroken_path_on_host():
    tree = filled()
    tree.serve(docs("E"), 3)  # AB on host
    assert tree.replicate(15) == 15  # system prompt and A, the most often retrieved
    held = tree.acquire(docs("AB"))
    assert tree.lose_gpu() == 3  # AC, D, E
    assert where(tree) == {"A": "h", "AB": "h"}
    assert tree.is_live(held)
    tree.check_integrity()
    assert tree.promote(held) == 25
    tree.release(held)
    tree.check_integrity()


def test_a_lost_gpu_without_replicas_empties_the_tree_but_not_its_memory():
    tree = filled()
    tree.serve(docs("E"), 3)
    held = tree.acquire(docs("AB"))
    assert tree.lose_gpu() == 6  # the system prompt too; AB's host copy is worth nothing without A
    assert where(tree) == {}
    assert not tree.is_live(held)
    tree.check_integrity()
    longer = tree.insert(held)
    assert len(longer.nodes) == 3, "a dead handle gets nothing put behind it"
    tree.release(longer)
    assert node(tree, "A").frequency == 2
    tree.serve(docs("A"), 2)
    assert where(tree) == {"A": "g"}
    tree.check_integrity()


def test_a_backend_that_fails_leaves_the_tree_whole():
    class NoMemory(kr.ragcache.SizesOnly):
        def to_host(self, payload):
            raise MemoryError("no pinned memory left")

    tree = kr.KnowledgeTree(10, 10, backend=NoMemory())
    tree.serve(docs("A"), 1)
    match = tree.acquire(docs("B"))
    with pytest.raises(MemoryError):
        tree.insert(match)
    tree.check_integrity()
    assert where(tree) == {"A": "g"}
    tree.release(match)
    tree.check_integrity()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: kr.KnowledgeTree(10, system_tokens=20), "give the tree more room"),
        (lambda: kr.KnowledgeTree("many"), "size 'many'"),
        (lambda: kr.KnowledgeTree(10, bytes_per_token=0), "bytes_per_token=0"),
        (lambda: kr.KnowledgeTree(10, system_tokens=-1), "system_tokens=-1"),
        (lambda: kr.KnowledgeTree(10, max_depth=0), "max_depth=0"),
        (lambda: kr.KnowledgeTree(10, max_nodes=0), "max_nodes=0"),
        (lambda: kr.KnowledgeTree(10).match([kr.Document("A", 0)]), "'A' has 0 tokens"),
        (lambda: filled().match([kr.Document("A", 3)]), "one id for two contents"),
        (lambda: filled().update(filled().match([]), -1), "question_tokens=-1"),
        (lambda: kr.SlidingWindow(0), "requests=0"),
        (lambda: kr.HalvingWindow(True), "requests=True"),
        (lambda: kr.GDSF(cost="size"), "cost='size'"),
    ],
)
def test_bad_input_says_what_to_do(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_wrong_kinds_of_policy_and_window():
    with pytest.raises(TypeError, match="give a policy object"):
        kr.KnowledgeTree(10, policy=kr.LRU)
    with pytest.raises(TypeError, match="window=10"):
        kr.PGDSF(window=10)


def test_a_policy_is_its_configuration():
    assert kr.PGDSF(window=kr.SlidingWindow(9)) == kr.PGDSF(window=kr.SlidingWindow(9))
    assert repr(kr.GDSF()) == "GDSF(window=None, persistent=True, cost='prefill')"
    assert len({kr.LRU(), kr.LRU(), kr.LFU()}) == 2


def test_the_heap_sorts_and_finds():
    rng = random.Random(1)
    nodes = [Node(i, 1, 1, None, i, 0.0) for i in range(60)]
    heap, keys = NodeHeap(), {}
    for step in range(4000):
        n = rng.choice(nodes)
        if rng.random() < 0.6:
            keys[n] = (float(rng.randrange(20)), step % 7, n.number)
            heap.set(n, keys[n])
        else:
            keys.pop(n, None)
            heap.remove(n)
        assert len(heap) == len(keys)
        if keys:
            assert heap.key(heap.min()) == min(keys.values())
        if step % 50 == 0:
            assert heap.is_ordered()


# -- the integrity check sees every invariant broken ---------------------------------------------------------------


def _break_heap_order(tree):
    entries = tree.gpu.candidates._entries
    entries[0], entries[-1] = entries[-1], entries[0]
    tree.gpu.candidates._at = {entry[3]: at for at, entry in enumerate(entries)}


def _unlock(tree):
    tree._locked.clear()


def _gap(tree):
    held = next(iter(tree._locked.values()))
    object.__setattr__(held, "nodes", (held.nodes[0], held.nodes[2]))


BREAKS = {
    "a child is in GPU, its parent is not": (
        lambda t: t._take(node(t, "A"), GPU) or t._put(node(t, "A"), HOST, True),
        "is in GPU, its parent is not",
    ),
    "a child has K/V, its parent has none": (
        lambda t: t._take(node(t, "EX"), GPU) or t._put(node(t, "EX"), HOST, True) or t._take(node(t, "E"), GPU),
        "its parent has none",
    ),
    "bytes in GPU": (lambda t: setattr(t.gpu, "used_bytes", 1), "gpu counts 1 bytes"),
    "bytes on host": (lambda t: setattr(t.host, "used_bytes", 1), "host counts 1 bytes"),
    "capacity": (lambda t: setattr(t.gpu, "capacity_bytes", 44), "more than 44"),
    "evictable bytes": (lambda t: setattr(t.host, "evictable_bytes", 1), "evictable, not"),
    "an evictable mark": (lambda t: node(t, "D").evictable.__setitem__(GPU, False), "evictable"),
    "children in GPU": (lambda t: setattr(node(t, "A"), "gpu_children", 4), "children in GPU"),
    "children with K/V": (lambda t: setattr(node(t, "A"), "kv_children", 4), "children with K/V"),
    "a candidate is missing": (lambda t: t.gpu.candidates.remove(node(t, "D")), "candidates of gpu"),
    "an inner node is a candidate": (lambda t: t.gpu.candidates.set(node(t, "A"), (0.0, 0, 0)), "candidates of gpu"),
    "a GPU node is a host candidate": (lambda t: t.host.candidates.set(node(t, "D"), (0.0, 0, 0)), "of host"),
    "the root is a candidate": (lambda t: t.gpu.candidates.set(t.root, (0.0, 0, 0)), "candidates of gpu"),
    "a pinned node is a candidate": (lambda t: t.gpu.candidates.set(node(t, "EX"), (0.0, 0, 0)), "candidates of gpu"),
    "a candidate's key is not its priority": (lambda t: node(t, "D").priority.__setitem__(GPU, 99.0), "of gpu"),
    "the heap's order": (_break_heap_order, "out of order"),
    "pins": (lambda t: setattr(node(t, "E"), "pins", 3), "counts 3 pins"),
    "a lock is lost": (_unlock, "pins"),
    "a lock with a gap": (_gap, "without what stands before it"),
    "a clock": (lambda t: setattr(t.gpu, "clock", float("nan")), "clock of gpu"),
    "a priority": (lambda t: node(t, "A").priority.__setitem__(HOST, float("inf")), "has priority inf"),
    "a parent": (lambda t: setattr(node(t, "AB"), "parent", t.root), "does not know its parent"),
    "a key": (lambda t: t.root.children.__setitem__("Q", t.root.children.pop("D")), "is filed under"),
    "the count of nodes": (lambda t: setattr(t, "num_nodes", 1), "num_nodes is 1"),
    "numbers": (lambda t: setattr(node(t, "AB"), "number", node(t, "D").number), "share a number"),
    "a node's size": (lambda t: setattr(node(t, "D"), "num_bytes", 7), "counts 7 bytes"),
    "depth": (lambda t: setattr(t, "max_depth", 1), "deeper than max_depth"),
    "a free leaf is missing": (lambda t: t._free.remove(node(t, "Z")), "free leaves"),
    "a frequency": (lambda t: setattr(node(t, "D"), "frequency", -1), "negative statistics"),
    "a payload's size": (
        lambda t: setattr(t.backend, "num_bytes", lambda payload: 3),
        "holds a payload of 3 bytes",
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_the_integrity_check_sees(name):
    tree = kr.KnowledgeTree(45, 20, system_tokens=5, policy=kr.LRU())
    for text in ("AB", "AC", "D"):
        tree.serve(docs(text), 3)
    tree.serve([kr.Document("Z", 99)], 3)  # fits nowhere: a free leaf
    held = tree.insert(tree.acquire([kr.Document("E", 5), kr.Document("X", 5)]))
    tree.check_integrity()
    corrupt, message = BREAKS[name]
    corrupt(tree)
    with pytest.raises(kr.IntegrityError, match=message):
        tree.check_integrity()
    assert held.nodes
