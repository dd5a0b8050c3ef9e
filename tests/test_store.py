"""The memory store against a brute-force model, and its rules."""

import warnings

import pytest
import torch
from chunks import entry
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import hf_model, ids, tiny_model

import kvreuse as kr
from kvreuse.kv import chunk_key
from kvreuse.store.tiers import parse_bytes

SIZE = entry(0).num_bytes
operations = st.lists(
    st.tuples(st.sampled_from(["put", "get", "delete", "clear"]), st.integers(0, 5), st.integers(1, 6)), max_size=60
)


@settings(max_examples=200, deadline=None)
@given(operations=operations, capacity=st.integers(1, 20))
def test_store_is_an_lru_by_bytes(operations, capacity):
    """Against a list kept in order of use."""
    room = capacity * SIZE // 2
    store = kr.KVStore(memory=room)
    model: list[tuple[str, kr.ChunkKV]] = []  # least recently used first
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for what, number, tokens in operations:
            key = str(number)
            known = dict(model)
            if what == "put":
                new = entry(number, tokens)
                kept = store.put(key, new)
                assert kept == (new.num_bytes <= room)
                if kept:
                    model = [(k, v) for k, v in model if k != key]
                    while sum(v.num_bytes for _, v in model) + new.num_bytes > room:
                        model.pop(0)
                    model.append((key, new))
            elif what == "get":
                asked = known[key].ids if key in known else ids(tokens, number)
                found = store.get(key, asked)
                assert found is known.get(key)
                if found is not None:
                    model = [(k, v) for k, v in model if k != key] + [(key, found)]
            elif what == "delete":
                assert store.delete(key) == (key in known)
                model = [(k, v) for k, v in model if k != key]
            else:
                store.clear()
                model = []
            stats = store.stats()
            assert stats.entries == len(store) == len(model)
            assert stats.num_bytes == sum(v.num_bytes for _, v in model) <= room
            assert all(k in store for k, _ in model)


def test_other_token_ids_under_a_key_are_a_miss():
    store = kr.KVStore()
    store.put("k", entry(1))
    assert store.get("k", ids(4, 2)) is None
    assert "k" not in store
    assert (store.stats().hits, store.stats().misses) == (0, 1)


def test_an_entry_larger_than_the_store_warns_once_and_serves_without():
    model = tiny_model()
    prompt = kr.RagPrompt(ids(4, 0), [ids(20, 1), ids(20, 2)], ids(3, 3))
    store = kr.KVStore(memory=100)
    with pytest.warns(UserWarning, match="more room") as caught:
        result = kr.CacheBlend().prefill(model, prompt, store)
    assert len(caught) == 1  # three segments did not fit
    assert torch.equal(result.logits, kr.FullRecompute().prefill(model, prompt).logits)


@pytest.mark.parametrize(
    ("size", "expected"),
    [("2GiB", 2**31), ("500MB", 5 * 10**8), ("1.5 kib", 1536), (1024, 1024), ("7", 7), ("1 TB", 10**12)],
)
def test_sizes(size, expected):
    assert parse_bytes(size) == expected


@pytest.mark.parametrize("size", ["", "two", "-1", "5 parsecs", "0.5", 0, -3, True])
def test_bad_sizes_name_the_value(size):
    with pytest.raises(ValueError, match=f"size {size!r}"):
        kr.KVStore(memory=size)


def test_contradicting_arguments_are_refused(tmp_path):
    with pytest.raises(ValueError, match="without disk="):
        kr.KVStore(disk_capacity="50GiB")
    with pytest.raises(ValueError, match="nowhere to keep"):
        kr.KVStore(memory=None)
    with pytest.raises(ValueError, match="kv_dtype='fp8'"):
        kr.KVStore(kv_dtype="fp8")
    with pytest.raises(ValueError, match="write='later'"):
        kr.KVStore(write="later")
    with pytest.raises(TypeError, match="disk=3"):
        kr.KVStore(disk=3)
    with pytest.raises(ValueError, match="name of its own"):
        kr.KVStore(disk=[tmp_path, tmp_path])
    with pytest.raises(ValueError, match="capacity= *") as caught:
        kr.KVStore(disk=kr.StorageDevice(tmp_path), disk_capacity=5)
    assert "disk_capacity=5" in str(caught.value)
    with pytest.raises(ValueError, match="throttle_bytes_per_s=0"):
        kr.StorageDevice(tmp_path, throttle_bytes_per_s=0)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.lists(st.integers(0, 9), min_size=1, max_size=4))
@settings(max_examples=200, deadline=None)
def test_keys_differ_whenever_an_input_differs(a, b):
    def key(context, tokens, start=0, model="m", long_rope=False):
        return chunk_key(model, torch.tensor(context), start, torch.tensor(tokens), long_rope)

    assert (key(a, b) == key(b, a)) == (a == b)
    # the same tokens cut elsewhere: [a][b...] is not [ab][...]
    joined = a + b
    cuts = {key(joined[:i], joined[i:]) for i in range(1, len(joined))}
    assert len(cuts) == len(joined) - 1
    assert len({key(a, b), key(a, b, 1), key(a, b, 0, "n"), key(a, b, 0, "m", True)}) == 4


def test_keys_are_the_same_in_every_process():
    """A golden value: a store on disk outlives the process that wrote it."""
    key = chunk_key("model", torch.tensor([1, 2]), 2, torch.tensor([3, 4, 5]), False)
    assert key == GOLDEN_KEY


GOLDEN_KEY = "f6b2751a8718641f288c01dbc1d226b9afd126f84bb87fdb030b4b55ac3827cd"


def test_fingerprint_follows_content_not_name():
    a, b = kr.ReuseModel(hf_model("llama"), name="a"), kr.ReuseModel(hf_model("llama"), name="b")
    other = kr.ReuseModel(hf_model("llama", seed=1), name="a")
    scaled = hf_model("llama", rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0})
    half = kr.ReuseModel(hf_model("llama").to(torch.bfloat16))
    prints = [m.fingerprint() for m in (a, b, other, kr.ReuseModel(scaled), half)]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 4


def test_an_in_place_weight_edit_turns_stored_chunks_into_misses():
    model = tiny_model()
    prompt = kr.RagPrompt(ids(4, 0), [ids(9, 1), ids(9, 2)], ids(3, 3))
    method, store = kr.CacheBlend(), kr.KVStore()
    method.encode(model, prompt, store)
    assert method.prefill(model, prompt, store).trace.misses == 0
    with torch.no_grad():
        model.layers[0].mlp.down_proj.weight.mul_(1.5)
    result = method.prefill(model, prompt, store)
    assert result.trace.hits == 0
    assert torch.equal(result.logits, kr.FullRecompute().prefill(model, prompt).logits)


def test_an_edit_through_data_is_noticed():
    """It leaves version counters alone; a sample of every tensor shows it."""
    model = tiny_model()
    before = model.fingerprint()
    assert model.fingerprint() == before
    model.layers[1].self_attn.v_proj.weight.data.mul_(2.0)
    after = model.fingerprint()
    assert after != before
    model.layers[1].self_attn.v_proj.weight.data.div_(2.0)
    assert model.fingerprint() == before


def test_a_store_too_small_for_one_prompt_says_so():
    model = tiny_model()
    prompt = kr.RagPrompt(ids(4, 0), [ids(20, 1), ids(20, 2)], ids(3, 3))
    one = kr.encode_chunk(model, prompt.prefix, prompt.chunks[0]).num_bytes
    with pytest.warns(UserWarning, match="push each other out"):
        kr.CacheBlend().encode(model, prompt, kr.KVStore(memory=int(1.5 * one)))
