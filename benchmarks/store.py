"""The disk store: start-up scan and lookup with many chunks, throughput of writing and reading.

    python -m benchmarks.store [--entries 50000] [--folder FOLDER]

The many chunks are files with a real header (30 layers) and few tokens, written without syncing, for only the index is
measured on them. Throughput is that of 512-token chunks of the demo model's shape, written with fsync and read layer by
layer, page cache dropped and warm; medians over chunks.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from tqdm import tqdm

import kvreuse as kr
from benchmarks.arguments import save

_MODEL = "b" * 64


def chunk(tokens: int, seed: int = 0, layers: int = 30, heads: int = 3, dim: int = 64) -> kr.ChunkKV:
    """Random K/V of the demo model's shape."""
    g = torch.Generator().manual_seed(seed)
    keys, values = (tuple(torch.randn(1, heads, tokens, dim, generator=g) for _ in range(layers)) for _ in range(2))
    return kr.ChunkKV(torch.randint(0, 1000, (tokens,), generator=g), 0, keys, values)


def index(folder: Path, entries: int) -> dict[str, float]:
    """Start-up scan and lookups with ``entries`` files; seconds and microseconds."""
    small = chunk(2)
    store = kr.KVStore(memory=None, disk=folder)
    store.put("0", small, _MODEL)
    tier = next(iter(store._disks.values()))
    (first,) = (folder / _MODEL).iterdir()
    raw = first.read_bytes()
    for number in tqdm(range(1, entries), desc="writing files", leave=False):
        first.with_name(tier.name(str(number)) + ".safetensors").write_bytes(raw)
    started = time.perf_counter()
    store = kr.KVStore(memory=None, disk=folder)
    scan_s = time.perf_counter() - started
    assert store.stats().entries == entries
    order = torch.randperm(entries, generator=torch.Generator().manual_seed(0))[:5000].tolist()

    def timed(lookup) -> float:  # type: ignore[no-untyped-def]
        times = []
        for number in order:
            started = time.perf_counter()
            found = lookup(str(number))
            times.append(time.perf_counter() - started)
            if isinstance(found, kr.store.disk_entry.DiskEntry):
                found.close()
        return statistics.median(times) * 1e6

    return {
        "entries": entries,
        "scan_s": scan_s,
        "contains_us": timed(store.__contains__),
        "miss_us": timed(lambda key: store.get("no" + key, small.ids, _MODEL)),
        "hit_us": timed(lambda key: store.get(key, small.ids, _MODEL)),
        "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def throughput(folder: Path, chunks: int = 12) -> dict[str, float]:
    """GB/s of writing and reading 512-token chunks; per layout the bytes of one."""
    out: dict[str, float] = {}
    one = chunk(512)
    for kv_dtype in (None, "bf16", "int8", "int4"):
        name = kv_dtype or "plain"
        times: dict[str, list[float]] = {"write": [], "cold": [], "warm": []}
        device = kr.StorageDevice(folder / name, cold=True)
        stores = {"cold": kr.KVStore(None, device, kv_dtype=kv_dtype)}
        for number in range(chunks):
            started = time.perf_counter()
            stores["cold"].put(str(number), one, _MODEL)
            times["write"].append(time.perf_counter() - started)
        stores["warm"] = kr.KVStore(None, folder / name, kv_dtype=kv_dtype)
        for how, store in stores.items():
            for number in range(chunks):
                started = time.perf_counter()
                found = store.get(str(number), one.ids, _MODEL)
                assert found is not None
                found.load()
                times[how].append(time.perf_counter() - started)
                found.close()
        size = stores["warm"].stats().num_bytes / chunks
        out[f"{name}_mb"] = size / 1e6
        for what, seconds in times.items():
            out[f"{name}_{what}_gb_per_s"] = size / statistics.median(seconds) / 1e9
    return out


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=50_000)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder by default")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/store.json"))
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        result = {**index(folder / "many", args.entries), **throughput(folder)}
    finally:
        shutil.rmtree(folder)
    save(args.out, result)
    for name, value in result.items():
        print(f"{name:24s} {value:10.3f}")


if __name__ == "__main__":
    main()
