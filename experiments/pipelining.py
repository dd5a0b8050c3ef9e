"""CacheBlend, section 5: loading pipelined with recompute against loading first, on devices slower and faster than it.

python -m experiments.pipelining --model demo --threads 1
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

import kvreuse as kr
from experiments.environment import scratch_folder
from experiments.plotting import STYLES
from experiments.results import Results
from experiments.timed import Records, TimedConfig, TimedExperiment, prompt_of, timed_app

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

FACTORS = (0.3, 1.0, 3.0)  # how long loading takes beside recompute
LIMIT = 1.10
NOTES = (
    "K/V lie on this disk and are read from it cold, braked by a token bucket so that loading takes 0.3, 1 and 3 "
    "times as long as recompute. Recompute: TTFT with K/V in memory. Load: what the readers took when everything is "
    "loaded first (serial). Bound: the longer of the two, and the load of one layer, which nothing can hide. "
    "Medians over rounds; ratios are paired within rounds, with quartiles."
)


def measure(config: TimedConfig, model: kr.ReuseModel) -> Records:
    """Rounds of: from memory, and for each device serial and pipelined."""
    prompt, method = prompt_of(config, model), kr.CacheBlend()
    memory = kr.KVStore("64GiB")
    method.encode(model, prompt, memory)
    recompute_s = statistics.median(method.prefill(model, prompt, memory).ttft_s for _ in range(3))
    with scratch_folder() as folder:
        plain = kr.KVStore(None, kr.StorageDevice(folder, name="plain"))
        method.encode(model, prompt, plain)
        num_bytes = method.prefill(model, prompt, plain).trace.read_bytes
        stores = {}
        for step in FACTORS:
            rate = num_bytes / (step * recompute_s)
            device = kr.StorageDevice(folder, name=f"load {step:g}x", throttle_bytes_per_s=rate, cold=True)
            stores[step] = kr.KVStore(None, device)
        runs = [(None, memory, True), *((f, s, p) for f, s in stores.items() for p in (True, False))]
        for number in tqdm(range(config.repeats), desc="rounds"):
            shift = number % len(runs)
            rows = []
            for factor, store, pipelined in runs[shift:] + runs[:shift]:
                result = method.prefill(model, prompt, store, pipelined=pipelined)
                rows.append(_record(number, factor, store, pipelined, result, model))
            yield from rows


def _record(
    number: int, factor: float | None, store: kr.KVStore, pipelined: bool, result: kr.Prefill, model: kr.ReuseModel
) -> dict[str, Any]:
    device = store.devices[0] if store.devices else None
    return {
        "case_id": f"round-{number}",
        "method": "memory" if factor is None else f"{'pipelined' if pipelined else 'serial'} {factor:g}x",
        "factor": factor,
        "device": "memory" if device is None else device.label,
        "throttle_bytes_per_s": device and device.throttle_bytes_per_s,
        "pipelined": pipelined,
        "ttft_s": result.ttft_s,
        "stages": result.trace.stages,
        "read_bytes": result.trace.read_bytes,
        "num_layers": model.num_layers,
        "num_tokens": result.prompt.num_tokens,
    }


def rounds(results: Results) -> list[dict[str, dict[str, Any]]]:
    """Whole rounds: method -> record."""
    by_round: dict[str, dict[str, dict[str, Any]]] = {}
    for record in results.records:
        by_round.setdefault(record["case_id"], {})[record["method"]] = record
    whole = [r for r in by_round.values() if len(r) == 1 + 2 * len(FACTORS)]
    if not whole:
        raise ValueError("no whole round in these records: run it again")
    return whole


def tabulate(results: Results) -> tuple[pd.DataFrame, str]:
    """A row per device."""
    import pandas as pd

    rows = []
    for factor in FACTORS:
        parts = [_parts(r, factor) for r in rounds(results)]
        ratio = [p["pipelined"] / p["bound"] for p in parts]
        low, _, high = statistics.quantiles(ratio, n=4) if len(ratio) > 1 else (ratio[0],) * 3
        median = statistics.median(ratio)
        gbps = parts[0]["rate"] * 8 / 1e9
        rows.append(
            {
                "device": f"throttled to {gbps:.2f} Gbps",
                "load / recompute": factor,
                "load, s": statistics.median(p["load"] for p in parts),
                "recompute, s": statistics.median(p["recompute"] for p in parts),
                "serial TTFT, s": statistics.median(p["serial"] for p in parts),
                "pipelined TTFT, s": statistics.median(p["pipelined"] for p in parts),
                "serial / pipelined": statistics.median(p["serial"] / p["pipelined"] for p in parts),
                "bound, s": statistics.median(p["bound"] for p in parts),
                "pipelined / bound": f"{median:.3f} ({low:.3f}-{high:.3f})",
                f"within {LIMIT:.2f}": "yes" if median <= LIMIT else "no",
            }
        )
    return pd.DataFrame(rows), NOTES


def _parts(records: dict[str, dict[str, Any]], factor: float) -> dict[str, float]:
    """One round's numbers for one device, in seconds."""
    serial, pipelined = records[f"serial {factor:g}x"], records[f"pipelined {factor:g}x"]
    load, recompute = serial["stages"]["read_s"], records["memory"]["ttft_s"]
    return {
        "load": load,
        "recompute": recompute,
        "serial": serial["ttft_s"],
        "pipelined": pipelined["ttft_s"],
        "bound": max(load, recompute) + load / serial["num_layers"],
        "rate": serial["throttle_bytes_per_s"],
    }


