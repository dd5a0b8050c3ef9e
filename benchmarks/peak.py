"""Peak memory of a prefill against what it cannot do without: weights + one prompt's K/V + the store.

    python -m benchmarks.peak [--chunks 6] [--chunk-tokens 512] [--ratio 0.15] [--threads N]

Every method in a process of its own. Once the model is loaded and the chunks are in the store (in memory), the
kernel's high-water mark of resident memory is set back (Linux), one prefill runs, and the mark is read. From it is
taken what the interpreter and the libraries held before the model was loaded. On a GPU it is PyTorch's own count of
allocated memory plus the store, which stays in main memory. The bound is 1.3; full recompute, the model's own path, is
there for comparison.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import kvreuse as kr
from benchmarks.arguments import add_prompt, load, parser_of, save
from benchmarks.memory import resident_mib, trim
from benchmarks.ttft import short_name
from experiments.environment import occasion
from experiments.timed import equal_chunks

BOUND = 1.3
MIB = 2**20


@dataclass(frozen=True)
class Peak:
    """MiB of one prefill: what is needed, what was resident before the model, before the prefill, and at most in it."""

    method: str
    weights: float
    prompt_kv: float
    store: float
    libraries: float
    before: float
    peak: float

    @property
    def needed(self) -> float:
        """Weights, one prompt's K/V, and the store."""
        return self.weights + self.prompt_kv + self.store

    @property
    def ratio(self) -> float:
        """Peak without the libraries, over what is needed."""
        return (self.peak - self.libraries) / self.needed


def methods(ratio: float) -> dict[str, kr.ReuseMethod]:
    """By name, as the process of its own is told."""
    found: list[kr.ReuseMethod] = [
        kr.FullRecompute(),
        kr.PrefixCaching(insert=False),
        kr.FullReuse(),
        kr.CacheBlend(ratio=ratio),
        kr.CacheBlend(ratio=1.0),
    ]
    return {repr(method): method for method in found}


def main() -> None:
    """Measure every method, print the table."""
    parser = parser_of(__doc__, "peak")
    add_prompt(parser)
    parser.add_argument("--only", help=argparse.SUPPRESS)  # the method of a process of its own
    args = parser.parse_args()
    if args.only is not None:
        print(json.dumps(asdict(measure(args, methods(args.ratio)[args.only]))))
        return
    peaks = []
    for name in methods(args.ratio):
        command = [sys.executable, "-m", "benchmarks.peak", *sys.argv[1:], "--only", name]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        peaks.append(Peak(**json.loads(done.stdout.splitlines()[-1])))
    header = {"model": args.model, "chunks": args.chunks, "chunk_tokens": args.chunk_tokens, **occasion()}
    save(args.out, {"header": header, "peaks": [asdict(p) for p in peaks]})
    print(json.dumps(header))
    print(table(peaks))
    print(f"saved to {args.out}")


def measure(args: argparse.Namespace, method: kr.ReuseMethod) -> Peak:
    """One prefill in this process."""
    libraries = resident_mib()
    model = load(args)
    prompt, _ = equal_chunks(model, args.chunks, args.chunk_tokens, data_dir=args.data_dir)
    store = kr.KVStore("64GiB")
    method.encode(model, prompt, store)
    tensors = {t.data_ptr(): t.numel() * t.element_size() for t in [*model.hf.parameters(), *model.hf.buffers()]}
    on_gpu = model.device.type == "cuda"
    held = store.stats().num_bytes / MIB
    trim()
    if on_gpu:
        libraries = 0.0
        torch.cuda.reset_peak_memory_stats(model.device)
        before = torch.cuda.memory_allocated(model.device) / MIB + held
    else:
        Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back to what is resident now
        before = resident_mib()
    result = method.prefill(model, prompt, store)
    peak = torch.cuda.max_memory_allocated(model.device) / MIB + held if on_gpu else high_water_mib()
    kv = sum(t.numel() * t.element_size() for layer in result.cache.layers for t in (layer.keys, layer.values))
    return Peak(repr(method), sum(tensors.values()) / MIB, kv / MIB, held, libraries, before, peak)


def high_water_mib() -> float:
    """The most of this process that was in RAM at once, since the mark was set back, MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise OSError("/proc/self/status has no VmHWM: this needs Linux")


def table(peaks: list[Peak]) -> str:
    """A row per method, MiB; the ratio is (peak - libraries) / needed."""
    heads = ["method", "weights", "prompt K/V", "store", "needed", "libraries", "before", "peak", "ratio"]
    heads.append(f"bound {BOUND}")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for p in peaks:
        numbers = (p.weights, p.prompt_kv, p.store, p.needed, p.libraries, p.before, p.peak)
        verdict = "kept" if p.ratio < BOUND else "broken"
        cells = [short_name(p.method), *(f"{n:.0f}" for n in numbers), f"{p.ratio:.2f}", verdict]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
