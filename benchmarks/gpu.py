"""Time to first token at the paper's model sizes, on a GPU: random weights in bf16, made there; all in a time limit.

    python -m benchmarks.gpu [--shapes mistral-7b,llama-3-8b,yi-34b] [--chunks 6,24] [--limit-s 420]

Full recompute (the attention kernel that PyTorch chooses, and its flash kernel), prefix caching (the first chunk is
known), full reuse, CacheBlend at several ratios, as it is and with its layers replayed as CUDA graphs; K/V in main
memory. Each prompt: a warm-up, then interleaved rounds, as many as its share of the time allows; medians, the split by
stage, the most GPU memory that was allocated in the warm-up (the lines with graphs come last in it), and how far the
first token's logits are from full recompute's, relative to the largest (with random weights this says that the code is
right at ratio 1, not how good a method is). What does not fit the GPU, or the time, is listed as not run.

Without a GPU it runs a tiny shape on the CPU and says so: a test of the script, no measurement.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import kvreuse as kr
from benchmarks.arguments import save
from benchmarks.random_models import SHAPES, RandomModel, does_not_fit, random_prompt
from benchmarks.tables import stage_table, timed_stages
from experiments.environment import COMMIT, processor, versions
from kvreuse.blend.graphs import LayerGraphs

RATIOS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
ON_CPU = "CPU, tiny shape: shows that the script runs, says nothing about a GPU"


@dataclass(frozen=True)
class Timed:
    """A method, the attention kernel it is held to (None: PyTorch chooses), and whether layers are CUDA graphs."""

    label: str
    method: kr.FullRecompute | kr.PrefixCaching | kr.ChunkReuse
    kernel: SDPBackend | None = None
    graphs: bool = False

    def held_to_kernel(self) -> AbstractContextManager[Any]:
        """While open, attention runs in that kernel or not at all."""
        return nullcontext() if self.kernel is None else sdpa_kernel(self.kernel)


def timed_methods(ratios: Sequence[float], graphs: bool) -> list[Timed]:
    """The lines of every table; the first is the reference. ``graphs``: those of CUDA graphs as well."""
    return [
        Timed("full recompute, sdpa", kr.FullRecompute()),
        Timed("full recompute, flash", kr.FullRecompute(), SDPBackend.FLASH_ATTENTION),
        Timed("prefix caching", kr.PrefixCaching(insert=False)),
        Timed("full reuse", kr.FullReuse()),
        *(Timed(f"CacheBlend, ratio {ratio:g}", kr.CacheBlend(ratio=ratio)) for ratio in ratios),
        *(
            Timed(f"CacheBlend, ratio {ratio:g}, graphs", kr.CacheBlend(ratio=ratio), graphs=True)
            for ratio in ratios
            if graphs and ratio < 1  # at 1 no row is left out, and layers run as they are
        ),
    ]


@dataclass(frozen=True)
class Settings:
    """What is run; sizes of prompts in tokens."""

    device: str
    dtype: str
    shapes: tuple[str, ...]
    chunks: tuple[int, ...]
    chunk_tokens: int
    ratios: tuple[float, ...]
    repeats: int
    limit_s: float

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt, prefix and question included."""
        return max(self.chunks) * self.chunk_tokens + 64


@dataclass
class Cell:
    """One model and prompt: rounds of stages in seconds by label, and what was seen besides."""

    shape: str
    num_chunks: int
    num_tokens: int = 0
    rounds: list[dict[str, dict[str, float]]] = field(default_factory=list)
    logit_error: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)  # label ("all") -> why

    def table(self) -> str:
        """The cell as Markdown."""
        lines = [f"### {self.shape}, {self.num_chunks} chunks, {self.num_tokens:,} tokens, {len(self.rounds)} rounds"]
        if self.rounds:
            more = {"logit error": {label: f"{error:.1e}" for label, error in self.logit_error.items()}}
            if self.peak_bytes:
                more["peak GiB"] = {label: f"{peak / 2**30:.2f}" for label, peak in self.peak_bytes.items()}
            lines.append(stage_table({label: label for label in self.rounds[0]}, self.rounds, more))
        lines += [f"Not run: {label}: {why}." for label, why in self.not_run.items()]
        return "\n\n".join(lines)


def run(settings: Settings) -> Iterator[Cell]:
    """All cells, each as soon as it is done; the time that is left is shared out evenly among those to come."""
    ends, device = time.perf_counter() + settings.limit_s, torch.device(settings.device)
    dtype: torch.dtype = getattr(torch, settings.dtype)
    to_come = len(settings.shapes) * len(settings.chunks)
    for name in settings.shapes:
        model, reason = None, does_not_fit(SHAPES[name], settings.longest, device, dtype)
        if reason is None and time.perf_counter() < ends:
            try:
                model = RandomModel(SHAPES[name], device, dtype)
            except torch.OutOfMemoryError as error:
                reason = f"OutOfMemoryError: {error}"
        store = kr.KVStore("1TiB", pin_memory=device.type == "cuda")
        for num_chunks in settings.chunks:
            cell, now = Cell(name, num_chunks), time.perf_counter()
            if model is None or now >= ends:
                cell.not_run["all"] = reason or _out_of_time(settings)
            else:
                prompt = random_prompt(SHAPES[name], num_chunks, settings.chunk_tokens)
                _measure(cell, model, prompt, store, settings, now + (ends - now) / to_come)
            to_come -= 1
            yield cell
        del model  # before the next one's weights come


