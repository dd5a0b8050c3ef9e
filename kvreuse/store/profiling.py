"""Measures what `LoadingController` decides by: the real model's times, and every device's cold throughput."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from kvreuse.blend.selectors import SelectionView, Selector
from kvreuse.kv import ChunkKV, encode_chunk
from kvreuse.methods.base import ReuseMethod
from kvreuse.methods.cacheblend import CacheBlend
from kvreuse.methods.full_recompute import FullRecompute
from kvreuse.methods.full_reuse import FullReuse
from kvreuse.prompt import RagPrompt
from kvreuse.store.codec import KVDtype, PackedKV, codec_for
from kvreuse.store.devices import StorageDevice
from kvreuse.store.loader import LayerLoader
from kvreuse.store.measured import device_name
from kvreuse.store.profile import DeviceProfile, ModelProfile, check_grid
from kvreuse.store.store import KVStore

if TYPE_CHECKING:
    from kvreuse.model import ReuseModel
    from kvreuse.results import Prefill

_QUESTION = 32  # tokens
_READ_BYTES = 1 << 26  # of a device per repeat, or more: at least two chunks


@dataclass(frozen=True)
class _Spread(Selector):
    """HKVD's cost, tokens from all over the prompt.

    In random tokens the deviation grows from chunk to chunk: what HKVD finds there stands later than in real text, and
    sees a fifth more keys. With a constant schedule, for a gradual one drops tokens by their deviation, the early ones.
    """

    needs_fresh_kv: ClassVar[bool] = True

    def scores(self, view: SelectionView) -> torch.Tensor:
        """The deviation is measured, and not used."""
        deviation = view.deviation("kv")
        return torch.rand(deviation.shape, generator=torch.Generator().manual_seed(0))


def profile_all(
    model: ReuseModel,
    devices: Sequence[StorageDevice],
    lengths: Sequence[int],
    ratios: Sequence[float],
    repeats: int,
    memory_price_per_gb_month: float | None = None,
    *,
    kv_dtype: KVDtype | None = None,
    chunk_tokens: int = 512,
    warm_up: int = 1,
) -> tuple[ModelProfile, tuple[DeviceProfile, ...]]:
    """Profiles of the model and of the devices (`LoadingController.profile`)."""
    if repeats < 1 or chunk_tokens < 1 or warm_up < 0:
        raise ValueError(f"repeats={repeats}, chunk_tokens={chunk_tokens}, warm_up={warm_up}: give 1, 1 and 0 or more")
    measured = profile_model(model, lengths, ratios, repeats, kv_dtype, chunk_tokens, warm_up)
    found = [profile_device(model, device, repeats, kv_dtype, chunk_tokens) for device in devices]
    if memory_price_per_gb_month is not None:
        rate = _memory_bytes_per_s(model, repeats, chunk_tokens)
        found.insert(0, DeviceProfile("memory", rate, price_per_gb_month=memory_price_per_gb_month, in_memory=True))
    return measured, tuple(found)


def profile_model(
    model: ReuseModel,
    lengths: Sequence[int],
    ratios: Sequence[float],
    repeats: int = 3,
    kv_dtype: KVDtype | None = None,
    chunk_tokens: int = 512,
    warm_up: int = 1,
) -> ModelProfile:
    """Full reuse and blends of random tokens, and full prefill by itself, in interleaved rounds; medians.

    Chunks are encoded alone, so that all of them are inexact but the prefix's one token. Full prefill takes long and
    has two rounds at most.

    Raises:
        ValueError: a grid that is not ascending, or of which the model's context takes nothing.
    """
    check_grid("lengths", lengths)
    check_grid("ratios", ratios)
    fitting = [n for n in lengths if _QUESTION + 2 <= n <= model.max_context]
    if not fitting:
        raise ValueError(f"lengths={tuple(lengths)}: give some of {_QUESTION + 2} to {model.max_context} tokens")
    blends = [CacheBlend(ratio=r, schedule="constant", context="bare", selector=_Spread()) for r in ratios]
    methods: list[ReuseMethod] = [FullRecompute(), FullReuse(context="bare"), *blends]
    store = KVStore("64GiB", kv_dtype=kv_dtype)
    prompts = [_random_prompt(model, n, chunk_tokens) for n in fitting]
    taken: dict[tuple[int, int], list[Prefill]] = {}
    for prompt in prompts:
        methods[1].encode(model, prompt, store)
    for number in range(-warm_up, repeats):
        for which, at in [(w, a) for a in range(len(prompts)) for w in range(1, len(methods))]:
            result = methods[which].prefill(model, prompts[at], store)
            if number >= 0:
                result.cache = None  # only its times are kept
                taken.setdefault((which, at), []).append(result)
    for number in range(-warm_up, min(repeats, 2)):
        for at, prompt in enumerate(prompts[: 1 if number < 0 else None]):
            result = methods[0].prefill(model, prompt, store)
            result.cache = None
            if number >= 0:
                taken.setdefault((0, at), []).append(result)
    ttft = [
        tuple(statistics.median(r.ttft_s for r in taken[which, at]) for at in range(len(prompts)))
        for which in range(len(methods))
    ]
    first = tuple(
        statistics.median(r.trace.stages["check_s"] for w in range(2, len(methods)) for r in taken[w, at])
        for at in range(len(prompts))
    )
    return ModelProfile(
        model=model.name,
        fingerprint=model.fingerprint(),
        device=device_name(model),
        dtype=str(model.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        num_layers=model.num_layers,
        token_bytes=_packed(model, kv_dtype, chunk_tokens).num_bytes / chunk_tokens,
        num_question=_QUESTION,
        lengths=tuple(fitting),
        ratios=tuple(ratios),
        prefill_s=ttft[0],
        reuse_s=ttft[1],
        first_s=first,
        blend_s=tuple(ttft[2:]),
    )


def profile_device(
    model: ReuseModel,
    device: StorageDevice,
    repeats: int = 3,
    kv_dtype: KVDtype | None = None,
    chunk_tokens: int = 512,
) -> DeviceProfile:
    """Throughput of layer-wise reads through the tier and its reader threads, from a cold page cache; medians.

    Chunks of the model's own shape are written to a folder of their own inside the device's, and removed. Of a prompt
    of three of them half is recomputed, from the device and from memory in turn, to learn what its readers cost.
    """
    os.makedirs(device.folder, exist_ok=True)
    packed = _packed(model, kv_dtype, chunk_tokens)
    count = max(2, -(-_READ_BYTES // packed.num_bytes))
    with tempfile.TemporaryDirectory(prefix="profile-", dir=device.folder) as folder:
        store = KVStore(None, replace(device, folder=folder, cold=True, capacity="1TiB"), kv_dtype=kv_dtype)
        chunk = packed.load()
        for number in range(count):
            if not store.put(f"chunk {number}", chunk):
                raise OSError(f"cannot profile {device.name}: there is no room in {device.folder}")
        rates, opens = zip(*(_read_all(model, store, packed.ids, count) for _ in range(repeats + 1)), strict=True)
        slows = _slowdown(model, store, repeats, chunk_tokens)
    return DeviceProfile(
        name=device.name,
        bytes_per_s=statistics.median(rates[1:]),
        open_s=statistics.median(opens[1:]),
        price_per_gb_month=device.price_per_gb_month,
        throttle_bytes_per_s=device.throttle_bytes_per_s,
        slows=slows,
    )


def _slowdown(model: ReuseModel, disk: KVStore, repeats: int, chunk_tokens: int) -> float:
    """How many times as long recompute takes beside the reader threads; waiting for them is not part of it."""
    num_tokens = min(3 * chunk_tokens + _QUESTION + 1, model.max_context)
    prompt = _random_prompt(model, num_tokens, chunk_tokens)
    method = CacheBlend(ratio=0.5, schedule="constant", context="bare", selector=_Spread())
    stores = (KVStore("64GiB", kv_dtype=disk.kv_dtype), disk)
    for store in stores:
        method.encode(model, prompt, store)
    pairs = []
    for number in range(max(2, repeats) + 1):  # both orders at least, behind a warm-up
        seconds = {}
        for which in ((0, 1), (1, 0))[number % 2]:
            trace = method.prefill(model, prompt, stores[which]).trace
            if trace.misses:
                raise OSError(f"what was written to {disk.devices[0].name} cannot be read back")
            stages = trace.stages
            seconds[which] = stages["check_s"] + stages["rotate_s"] + stages["recompute_s"]
        pairs.append(seconds[1] / seconds[0])
    return max(1.0, statistics.median(pairs[1:]))


def _read_all(model: ReuseModel, store: KVStore, ids: torch.Tensor, count: int) -> tuple[float, float]:
    """Bytes per second of all layers of all chunks, and seconds to find and open one."""
    started = time.perf_counter()
    entries = [store.get(f"chunk {number}", ids) for number in range(count)]
    open_s = (time.perf_counter() - started) / count
    try:
        if None in entries:
            raise OSError(f"what was written to {store.devices[0].name} cannot be read back")
        devices = [model.layer_device(layer) for layer in range(model.num_layers)]
        with LayerLoader(entries, lambda layer, index: True, devices) as loader:
            for layer in range(model.num_layers):
                loader.take(layer)
        return loader.read_bytes / loader.read_s, open_s
    finally:
        for entry in entries:
            if entry is not None:
                entry.close()


def _memory_bytes_per_s(model: ReuseModel, repeats: int, chunk_tokens: int) -> float:
    """How fast K/V go from main memory to where the model computes."""
    chunk = _chunk(model, chunk_tokens)
    places = [
        (torch.empty_like(k, device=d), torch.empty_like(v, device=d))
        for layer, (k, v) in enumerate(zip(chunk.keys, chunk.values, strict=True))
        for d in [model.layer_device(layer)]
    ]
    rates = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        for layer, (keys, values) in enumerate(places):
            keys.copy_(chunk.keys[layer])
            values.copy_(chunk.values[layer])
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        rates.append(chunk.num_bytes / (time.perf_counter() - started))
    return statistics.median(rates[1:])


def _chunk(model: ReuseModel, chunk_tokens: int) -> ChunkKV:
    ids = _random_ids(model, min(chunk_tokens, model.max_context), 0)
    return encode_chunk(model, ids[:0], ids).to("cpu")


def _packed(model: ReuseModel, kv_dtype: KVDtype | None, chunk_tokens: int) -> PackedKV:
    """A chunk of the model's own K/V as the store lays it out."""
    return PackedKV.of(_chunk(model, chunk_tokens), codec_for(kv_dtype))


def _random_ids(model: ReuseModel, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(int(model.config.vocab_size), (count,), generator=generator)


def _random_prompt(model: ReuseModel, num_tokens: int, chunk_tokens: int) -> RagPrompt:
    """A token of prefix, chunks, the question."""
    ids = _random_ids(model, num_tokens, num_tokens)
    return RagPrompt(ids[:1], list(ids[1:-_QUESTION].split(chunk_tokens)), ids[-_QUESTION:])
