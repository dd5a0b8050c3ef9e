"""The block prefix cache: against a brute-force model, and exact with real models (ALGORITHMS, "Prefix caching")."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvreuse as kr
from kvreuse.prefix import BlockRoot, JoinedBlocks
from tests.tiny import hf_model, ids, rag_prompt, tiny_model

ATOL = 2e-4  # fp32 through four layers of larger than usual weights; the order of additions differs


# -- against a brute-force model --------------------------------------------------------------------------------------


def content(root: str, tokens: list[int]) -> torch.Tensor:
    """What stands for the K/V of the last token: decided by everything before it, as K/V are."""
    return torch.tensor(float(hash((root, *tokens)) % 65521))


def cutter(root: str, prompt: list[int]):
    def cut(start: int, stop: int) -> kr.ChunkKV:
        column = torch.stack([content(root, prompt[: i + 1]) for i in range(start, stop)]).view(1, 1, -1, 1)
        return kr.ChunkKV(torch.tensor(prompt[start:stop]), start, (column,), (-column,))

    return cut


class BruteCache:
    """Blocks by the whole text up to their end; a list for the free queue."""

    def __init__(self, size: int, capacity: int) -> None:
        self.size, self.capacity = size, capacity
        self.refs: dict[tuple, int] = {}
        self.free: list[tuple] = []

    def blocks(self, root: str, prompt: list[int], stop: int) -> list[tuple]:
        ends = range(self.size, stop + 1, self.size)
        return [(root, *prompt[:end]) for end in ends]

    def take(self, block: tuple) -> None:
        self.refs[block] += 1
        if block in self.free:
            self.free.remove(block)

    def match(self, root: str, prompt: list[int]) -> list[tuple]:
        held = []
        for block in self.blocks(root, prompt, len(prompt) - 1):
            if block not in self.refs:
                break
            self.take(block)
            held.append(block)
        return held

    def insert(self, root: str, prompt: list[int], held: list[tuple]) -> list[tuple]:
        held = list(held)
        for block in self.blocks(root, prompt, len(prompt))[len(held) :]:
            if block in self.refs:
                self.take(block)
            else:
                if len(self.refs) - len(self.free) + 1 > self.capacity:
                    break
                if len(self.refs) + 1 > self.capacity:
                    del self.refs[self.free.pop(0)]
                self.refs[block] = 1
            held.append(block)
        return held

    def release(self, held: list[tuple]) -> None:
        for block in reversed(held):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self.free.append(block)


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=12)
steps = st.lists(
    st.tuples(
        st.sampled_from(["open", "insert", "close", "close"]), st.sampled_from("ab"), prompts, st.integers(0, 99)
    ),
    max_size=30,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(size=st.integers(1, 4), capacity=st.integers(1, 8), actions=steps)
def test_equals_a_brute_force_model(size, capacity, actions):
    block_bytes = cutter("a", [0] * size)(0, size).num_bytes
    cache, brute = kr.BlockPrefixCache(capacity * block_bytes, block_size=size), BruteCache(size, capacity)
    open_: list[tuple[str, list[int], object, list[tuple]]] = []
    for action, root, prompt, pick in actions:
        if action == "open":
            match = cache.match(BlockRoot(root), torch.tensor(prompt))
            open_.append((root, prompt, match, brute.match(root, prompt)))
        elif open_:
            at = pick % len(open_)
            root, prompt, match, held = open_[at]
            if action == "insert":
                match = cache.insert(match, torch.tensor(prompt), cutter(root, prompt))
                open_[at] = (root, prompt, match, brute.insert(root, prompt, held))
            else:
                cache.release(match)
                brute.release(held)
                open_.pop(at)
        cache.check_integrity()
        assert len(cache) == len(brute.refs)
        for root, prompt, match, held in open_:
            assert match.num_tokens == len(held) * size
            if held:
                joined = JoinedBlocks(match.blocks).load()
                assert joined.ids.tolist() == prompt[: len(held) * size]
                expected = torch.stack([content(root, prompt[: i + 1]) for i in range(joined.num_tokens)])
                assert torch.equal(joined.keys[0].flatten(), expected)


def test_freed_in_reverse_and_reused_least_recently_freed_first():
    block = cutter("a", [0])(0, 1).num_bytes
    cache = kr.BlockPrefixCache(4 * block, block_size=1)

    def serve(prompt: list[int]) -> int:
        match = cache.match(BlockRoot("a"), torch.tensor(prompt))
        found = match.num_tokens
        cache.release(cache.insert(match, torch.tensor(prompt), cutter("a", prompt)))
        return found

    def cached(prompt: list[int]) -> int:
        match = cache.match(BlockRoot("a"), torch.tensor(prompt), whole=True)
        cache.release(match)
        return match.num_tokens

    serve([1, 2, 3, 4])
    assert cached([1, 2, 3, 4]) == 4, "freed blocks stay matchable"
    assert serve([7]) == 0
    assert cached([1, 2, 3, 4]) == 3, "the tail made room, not the head"
    assert serve([8]) == 0
    assert cached([7]) == 0, "freed before the others were used again"
    assert cached([1, 2, 3]) == 3


def test_the_last_token_is_never_matched():
    cache = kr.BlockPrefixCache(block_size=2)
    prompt = [1, 2, 3, 4]
    match = cache.match(BlockRoot("a"), torch.tensor(prompt))
    cache.release(cache.insert(match, torch.tensor(prompt), cutter("a", prompt)))
    for length, found in ((4, 2), (3, 2), (2, 0), (1, 0)):
        match = cache.match(BlockRoot("a"), torch.tensor(prompt[:length]))
        assert match.num_tokens == found
        cache.release(match)


def test_token_ids_are_compared_on_a_hit():
    cache, prompt = kr.BlockPrefixCache(block_size=2), torch.tensor([1, 2, 3, 4, 5])
    match = cache.insert(cache.match(BlockRoot("a"), prompt), prompt, cutter("a", prompt.tolist()))
    cache.release(match)
    match.blocks[1].ids[0] = 9  # as if two texts had one hash
    again = cache.match(BlockRoot("a"), prompt)
    assert again.num_tokens == 2
    longer = cache.insert(again, prompt, cutter("a", prompt.tolist()))
    assert longer.num_tokens == 2, "what another text has taken is not overwritten under it"
    cache.release(longer)
    cache.check_integrity()


def test_where_no_room_can_be_made_nothing_changes():
    block = cutter("a", [0])(0, 1).num_bytes
    cache = kr.BlockPrefixCache(2 * block, block_size=1)
    first = cache.insert(cache.match(BlockRoot("a"), torch.tensor([1, 2])), torch.tensor([1, 2]), cutter("a", [1, 2]))
    other = cache.insert(cache.match(BlockRoot("a"), torch.tensor([5, 6])), torch.tensor([5, 6]), cutter("a", [5, 6]))
    assert (first.num_tokens, other.num_tokens) == (2, 0)
    cache.release(first)
    cache.release(other)
    cache.check_integrity()
    with pytest.raises(ValueError, match="is not held"):
        cache.release(first)


def test_a_cache_smaller_than_a_block_says_so_once():
    cache = kr.BlockPrefixCache("10B", block_size=4)
    prompt = torch.arange(9)
    with pytest.warns(UserWarning, match="nothing is kept"):
        cache.release(cache.insert(cache.match(BlockRoot("a"), prompt), prompt, cutter("a", prompt.tolist())))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.release(cache.insert(cache.match(BlockRoot("a"), prompt), prompt, cutter("a", prompt.tolist())))
    assert len(cache) == 0


def test_threads_share_a_cache():
    block = cutter("a", [0, 0])(0, 2).num_bytes
    cache, errors = kr.BlockPrefixCache(12 * block, block_size=2), []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            for _ in range(150):
                prompt = torch.randint(0, 2, (9,), generator=generator)
                match = cache.match(BlockRoot("a"), prompt)
                match = cache.insert(match, prompt, cutter("a", prompt.tolist()))
                for i, kv in enumerate(match.blocks):
                    assert torch.equal(kv.keys[0], cutter("a", prompt.tolist())(2 * i, 2 * i + 2).keys[0])
                cache.release(match)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    cache.check_integrity()


BREAKS = {
    "counts 5 references": lambda c, key: setattr(c._blocks[key], "refs", 5),
    "on the wrong side": lambda c, key: c._free.popitem(),
    "counts 1 free bytes": lambda c, key: setattr(c, "free_bytes", 1),
    "its blocks take": lambda c, key: setattr(c, "num_bytes", 1),
    "holds more than": lambda c, key: setattr(c, "capacity_bytes", 1),
    "a block that is not there": lambda c, key: c._free.__setitem__("x", None),
}


@pytest.mark.parametrize("message", BREAKS)
def test_the_integrity_check_sees(message):
    cache, prompt = kr.BlockPrefixCache(block_size=2), torch.arange(7)
    match = cache.insert(cache.match(BlockRoot("a"), prompt), prompt, cutter("a", prompt.tolist()))
    cache.release(match)
    cache.check_integrity()
    BREAKS[message](cache, match.keys[0])
    with pytest.raises(kr.IntegrityError, match=message):
        cache.check_integrity()


# -- exact, with real models -------------------------------------------------------------------------------------------


def check_equal(model: kr.ReuseModel, prompt: kr.RagPrompt, result: kr.Prefill) -> None:
    full = kr.FullRecompute().prefill(model, prompt)
    torch.testing.assert_close(result.logits, full.logits, atol=ATOL, rtol=1e-4)
    for ours, theirs in zip(result.cache.layers, full.cache.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, atol=ATOL, rtol=1e-4)
        torch.testing.assert_close(ours.values, theirs.values, atol=ATOL, rtol=1e-4)


def both_stores(block_size: int = 16):
    return kr.KVStore(), kr.BlockPrefixCache(block_size=block_size)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma2", "gemma3", "phi3-longrope", "mixtral-moe"])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_a_repeated_prompt(name, block_size):
    model, prompt = tiny_model(name), rag_prompt()
    for store in both_stores(block_size):
        first = kr.PrefixCaching().prefill(model, prompt, store)
        again = kr.PrefixCaching().prefill(model, prompt, store)
        size = block_size if isinstance(store, kr.BlockPrefixCache) else 16
        assert (first.trace.num_exact, again.trace.num_exact) == (0, (prompt.num_tokens - 1) // size * size)
        check_equal(model, prompt, again)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma3"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_longer_stored_prompt_and_a_strict_prefix(name, block_size):
    model, cache = tiny_model(name), kr.BlockPrefixCache(block_size=block_size)
    whole = rag_prompt()
    text = whole.input_ids
    kr.PrefixCaching().prefill(model, whole, cache)
    for length in (2, block_size + 1, 2 * block_size, 33, text.numel() - 1):
        if length < 2:
            continue
        part = kr.RagPrompt([], [text[: length - 1]], text[length - 1 : length])
        result = kr.PrefixCaching(insert=False).prefill(model, part, cache)
        assert result.trace.num_exact == (length - 1) // block_size * block_size
        check_equal(model, part, result)
    longer = kr.RagPrompt(whole.prefix, whole.chunks, torch.cat([whole.question, ids(20, 77)]))
    result = kr.PrefixCaching().prefill(model, longer, cache)
    assert result.trace.num_exact == text.numel() // block_size * block_size
    check_equal(model, longer, result)


def test_blocks_behind_another_text_are_not_found():
    model, cache = tiny_model(), kr.BlockPrefixCache(block_size=4)
    a, b = rag_prompt(), rag_prompt(seed=1)
    kr.PrefixCaching().prefill(model, a, cache)
    mixed = kr.RagPrompt(b.prefix, a.chunks, a.question)
    result = kr.PrefixCaching().prefill(model, mixed, cache)
    assert (result.trace.num_exact, result.trace.hits, result.trace.misses) == (0, 0, 4)
    check_equal(model, mixed, result)


def test_salts_and_models_do_not_share():
    model, prompt, store = tiny_model(), rag_prompt(), kr.KVStore()
    mine, yours = (kr.BlockPrefixCache(memory=None, disk=store, salt=salt) for salt in ("me", "you"))
    kr.PrefixCaching().prefill(model, prompt, mine)
    assert kr.PrefixCaching().prefill(model, prompt, yours).trace.num_exact == 0
    assert kr.PrefixCaching().prefill(model, prompt, mine).trace.num_exact == 48
    other = kr.ReuseModel(hf_model("llama", seed=1))
    assert kr.PrefixCaching().prefill(other, prompt, mine).trace.num_exact == 0


@pytest.mark.parametrize("kind", ["store", "cache"])
def test_changed_weights(kind):
    model, prompt = tiny_model(), rag_prompt()
    store = dict(zip(("store", "cache"), both_stores(), strict=True))[kind]
    kr.PrefixCaching().prefill(model, prompt, store)
    with torch.no_grad():
        model.hf.model.layers[2].mlp.down_proj.weight.add_(0.05)
    result = kr.PrefixCaching().prefill(model, prompt, store)
    assert result.trace.num_exact == 0
    check_equal(model, prompt, result)


def test_random_prompts_under_eviction_are_exact():
    model = tiny_model("mistral-window")
    size = kr.ragcache.kv.bytes_per_token(model)
    cache = kr.BlockPrefixCache(120 * (size + 8), block_size=4)
    generator = torch.Generator().manual_seed(3)
    parts, reused = [ids(n, 20 + n) for n in (9, 14, 6, 11)], 0
    for number in range(40):
        order = torch.randperm(4, generator=generator)[: 1 + number % 3].tolist()
        prompt = kr.RagPrompt(ids(5, 1), [parts[i] for i in order], ids(2 + number % 3, number % 5))
        result = kr.PrefixCaching().prefill(model, prompt, cache)
        reused += result.trace.num_exact
        check_equal(model, prompt, result)
        cache.check_integrity()
    assert cache.evictions > 20
    assert reused > 200


def test_encode_computes_prefix_and_first_chunks():
    model, prompt = tiny_model(), rag_prompt()
    for chunks, tokens in ((0, 4), (1, 20), (2, 32), (9, 52)):
        cache = kr.BlockPrefixCache(block_size=4)
        method = kr.PrefixCaching(insert=False, offline_chunks=chunks)
        method.encode(model, prompt, cache)
        result = method.prefill(model, prompt, cache)
        assert result.trace.num_exact == tokens
        check_equal(model, prompt, result)
        assert cache.evictions == 0


def test_encode_into_a_store_that_is_too_small_says_so():
    model, prompt = tiny_model(), rag_prompt()
    block = 16 * (kr.ragcache.kv.bytes_per_token(model) + 8)
    for store in (kr.KVStore(memory=2 * block), kr.BlockPrefixCache(2 * block)):
        with pytest.warns(UserWarning, match="too small for this prompt's prefix"):
            kr.PrefixCaching(offline_chunks=3).encode(model, prompt, store)


# -- on disk -----------------------------------------------------------------------------------------------------------


def test_blocks_on_disk_outlive_the_process(tmp_path):
    model, prompt = tiny_model(), rag_prompt()
    first = kr.BlockPrefixCache("1MiB", tmp_path, "10MiB", block_size=8)
    kr.PrefixCaching().prefill(model, prompt, first)
    first.flush()
    second = kr.BlockPrefixCache("1MiB", tmp_path, block_size=8)
    result = kr.PrefixCaching().prefill(model, prompt, second)
    assert result.trace.num_exact == 56
    check_equal(model, prompt, result)
    assert len(second) == 7, "what was read is in memory now"
    assert kr.PrefixCaching().prefill(model, prompt, second).trace.stages.get("load_s", 0) >= 0
    second.check_integrity()


def test_what_memory_evicts_is_found_on_disk(tmp_path):
    model = tiny_model()
    block = 8 * (kr.ragcache.kv.bytes_per_token(model) + 8)
    cache = kr.BlockPrefixCache(9 * block, tmp_path, block_size=8)
    prompts = [rag_prompt(seed=seed) for seed in (0, 1, 0, 1)]
    found = []
    for prompt in prompts:
        result = kr.PrefixCaching().prefill(model, prompt, cache)
        cache.flush()
        found.append(result.trace.num_exact)
        check_equal(model, prompt, result)
        cache.check_integrity()
    assert found == [0, 0, 56, 56]
    assert cache.evictions > 7


def test_a_bad_file_is_a_miss_and_nothing_worse(tmp_path):
    model, prompt = tiny_model(), rag_prompt()
    first = kr.BlockPrefixCache("1MiB", tmp_path, block_size=8)
    kr.PrefixCaching().prefill(model, prompt, first)
    first.flush()
    files = sorted(tmp_path.rglob("*.safetensors"), key=lambda f: f.stat().st_mtime)
    assert len(files) == 7
    third = files[-3]  # written tails first
    third.write_bytes(third.read_bytes()[:-20])
    second = kr.BlockPrefixCache("1MiB", tmp_path, block_size=8)
    with pytest.warns(UserWarning, match="damaged"):
        result = kr.PrefixCaching().prefill(model, prompt, second)
    assert result.trace.num_exact == 16
    check_equal(model, prompt, result)
    second.flush()
    third_again = kr.BlockPrefixCache("1MiB", tmp_path, block_size=8)
    assert kr.PrefixCaching().prefill(model, prompt, third_again).trace.num_exact == 56


def test_tails_leave_a_full_store_first():
    """Heads are the most recent entries of the store below, after an insertion as after a hit."""
    model, prompt = tiny_model(), rag_prompt()
    store = kr.KVStore(memory=4 * 16 * (kr.ragcache.kv.bytes_per_token(model) + 8))  # four blocks
    kr.PrefixCaching().prefill(model, prompt, store)
    for seeds, left in (((5, 7), 32), ((9, 11, 13), 16)):
        for seed in seeds:
            kr.PrefixCaching().prefill(model, kr.RagPrompt([], [ids(16, seed)], ids(1, 6)), store)
        result = kr.PrefixCaching(insert=False).prefill(model, prompt, store)
        assert result.trace.num_exact == left, "tails make room"


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: kr.BlockPrefixCache(block_size=0), "block_size=0"),
        (lambda: kr.BlockPrefixCache(block_size=True), "block_size=True"),
        (lambda: kr.BlockPrefixCache(memory=None), "nowhere to keep anything"),
        (lambda: kr.BlockPrefixCache("lots"), "size 'lots'"),
        (lambda: kr.BlockPrefixCache(disk=kr.KVStore(), disk_capacity="1GiB"), "has its own"),
        (lambda: kr.BlockPrefixCache(disk=kr.KVStore(kv_dtype="int8")), "a prefix cache is exact"),
        (lambda: kr.BlockPrefixCache().match(BlockRoot("a"), torch.tensor([], dtype=torch.long)), "ids is empty"),
    ],
)
def test_bad_input_says_what_to_do(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_another_kind_of_store_says_what_to_pass():
    with pytest.raises(TypeError, match="pass kr.KVStore"):
        kr.PrefixCaching().prefill(tiny_model(), rag_prompt(), {})
