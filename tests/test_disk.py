"""The disk tier: what is kept, evicted, shared, and what counts as a miss."""

import os
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch
from chunks import entry, same
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tiny import ids

import kvreuse as kr
from kvreuse.store.codec import BFloat16, Integer, PackedKV, Plain, codec_for

MODEL, OTHER = "a" * 64, "b" * 64


def files(folder) -> list:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def file_size(tmp_path, tokens: int = 4) -> int:
    probe = kr.KVStore(memory=None, disk=tmp_path / "probe")
    probe.put("x", entry(0, tokens), MODEL)
    return files(tmp_path / "probe")[0].stat().st_size


def test_what_is_put_is_found_again_by_another_store(tmp_path):
    chunk = entry(1)
    assert kr.KVStore(memory=None, disk=tmp_path).put("k", chunk, MODEL)
    store = kr.KVStore(memory=None, disk=tmp_path)
    found = store.get("k", chunk.ids, MODEL)
    assert not found.in_memory
    assert same(found.load(), chunk)
    assert [torch.equal(a, b) for a, b in zip(found.layer(1), chunk.layer(1), strict=True)] == [True, True]
    found.close()
    assert "k" in store
    assert store.get("other", chunk.ids, MODEL) is None
    with pytest.warns(UserWarning, match="other token ids"):
        assert store.get("k", ids(4, 9), MODEL) is None


def test_one_layer_is_one_run_of_bytes_and_any_reader_opens_the_file(tmp_path):
    chunk = entry(2, tokens=5, layers=3, dim=4)
    kr.KVStore(memory=None, disk=tmp_path).put("k", chunk, MODEL)
    (file,) = files(tmp_path)
    assert file.parent.name == MODEL
    assert len(file.stem) == 64
    with safe_open(file, framework="pt") as opened:
        assert set(opened.keys()) == {"ids", "layer.000", "layer.001", "layer.002"}
        assert torch.equal(opened.get_tensor("ids"), chunk.ids)
        raw = opened.get_tensor("layer.001").view(torch.float32)
    assert torch.equal(raw, torch.cat([chunk.keys[1].flatten(), chunk.values[1].flatten()]))


def test_a_layer_read_touches_that_layer_alone(tmp_path, monkeypatch):
    chunk = entry(3, layers=4)
    store = kr.KVStore(memory=None, disk=tmp_path)
    store.put("k", chunk, MODEL)
    found = store.get("k", chunk.ids, MODEL)
    reads = []
    true_read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: reads.append(len(views[0])) or true_read(fd, views, at))
    found.layer(2)
    assert reads == [sum(t.numel() * 4 for t in chunk.layer(2))]


def test_least_recently_used_files_make_room(tmp_path):
    size = file_size(tmp_path)
    store = kr.KVStore(memory=None, disk=tmp_path / "kv", disk_capacity=3 * size)
    chunks = [entry(i) for i in range(5)]
    for i in range(3):
        store.put(str(i), chunks[i], MODEL)
    store.get("0", chunks[0].ids, MODEL).close()
    store.put("3", chunks[3], MODEL)
    assert [str(i) in store for i in range(4)] == [True, False, True, True]
    stats = store.stats()
    assert (stats.entries, stats.num_bytes, stats.evictions) == (3, 3 * size, 1)
    assert sum(f.stat().st_size for f in files(tmp_path / "kv")) == stats.num_bytes
    reopened = kr.KVStore(memory=None, disk=tmp_path / "kv", disk_capacity=3 * size)
    assert reopened.stats().entries == 3
    reopened.put("4", chunks[4], MODEL)  # recency outlives the process: 2 was used least recently
    assert "2" not in reopened


def test_pinned_and_leased_entries_stay(tmp_path):
    size = file_size(tmp_path)
    store = kr.KVStore(memory=None, disk=tmp_path / "kv", disk_capacity=2 * size)
    a, b, c = (entry(i) for i in range(3))
    store.put("a", a, MODEL)
    store.put("b", b, MODEL)
    assert store.pin("a")
    leased = store.get("b", b.ids, MODEL)
    with pytest.warns(UserWarning, match="pinned or being read"):
        assert not store.put("c", c, MODEL)
    assert same(leased.load(), b)
    leased.close()
    assert store.put("c", c, MODEL)
    assert ["a" in store, "b" in store, "c" in store] == [True, False, True]
    store.pin("a", False)
    store.get("c", c.ids, MODEL).close()
    store.put("b", b, MODEL)
    assert "a" not in store
    assert not store.pin("nothing")


