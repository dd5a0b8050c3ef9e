"""Crashes, several processes, damaged files, full and read-only folders: a miss and one warning, never a wrong K/V."""

import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch
from chunks import entry, same
from tiny import hf_model, ids, tiny_model

import kvreuse as kr
from kvreuse.store.disk_entry import DiskEntry

MODEL = "a" * 64
KILLS = int(os.environ.get("KVREUSE_KILLS", "60"))  # 200 for a thorough run
SHARED_S = float(os.environ.get("KVREUSE_SHARED_S", "3"))  # 60 for a thorough run


def files(folder) -> list:
    return sorted(folder.rglob("*.safetensors"))


# -- crashes and other processes --------------------------------------------------------------------------------------


def forked(work) -> int:
    """Run ``work`` in a child process; its process id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of torch that the child never uses
        child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
    os._exit(code)


def test_killed_while_writing(tmp_path):
    """Every later read is the right K/V or a miss, without a warning: a reader never sees a file that is not whole."""
    chunks = [entry(i, tokens=64, layers=8, dim=16) for i in range(4)]

    def write_on():
        store = kr.KVStore(memory=None, disk=tmp_path)
        for turn in range(10**9):
            store.put(str(turn % 4), chunks[turn % 4], MODEL)

    found_any, dice = 0, random.Random(0)
    for _ in range(KILLS):
        child = forked(write_on)
        time.sleep(dice.uniform(0.001, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            store = kr.KVStore(memory=None, disk=tmp_path)
            for i, chunk in enumerate(chunks):
                found = store.get(str(i), chunk.ids, MODEL)
                if found is not None:
                    found_any += 1
                    assert same(found.load(), chunk)
                    found.close()
        if dice.random() < 0.5:
            store.delete(str(dice.randrange(4)))
    assert found_any > KILLS // 4  # the test has looked at something
    for file in tmp_path.rglob("*.tmp"):
        os.utime(file, (0, 0))  # old enough to have lost its writer
    kr.KVStore(memory=None, disk=tmp_path)
    assert not list(tmp_path.rglob("*.tmp"))


def test_two_processes_share_a_folder(tmp_path):
    """Both write, read, delete and evict: no wrong K/V, no exception, and the folder stays near its limit."""
    chunks = [entry(i, tokens=16, layers=4, dim=8) for i in range(30)]
    probe = kr.KVStore(memory=None, disk=tmp_path / "probe")
    probe.put("0", chunks[0], MODEL)
    size = files(tmp_path / "probe")[0].stat().st_size

    def work(seed: int) -> None:
        dice, until, hits = random.Random(seed), time.monotonic() + SHARED_S, 0
        store = kr.KVStore(memory=None, disk=tmp_path / "kv", disk_capacity=12 * size)
        warnings.simplefilter("ignore")  # another process's evictions
        while time.monotonic() < until:
            number = dice.randrange(30)
            key, chunk = str(number), chunks[number]
            what = dice.random()
            if what < 0.4:
                assert store.put(key, chunk, MODEL)
            elif what < 0.95:
                found = store.get(key, chunk.ids, MODEL)
                if found is not None:
                    assert same(found.load(), chunk)
                    found.close()
                    hits += 1
            else:
                store.delete(key)
        assert hits > 20

    children = [forked(lambda seed=seed: work(seed)) for seed in range(2)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert not list((tmp_path / "kv").rglob("*.tmp"))
    store = kr.KVStore(memory=None, disk=tmp_path / "kv", disk_capacity=12 * size)
    assert store.stats().num_bytes <= 2 * 12 * size  # each keeps its limit; they see each other's files every 2 s


# -- damaged files ----------------------------------------------------------------------------------------------------


@pytest.fixture
def model():
    return tiny_model()


PROMPT = kr.RagPrompt(ids(5, 0), [ids(17, 1), ids(13, 2), ids(19, 3)], ids(6, 4))
METHODS = [kr.CacheBlend(ratio=0.3), kr.FullReuse(), kr.LegoLink(k=3)]


def file_of(folder, chunk: torch.Tensor):
    """The file that holds these token ids."""
    raw = chunk.numpy().tobytes()
    return next(f for f in files(folder) if raw in f.read_bytes())


def cut(file):
    os.truncate(file, file.stat().st_size - 1)


def cut_in_header(file):
    os.truncate(file, 100)


def empty(file):
    os.truncate(file, 0)


def flip(at: float):
    def damage(file):
        raw = bytearray(file.read_bytes())
        raw[int(at * (len(raw) - 1))] ^= 16
        file.write_bytes(raw)

    return damage


def flip_start(file):
    raw = file.read_bytes()
    assert raw.count(b'\\"start\\":5') == 1
    file.write_bytes(raw.replace(b'\\"start\\":5', b'\\"start\\":6'))


def foreign(file):
    file.write_bytes(os.urandom(3000))


def foreign_safetensors(file):
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(4)}, file)


def other_version(file):
    file.write_bytes(file.read_bytes().replace(b'\\"version\\":1', b'\\"version\\":2'))


def vanish(file):
    file.unlink()


DAMAGES = {
    "cut": cut,
    "cut in its header": cut_in_header,
    "zero length": empty,
    "bit in the length": flip(0.0),
    "bit in the table": flip(0.05),
    "bit in layer 2": flip(0.6),
    "last bit": flip(1.0),
    "start changed": flip_start,
    "foreign": foreign,
    "foreign safetensors": foreign_safetensors,
    "other version": other_version,
    "vanished": vanish,
}


@pytest.mark.parametrize("pipelined", [True, False])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_file_is_a_miss_and_one_warning(damage, method, pipelined, model, tmp_path):
    """The answer is that of a store without the chunk."""
    without = kr.KVStore(memory=None, disk=tmp_path / "without")
    method.encode(model, PROMPT, without)
    file_of(tmp_path / "without", PROMPT.chunks[1]).unlink()
    expected = method.prefill(model, PROMPT, kr.KVStore(memory=None, disk=tmp_path / "without"))
    assert expected.trace.misses == 1

    store = kr.KVStore(memory=None, disk=tmp_path / "kv")
    method.encode(model, PROMPT, store)
    damage(file_of(tmp_path / "kv", PROMPT.chunks[1]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = method.prefill(model, PROMPT, store, pipelined=pipelined)
    assert len(caught) == 1, [str(w.message) for w in caught]
    assert (result.trace.hits, result.trace.misses) == (3, 1)
    assert torch.equal(result.logits, expected.logits)
    assert all(
        torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
        for a, b in zip(result.cache.layers, expected.cache.layers, strict=True)
    )
    assert method.prefill(model, PROMPT, store).trace.misses == 0  # encoded anew and written again
    assert not [t for t in threading.enumerate() if t.name.startswith("kvreuse-reader")]


def test_a_folder_in_a_files_place(model, tmp_path):
    method, store = kr.CacheBlend(ratio=0.3), kr.KVStore(memory=None, disk=tmp_path)
    method.encode(model, PROMPT, store)
    file = file_of(tmp_path, PROMPT.chunks[1])
    file.unlink()
    file.mkdir()
    with pytest.warns(UserWarning, match="cannot write"):  # nor can it be written anew
        assert method.prefill(model, PROMPT, store).trace.misses == 1


@pytest.mark.parametrize("method", [kr.MapRerank(), kr.PrefixCaching()], ids=lambda m: type(m).__name__)
def test_methods_that_load_whole_entries_survive_damage(method, demo_model, tmp_path):
    prompt = kr.RagPrompt.from_texts(demo_model, system="Be brief.", chunks=["Ada is 36.", "Bob is 40."], question="?")
    store = kr.KVStore(memory=None, disk=tmp_path)
    method.encode(demo_model, prompt, store)
    expected = method.answer(demo_model, prompt, store, max_new_tokens=3)
    if files(tmp_path):
        flip(0.7)(files(tmp_path)[0])
        with pytest.warns(UserWarning, match="damaged"):
            answer = method.answer(demo_model, prompt, store, max_new_tokens=3)
        assert answer.token_ids == expected.token_ids  # both are exact


def test_a_full_device(model, tmp_path):
    """A real one where this machine lets us mount it, else a limit on the file size."""
    import resource

    folder = tmp_path / "small"
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    mounted = libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, b"size=12k") == 0
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if not mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
        store = kr.KVStore(memory=None, disk=folder)
        with pytest.warns(UserWarning, match="cannot write") as caught:
            result = kr.CacheBlend().prefill(model, PROMPT, store)
        assert len([w for w in caught if "cannot write" in str(w.message)]) == 1
        assert torch.equal(result.logits, kr.FullRecompute().prefill(model, PROMPT).logits)
        assert not list(folder.rglob("*.tmp"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        if mounted:
            libc.umount2(str(folder).encode(), 2)


def test_a_read_only_folder(model, tmp_path):
    """What is there is read; what cannot be written is one warning; what is damaged is not read twice."""
    method = kr.CacheBlend(ratio=0.3)
    method.encode(model, PROMPT, kr.KVStore(memory=None, disk=tmp_path))
    libc = ctypes.CDLL(None, use_errno=True)
    path, bind, read_only = str(tmp_path).encode(), 4096, 4096 | 32 | 1
    if libc.mount(path, path, None, bind, None) or libc.mount(None, path, None, read_only, None):
        pytest.skip("needs the right to mount")
    try:
        store = kr.KVStore(memory=None, disk=tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert method.prefill(model, PROMPT, store).trace.misses == 0
        other = kr.RagPrompt(PROMPT.prefix, [ids(9, 7)], PROMPT.question)
        with pytest.warns(UserWarning, match="cannot write") as caught:
            assert method.prefill(model, other, store).trace.misses == 1
        assert len(caught) == 1
    finally:
        libc.umount2(path, 2)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match="misses"):
        store = kr.KVStore(memory=None, disk=tmp_path / "file" / "kv")
    with pytest.warns(UserWarning, match="cannot write"):
        assert not store.put("k", entry(1), MODEL)
    assert store.get("k", entry(1).ids, MODEL) is None


def test_a_chunk_larger_than_the_device(tmp_path):
    store = kr.KVStore(memory=None, disk=tmp_path, disk_capacity=50)
    with pytest.warns(UserWarning, match="is smaller"):
        assert not store.put("k", entry(1), MODEL)
    assert not store.put("l", entry(2), MODEL)  # says so once


# -- what changes K/V is a miss ---------------------------------------------------------------------------------------


def test_changed_models_and_prompts_miss(tmp_path):
    method = kr.CacheBlend()
    base = kr.ReuseModel(hf_model("llama"), name="served")
    scaled = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    others = {
        "weights": kr.ReuseModel(hf_model("llama", seed=1), name="served"),
        "dtype": kr.ReuseModel(hf_model("llama").to(torch.float64), name="served"),
        "rope": kr.ReuseModel(hf_model("llama", rope_parameters=scaled), name="served"),
    }
    method.encode(base, PROMPT, kr.KVStore(memory=None, disk=tmp_path))
    store = kr.KVStore(memory=None, disk=tmp_path)
    assert method.prefill(base, PROMPT, store).trace.misses == 0
    for what, changed in others.items():
        assert method.prefill(changed, PROMPT, store).trace.hits == 0, what
    prefix = kr.RagPrompt(ids(5, 50), PROMPT.chunks, PROMPT.question)
    assert method.prefill(base, prefix, store).trace.hits == 0
    with torch.no_grad():
        base.layers[0].mlp.down_proj.weight.mul_(1.5)
    assert method.prefill(base, PROMPT, store).trace.hits == 0


# -- loading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3-longrope", "smollm3-nope", "mixtral-moe", "gemma2"])
@pytest.mark.parametrize("method", [*METHODS, kr.CacheBlend(selector=kr.QuestionAttention())], ids=repr)
def test_disk_pipelined_serial_and_memory_agree_bit_for_bit(name, method, tmp_path):
    model = tiny_model(name)
    if isinstance(method, kr.CacheBlend) and isinstance(method.selector, kr.QuestionAttention) and name == "gemma2":
        method = kr.CacheBlend(selector=kr.OracleDeviation())
    stores = {"memory": kr.KVStore(), "disk": kr.KVStore(memory=None, disk=tmp_path)}
    for store in stores.values():
        method.encode(model, PROMPT, store)
    results = {
        (where, pipelined): method.prefill(model, PROMPT, store, pipelined=pipelined)
        for where, store in stores.items()
        for pipelined in (True, False)
    }
    first = results["memory", False]
    for result in results.values():
        assert torch.equal(result.logits, first.logits)
        for a, b in zip(result.cache.layers, first.cache.layers, strict=True):
            assert torch.equal(a.keys, b.keys)
            assert torch.equal(a.values, b.values)


def test_only_what_the_fusor_needs_is_read(model, tmp_path):
    """Layer 0 of what runs through it anyway stays on disk; that of an exact prefix and first chunk is read."""
    method, store = kr.CacheBlend(ratio=0.3), kr.KVStore(memory=None, disk=tmp_path)
    method.encode(model, PROMPT, store)
    per_token = 2 * 2 * 8 * 4  # K and V, heads, dim, fp32
    exact = PROMPT.prefix.numel() + PROMPT.chunks[0].numel()
    others = PROMPT.num_context - exact
    result = method.prefill(model, PROMPT, store)
    assert result.trace.read_bytes == per_token * (4 * exact + 3 * others)
    assert kr.FullReuse().prefill(model, PROMPT, store).trace.read_bytes == per_token * 4 * (exact + others)
    assert result.trace.stages["read_s"] > 0


def test_what_was_read_is_kept_in_memory(model, tmp_path):
    method = kr.CacheBlend(ratio=0.3)
    method.encode(model, PROMPT, kr.KVStore(disk=tmp_path))
    store = kr.KVStore(disk=tmp_path)
    first = method.prefill(model, PROMPT, store)
    second = method.prefill(model, PROMPT, store)
    assert first.trace.read_bytes > 0
    assert second.trace.read_bytes == 0
    assert torch.equal(first.logits, second.logits)
    reuse = kr.FullReuse().prefill(model, PROMPT, store)  # needs layer 0 too
    assert reuse.trace.read_bytes == 0
    fresh = kr.KVStore(memory=None, disk=tmp_path)
    assert torch.equal(reuse.logits, kr.FullReuse().prefill(model, PROMPT, fresh).logits)


def readers() -> list:
    return [t for t in threading.enumerate() if t.name.startswith("kvreuse-reader")]


def test_an_error_in_a_reader_surfaces_and_leaves_no_thread(model, tmp_path, monkeypatch):
    method, store = kr.CacheBlend(ratio=0.3), kr.KVStore(memory=None, disk=tmp_path)
    method.encode(model, PROMPT, store)

    def fail(self, layer, pin_memory=False):
        if layer == 2:
            raise RuntimeError("the controller caught fire")
        return true_read(self, layer, pin_memory)

    true_read = DiskEntry.read
    with monkeypatch.context() as patch:
        patch.setattr(DiskEntry, "read", fail)
        for pipelined in (True, False):
            with pytest.raises(RuntimeError, match="caught fire"):
                method.prefill(model, PROMPT, store, pipelined=pipelined)
            assert not readers()
    assert method.prefill(model, PROMPT, store).trace.misses == 0


def test_an_interrupt_leaves_no_thread_no_hook_and_no_lease(model, tmp_path):
    device = kr.StorageDevice(tmp_path, throttle_bytes_per_s=200_000)
    method, store = kr.CacheBlend(ratio=0.3), kr.KVStore(memory=None, disk=device)
    method.encode(model, PROMPT, store)
    open_before = len(os.listdir("/proc/self/fd"))

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model.layers[1].mlp.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        method.prefill(model, PROMPT, store)
    handle.remove()
    assert not readers()
    assert len(os.listdir("/proc/self/fd")) == open_before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.hf.modules())
    assert method.prefill(model, PROMPT, store).trace.misses == 0


def test_the_queue_is_bounded(tmp_path):
    """Readers stop ``ahead`` layers in front of what was taken."""
    from kvreuse.store.loader import LayerLoader

    chunk = entry(1, tokens=8, layers=12)
    store = kr.KVStore(memory=None, disk=tmp_path)
    store.put("k", chunk, MODEL)
    found = store.get("k", chunk.ids, MODEL)
    read = []
    true_read = found.read
    found.read = lambda layer, pin_memory=False: read.append(layer) or true_read(layer, pin_memory)
    with LayerLoader([found, None], lambda layer, index: True, [torch.device("cpu")] * 12, ahead=3) as loader:
        for layer in range(12):
            kv, nothing = loader.take(layer)
            assert nothing is None
            assert torch.equal(kv[0], chunk.keys[layer])
            time.sleep(0.005)
            assert max(read) <= layer + 3
    found.close()
    assert sorted(read) == list(range(12))


def test_closing_a_store_twice_and_a_forgotten_entry(tmp_path):
    """An entry that nobody closes is closed with the object."""
    store = kr.KVStore(memory=None, disk=tmp_path)
    store.put("k", entry(1), MODEL)
    before = len(os.listdir("/proc/self/fd"))
    found = store.get("k", entry(1).ids, MODEL)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del found
    assert len(os.listdir("/proc/self/fd")) == before
    store.close()
    store.close()


def test_the_file_is_written_by_no_pickle(tmp_path):
    """Golden head of a file: the format is what the documentation says, in every process."""
    code = "import sys; sys.path.insert(0, 'tests')\nimport kvreuse as kr; from chunks import entry\n"
    code += f"kr.KVStore(memory=None, disk={str(tmp_path)!r}).put('k', entry(1), {MODEL!r})\n"
    subprocess.run([sys.executable, "-c", code], check=True)
    (file,) = files(tmp_path)
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert raw[8:10] == b'{"'
    assert (8 + length) % 8 == 0
    kr.KVStore(memory=None, disk=tmp_path).put("k", entry(1), MODEL)
    assert file.read_bytes() == raw