def _measure(
    cell: Cell, model: RandomModel, prompt: kr.RagPrompt, store: kr.KVStore, settings: Settings, stop_at: float
) -> None:
    """Warm-up, then rounds until ``stop_at`` (a round that would end later is not begun, except for the first)."""
    cell.num_tokens = prompt.num_tokens
    ready: list[Timed] = []
    graphs = LayerGraphs(model) if model.device.type == "cuda" else None
    reference: torch.Tensor | None = None
    for timed in timed_methods(settings.ratios, graphs is not None):
        if time.perf_counter() >= stop_at:
            cell.not_run[timed.label] = _out_of_time(settings)
            continue
        try:
            timed.method.encode(model, prompt, store)
            result = _prefill(cell, timed, model, prompt, store, graphs)
        except (RuntimeError, kr.UnsupportedModelError) as error:  # out of memory, no kernel for this type
            cell.not_run[timed.label] = f"{type(error).__name__}: {error}"
            continue
        logits = result.logits.float()
        if reference is None and isinstance(timed.method, kr.FullRecompute):
            reference = logits
        if reference is not None:
            cell.logit_error[timed.label] = float((logits - reference).abs().max() / reference.abs().max())
        ready.append(timed)
    round_s = 0.0
    while ready and len(cell.rounds) < settings.repeats:
        began = time.perf_counter()
        if began + round_s > stop_at:
            break
        shift = len(cell.rounds) % len(ready)
        times: dict[str, dict[str, float]] = {}
        try:
            for timed in ready[shift:] + ready[:shift]:
                times[timed.label] = timed_stages(_prefill(cell, timed, model, prompt, store, graphs))
        except RuntimeError as error:  # the rounds before it are kept
            cell.not_run[timed.label] = f"{type(error).__name__}: {error}"
            break
        cell.rounds.append({timed.label: times[timed.label] for timed in ready})
        round_s = time.perf_counter() - began
    if not cell.rounds:
        cell.not_run |= {timed.label: _out_of_time(settings) for timed in ready}


def _prefill(
    cell: Cell,
    timed: Timed,
    model: RandomModel,
    prompt: kr.RagPrompt,
    store: kr.KVStore,
    graphs: LayerGraphs | None,
) -> kr.Prefill:
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(model.device)
    model.graphs = graphs if timed.graphs else None
    try:
        with timed.held_to_kernel():
            result = timed.method.prefill(model, prompt, store)
    finally:
        model.graphs = None  # nothing else runs through them; with the prompt's last round their memory is free
    if on_gpu:
        peak = torch.cuda.max_memory_allocated(model.device)
        cell.peak_bytes.setdefault(timed.label, peak)
    return result


def _out_of_time(settings: Settings) -> str:
    return f"the time limit of {settings.limit_s:g} s was reached"


def header(settings: Settings) -> dict[str, Any]:
    """What was run, and where."""
    on_gpu = torch.device(settings.device).type == "cuda"
    return {
        **asdict(settings),
        "note": "" if on_gpu else ON_CPU,
        "device": torch.cuda.get_device_name(torch.device(settings.device)) if on_gpu else settings.device,
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "commit": COMMIT,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def report(head: dict[str, Any], cells: Sequence[Cell]) -> str:
    """All tables, under a line that says where they were measured."""
    where = f"{head['device']}, {head['dtype']}, torch {head['versions']['torch']}, {head['date'][:10]}"
    return "\n\n".join([f"{where}. {head['note']}".strip(), *(cell.table() for cell in cells)]) + "\n"


def parse(arguments: Sequence[str] | None = None) -> tuple[Settings, Path]:
    """The command line; what is not given depends on whether there is a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", help=f"of {', '.join(SHAPES)} [all but tiny on a GPU, tiny elsewhere]")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="[bfloat16, float32 on a CPU]")
    parser.add_argument("--chunks", default="6,24", help="chunks of the prompts [%(default)s]")
    parser.add_argument("--chunk-tokens", type=int, help="tokens of a chunk [512; 32 on a CPU]")
    parser.add_argument("--ratios", default=",".join(f"{r:g}" for r in RATIOS), help="[%(default)s]")
    parser.add_argument("--repeats", type=int, default=5, help="most rounds of a prompt [%(default)s]")
    parser.add_argument("--limit-s", type=float, default=420.0, help="seconds for all of it [%(default)s]")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu.json"))
    args = parser.parse_args(arguments)
    on_cpu = torch.device(args.device).type == "cpu"
    names = args.shapes or ("tiny" if on_cpu else ",".join(name for name in SHAPES if name != "tiny"))
    unknown = [name for name in names.split(",") if name not in SHAPES]
    if unknown:
        parser.error(f"--shapes {','.join(unknown)}: choose from {', '.join(SHAPES)}")
    settings = Settings(
        device=args.device,
        dtype=args.dtype or ("float32" if on_cpu else "bfloat16"),
        shapes=tuple(names.split(",")),
        chunks=tuple(int(n) for n in args.chunks.split(",")),
        chunk_tokens=args.chunk_tokens or (32 if on_cpu else 512),
        ratios=tuple(float(r) for r in args.ratios.split(",")),
        repeats=args.repeats,
        limit_s=args.limit_s,
    )
    return settings, args.out


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure; after every prompt print its table and save what there is, as JSON and as Markdown beside it."""
    settings, out = parse(arguments)
    head = header(settings)
    cells: list[Cell] = []
    out.parent.mkdir(parents=True, exist_ok=True)  # or fail before anything is measured
    print(report(head, cells))
    for cell in run(settings):
        cells.append(cell)
        print(cell.table() + "\n", flush=True)
        save(out, {"header": head, "cells": [asdict(c) for c in cells]})
        out.with_suffix(".md").write_text(report(head, cells))
    print(f"saved to {out} and {out.with_suffix('.md')}")


if __name__ == "__main__":
    main()