def test_a_file_that_is_being_read_outlives_its_eviction_by_another_process(tmp_path):
    mine, theirs = (kr.KVStore(memory=None, disk=tmp_path) for _ in range(2))
    chunk = entry(1)
    mine.put("k", chunk, MODEL)
    found = mine.get("k", chunk.ids, MODEL)
    other = theirs.get("k", chunk.ids, MODEL)  # put after it was opened
    assert same(other.load(), chunk)
    theirs.clear()
    assert not files(tmp_path)
    assert same(found.load(), chunk)
    found.close()
    with pytest.warns(UserWarning, match="cannot be opened"):
        assert mine.get("k", chunk.ids, MODEL) is None
    assert mine.get("k", chunk.ids, MODEL) is None


def test_clear_removes_its_own_models_entries_alone(tmp_path):
    theirs = kr.KVStore(disk=tmp_path)
    theirs.put("t", entry(0), OTHER)
    (tmp_path / "notes.txt").write_text("not ours")
    store = kr.KVStore(disk=tmp_path)
    store.put("m", entry(1), MODEL)
    store.clear()
    assert len(files(tmp_path)) == 2
    assert "m" not in store
    assert "t" in store
    store.clear(OTHER)
    assert [f.name for f in files(tmp_path)] == ["notes.txt"]
    assert theirs.get("t", entry(0).ids, OTHER) is not None  # its own memory


def test_delete_by_key_and_by_chunk(tmp_path):
    store = kr.KVStore(disk=tmp_path)
    store.put("a", entry(1), MODEL)
    store.put("b", entry(1), OTHER)
    store.put("c", entry(2), MODEL)
    assert store.delete("c")
    assert not store.delete("c")
    assert store.stats().entries == 2
    assert store.delete_chunk(entry(1).ids) >= 2
    assert len(store) == 0
    assert not files(tmp_path)


def test_memory_in_front_of_disk(tmp_path):
    chunk = entry(1)
    kr.KVStore(disk=tmp_path).put("k", chunk, MODEL)
    store = kr.KVStore(disk=tmp_path)
    found = store.get("k", chunk.ids, MODEL)
    assert not found.in_memory
    store.promote("k", found)
    found.close()
    assert store.get("k", chunk.ids, MODEL).in_memory
    assert [(t.name, t.entries) for t in store.stats().tiers] == [("memory", 1), (str(tmp_path), 1)]
    assert store.stats().entries == 1


def test_several_devices(tmp_path):
    fast = kr.StorageDevice(tmp_path / "fast", name="fast")
    slow = kr.StorageDevice(tmp_path / "slow", name="slow", throttle_bytes_per_s=1e9, cold=True)
    assert slow.label == "slow (cold, throttled to 8 Gbps)"
    store = kr.KVStore(memory=None, disk=[fast, slow])
    store.put("a", entry(1), MODEL)
    store.put("b", entry(2), MODEL, device="slow")
    assert [t.entries for t in store.stats().tiers] == [1, 1]
    found = store.get("b", entry(2).ids, MODEL)
    assert same(found.load(), entry(2))
    found.close()
    with pytest.raises(ValueError, match="device='tape'"):
        store.put("c", entry(3), MODEL, device="tape")


def test_a_throttled_device_is_no_faster_than_its_rate(tmp_path):
    chunk = entry(1, tokens=64, layers=4, dim=16)
    device = kr.StorageDevice(tmp_path, throttle_bytes_per_s=chunk.num_bytes / 0.08)
    store = kr.KVStore(memory=None, disk=device)
    store.put("k", chunk, MODEL)
    found = store.get("k", chunk.ids, MODEL)
    started = time.perf_counter()
    found.load()
    took = time.perf_counter() - started
    found.close()
    layers = sum(t.numel() * 4 for layer in range(4) for t in chunk.layer(layer))
    assert took >= layers / device.throttle_bytes_per_s


def test_write_back(tmp_path, monkeypatch):
    gate = threading.Event()
    store = kr.KVStore(memory=None, disk=tmp_path, write="back")
    tier = next(iter(store._disks.values()))
    true_put = tier.put
    monkeypatch.setattr(tier, "put", lambda *args: gate.wait(10) and true_put(*args))
    chunk = entry(1)
    assert store.put("k", chunk, MODEL)
    assert not files(tmp_path)
    assert same(store.get("k", chunk.ids, MODEL).load(), chunk)  # from the queue
    assert "k" in store
    assert store.stats().entries == 1
    gate.set()
    store.close()
    assert len(files(tmp_path)) == 1
    assert not [t for t in threading.enumerate() if t.name == "kvreuse-writer"]


def test_write_back_is_flushed_at_the_end_of_the_program(tmp_path):
    code = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "import kvreuse as kr; from chunks import entry\n"
        f"kr.KVStore(disk={str(tmp_path)!r}, write='back').put('k', entry(1), 'm')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    store = kr.KVStore(memory=None, disk=tmp_path)
    assert same(store.get("k", entry(1).ids, "m").load(), entry(1))