def draw(results: Results) -> Figure:
    """Bars: load and recompute beside serial and pipelined, a group per device."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.2, 4.6), layout="constrained")
    axes = figure.subplots()
    whole = rounds(results)
    colour = STYLES["CacheBlend"][0]
    bars: Sequence[tuple[str, str, str, str]] = (
        ("recompute", "recompute (K/V in memory)", "#999999", ""),
        ("load", "load alone", "#E69F00", ""),
        ("serial", "TTFT, loading first", colour, "////"),
        ("pipelined", "TTFT, pipelined", colour, ""),
    )
    for place, (name, label, fill, hatch) in enumerate(bars):
        values = [[_parts(r, factor)[name] for r in whole] for factor in FACTORS]
        middle = [statistics.median(v) for v in values]
        error = [[m - min(v) for m, v in zip(middle, values, strict=True)]]
        error.append([max(v) - m for m, v in zip(middle, values, strict=True)])
        at = [group + 0.2 * (place - 1.5) for group in range(len(FACTORS))]
        inside = "white" if hatch else fill
        axes.bar(at, middle, 0.18, yerr=error, hatch=hatch, label=label, capsize=2, color=inside, edgecolor=fill)
    for group, factor in enumerate(FACTORS):
        bound = statistics.median(_parts(r, factor)["bound"] for r in whole)
        name = "max(load, recompute) + one layer's load" if group == 0 else "_"
        axes.plot([group - 0.42, group + 0.42], [bound, bound], color="#D55E00", linestyle="--", label=name)
    gbps = [_parts(whole[0], f)["rate"] * 8 / 1e9 for f in FACTORS]
    ticks = [f"load {f:g}x recompute\n(throttled to {g:.2f} Gbps)" for f, g in zip(FACTORS, gbps, strict=True)]
    axes.set_xticks(range(len(FACTORS)), ticks)
    axes.set_ylabel("seconds (median; whiskers: all rounds)")
    axes.grid(True, axis="y", color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    h = results.header
    figure.suptitle(
        f"{h['model']}: loading pipelined with recompute, {whole[0]['memory']['num_tokens']} tokens, "
        f"{h['device']}, {h['threads']} thread{'s' if h['threads'] != 1 else ''}, {len(whole)} rounds",
        fontsize=11,
    )
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


PIPELINING = TimedExperiment(
    name="pipelining",
    shows="TTFT with loading pipelined against loading first; load 0.3 to 3 times recompute.",
    section="CacheBlend 5",
    cost="3 minutes",
    measure=measure,
    tabulate=tabulate,
    draw=draw,
    repeats=7,
)

if __name__ == "__main__":
    timed_app(PIPELINING)()