@settings(max_examples=60, deadline=None)
@given(
    operations=st.lists(
        st.tuples(st.sampled_from(["put", "put", "get", "get", "delete", "reopen"]), st.integers(0, 4)), max_size=25
    ),
    capacity=st.integers(1, 4),
    memory=st.sampled_from([None, 200, 10_000]),
)
def test_two_tiers_against_a_model(operations, capacity, memory, tmp_path_factory):
    """What is found is what was put; files never exceed the capacity; the stats are what lies in the folder."""
    folder = tmp_path_factory.mktemp("kv")
    size = file_size(folder)
    room = capacity * size

    def open_store() -> kr.KVStore:
        return kr.KVStore(memory, folder / "kv", disk_capacity=room)

    store, on_disk = open_store(), []  # keys, least recently used first
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for what, number in operations:
            key, chunk = str(number), entry(number)
            if what == "put":
                assert store.put(key, chunk, MODEL)
                on_disk = [k for k in on_disk if k != key][-(capacity - 1) :] if capacity > 1 else []
                on_disk.append(key)
            elif what == "get":
                found = store.get(key, chunk.ids, MODEL)
                assert found is not None or key not in on_disk
                if found is not None:
                    assert same(found.load(), chunk)
                    if not found.in_memory:
                        on_disk = [k for k in on_disk if k != key] + [key]
                    found.close()
            elif what == "delete":
                store.delete(key)
                on_disk = [k for k in on_disk if k != key]
                assert key not in store
            else:
                store = open_store()
            disk = store.stats().tiers[-1]
            held = files(folder / "kv")
            assert len(held) == disk.entries == len(on_disk)
            assert sum(f.stat().st_size for f in held) == disk.num_bytes <= room


@pytest.mark.parametrize("codec", [Plain(), BFloat16(), Integer(8), Integer(4)], ids=lambda c: c.name)
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("dim", [2, 5, 64])
def test_codecs_round_trip_within_half_a_step(codec, tokens, dim):
    chunk = entry(tokens + dim, tokens, dim=dim)
    chunk.keys[0][..., 0] *= 50  # an outlier channel
    packed = PackedKV.of(chunk, codec)
    for layer in range(2):
        like = chunk.like(layer)
        assert [(p.dtype, tuple(p.shape)) for p in packed.parts[layer]] == codec.specs(like)
        assert sum(p.numel() * p.element_size() for p in packed.parts[layer]) == codec.num_bytes(like)
        for true, back, dims in zip(chunk.layer(layer), packed.layer(layer), ("channel", "token"), strict=True):
            assert back.dtype == true.dtype
            if isinstance(codec, Plain):
                assert torch.equal(back, true)
            elif isinstance(codec, BFloat16):
                assert torch.equal(back, true.bfloat16().float())
            elif dims == "token":
                step = (true.amax(-1, keepdim=True) - true.amin(-1, keepdim=True)) / (2**codec.bits - 1)
                assert ((back - true).abs() <= step / 2 + 1e-5).all()
            else:
                for group in range(0, tokens, 64):
                    part, got = true[:, :, group : group + 64], back[:, :, group : group + 64]
                    step = (part.amax(2, keepdim=True) - part.amin(2, keepdim=True)) / (2**codec.bits - 1)
                    assert ((got - part).abs() <= step / 2 + 1e-4).all()  # 1e-4: fp32 rounding of the outlier channel


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("memory", [None, "1MiB"])
def test_compressed_entries_are_smaller_and_keep_to_themselves(kv_dtype, memory, tmp_path):
    chunk = entry(1, tokens=64, dim=64)
    plain = kr.KVStore(memory, tmp_path)
    plain.put("k", chunk, MODEL)
    packed = kr.KVStore(memory, tmp_path, kv_dtype=kv_dtype)
    assert packed.get("k", chunk.ids, MODEL) is None  # the same key in another layout is another entry
    packed.put("k", chunk, MODEL)
    sizes = []
    for layout in (None, kv_dtype):
        alone = kr.KVStore(memory, tmp_path / str(layout), kv_dtype=layout)
        alone.put("k", chunk, MODEL)
        sizes.append(alone.stats().num_bytes)
    assert sizes[0] / sizes[1] > {"bf16": 1.9, "int8": 3.0, "int4": 5.0}[kv_dtype]
    found = packed.get("k", chunk.ids, MODEL)
    expected = PackedKV.of(chunk, codec_for(kv_dtype)).load()
    assert same(found.load(), expected)
    found.close()
    reopened = kr.KVStore(memory, tmp_path, kv_dtype=kv_dtype).get("k", chunk.ids, MODEL)
    assert same(reopened.load(), expected)
    reopened.close()
