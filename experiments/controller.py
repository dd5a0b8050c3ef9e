"""The loading controller: TTFT as it predicts it against TTFT as measured, and what ratio="auto" costs.

python -m experiments.controller --model demo --threads 1
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

import kvreuse as kr
from experiments.environment import scratch_folder
from experiments.plotting import STYLES
from experiments.profiled import profile_of, profile_record
from experiments.results import Results
from experiments.timed import Records, TimedConfig, TimedExperiment, prompt_of, timed_app
from kvreuse.store.profile import DeviceProfile, ModelProfile
from kvreuse.store.profiling import profile_device

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

RATIOS = (0.05, 0.15, 0.5)
CHUNKS = (2, 3, 6, 8)  # of a prompt: 1k, 1.5k, 3k, 4k tokens
FACTORS = (1.0, 3.0)  # load of the longest prompt beside its recompute at r*
ERROR, LIMIT = 0.15, 1.10
NOTES = (
    "Every round profiles the model and the devices, then measures: this machine's speed moves within minutes, and so"
    " both are of the same minutes. The profile is the element-wise median over rounds; before: the first round's "
    "alone. It holds how much longer recompute takes beside a device's reader threads; without: predicted as if that "
    "cost nothing. It is of random tokens at other lengths, in chunks encoded alone, the recomputed ones spread "
    "evenly; the prompts are real text behind a prefix, with an exact first chunk. Measured: medians over rounds. "
    "Devices are this disk, read cold and throttled so that loading the longest prompt takes 1 and 3 times its "
    "recompute at r*. Auto: the ratio that CacheBlend('auto') chose by the rounds so far, and its TTFT by the longer "
    "of the blend at r* from memory and the load (bytes read by the throttle's rate)."
)


def measure(config: TimedConfig, model: kr.ReuseModel) -> Records:
    """Rounds of a profile, and of prompts over lengths, devices and ratios."""
    lengths = [n * config.chunk_tokens for n in (2, 4, 8)]
    settings: dict[str, Any] = {"ratios": RATIOS, "chunk_tokens": config.chunk_tokens, "repeats": 1}
    prompts = [prompt_of(config, model, n) for n in CHUNKS]
    memory = kr.KVStore("64GiB")
    profiles: list[ModelProfile] = []
    devices: list[kr.StorageDevice] = []
    found: list[tuple[DeviceProfile, ...]] = []  # per round
    with scratch_folder() as folder:
        for number in range(config.repeats):
            profiles.append(kr.LoadingController.profile(model, lengths=lengths, warm_up=not number, **settings).model)
            if not devices:
                devices = [_device(profiles[0], prompts[-1], factor, folder) for factor in FACTORS]
                disks = [kr.KVStore(None, d) for d in devices]
                for prompt in prompts:
                    for store in (memory, disks[0]):  # the disks share a folder
                        kr.CacheBlend().encode(model, prompt, store)
                for store in (memory, *disks):
                    kr.CacheBlend().prefill(model, prompts[0], store)  # warm-up
            found.append(tuple(profile_device(model, d, 1, chunk_tokens=config.chunk_tokens) for d in devices))
            yield profile_record(kr.LoadingController(profiles[-1], found[-1]), number)
            controller = kr.LoadingController(median_profile(profiles), median_devices(found))
            auto = kr.CacheBlend(ratio="auto", controller=controller)
            runs = [(p, s, kr.CacheBlend(ratio=r)) for p in prompts for s in (memory, disks[0]) for r in RATIOS]
            runs += [(p, s, auto) for p in prompts for s in disks]
            shift = number * len(runs) // config.repeats
            for prompt, store, method in tqdm(runs[shift:] + runs[:shift], desc=f"round {number}"):
                yield _record(number, method, store, method.prefill(model, prompt, store))


def median_profile(profiles: Sequence[ModelProfile]) -> ModelProfile:
    """The element-wise median of profiles of one model over one grid."""
    times = {name: [getattr(p, name) for p in profiles] for name in ("prefill_s", "reuse_s", "first_s")}
    medians: dict[str, Any] = {name: _medians(rows) for name, rows in times.items()}
    medians["blend_s"] = tuple(_medians(rows) for rows in zip(*(p.blend_s for p in profiles), strict=True))
    return replace(profiles[0], **medians)


def median_devices(rounds: Sequence[tuple[DeviceProfile, ...]]) -> tuple[DeviceProfile, ...]:
    """The element-wise median of profiles of the same devices."""
    medians = []
    for same in zip(*rounds, strict=True):
        times = {n: statistics.median(getattr(d, n) for d in same) for n in ("bytes_per_s", "open_s", "slows")}
        medians.append(replace(same[0], **times))
    return tuple(medians)


def _medians(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(statistics.median(column) for column in zip(*rows, strict=True))


def _device(profile: ModelProfile, prompt: kr.RagPrompt, factor: float, folder: Path) -> kr.StorageDevice:
    """This disk, braked: loading takes ``factor`` times as long as recompute at r*."""
    one = kr.LoadingController(profile, (DeviceProfile("one byte a second", 1.0),))
    rate = one.T_load(prompt, "one byte a second") / (factor * one.T_recompute(one.min_ratio, prompt))
    return kr.StorageDevice(folder, name=f"load {factor:g}x", throttle_bytes_per_s=rate, cold=True)


def _record(number: int, method: kr.CacheBlend, store: kr.KVStore, result: kr.Prefill) -> dict[str, Any]:
    device = store.devices[0] if store.devices else None
    rate = device.throttle_bytes_per_s if device else None
    ratio, prompt = result.trace.ratio, result.prompt
    assert ratio is not None
    return {
        "case_id": f"round-{number}",
        "method": f"{prompt.num_tokens} {device.name if device else 'memory'} {method.ratio}",
        "lengths": [prompt.prefix.numel(), [c.numel() for c in prompt.chunks], prompt.question.numel()],
        "num_tokens": prompt.num_tokens,
        "device": device.name if device else "memory",
        "throttle_bytes_per_s": rate,
        "asked": method.ratio,
        "ratio": ratio,
        "ttft_s": result.ttft_s,
        "load_s": result.trace.read_bytes / rate if rate else 0.0,
        "stages": result.trace.stages,
    }


def _predicted(record: Mapping[str, Any], controller: kr.LoadingController) -> float:
    """TTFT of a record's request by a profile, at the ratio it ran with."""
    prefix, chunks, question = record["lengths"]
    prompt = kr.RagPrompt([0] * prefix, [[0] * n for n in chunks], [0] * question)
    device = None if record["device"] == "memory" else record["device"]
    return controller.predict_ttft(prompt, record["ratio"], device)


def tabulate(results: Results) -> tuple[pd.DataFrame, str]:
    """A row per prompt, device and ratio."""
    import pandas as pd

    profiles = [kr.LoadingController.from_json(r["profile"]) for r in results.records if r["method"] == "profile"]
    records = pd.DataFrame([r for r in results.records if r["method"] != "profile"])
    if records.empty:
        raise ValueError("no run in these records yet: run it again")
    controller = replace(
        profiles[0],
        model=median_profile([p.model for p in profiles]),
        devices=median_devices([p.devices for p in profiles]),
    )
    idle = replace(controller, devices=tuple(replace(d, slows=1.0) for d in controller.devices))
    for column, by in (("predicted_s", controller), ("before_s", profiles[0]), ("idle_s", idle)):
        records[column] = [_predicted(record, by) for record in records.to_dict("records")]
    rows = []
    for _, runs in records.groupby("method", sort=False):
        first = runs.iloc[0]
        measured, predicted, before, idle_s, ratio = (
            float(runs[column].median()) for column in ("ttft_s", "predicted_s", "before_s", "idle_s", "ratio")
        )
        rows.append(
            {
                "tokens": int(first["num_tokens"]),
                "device": first["device"],
                "asked": str(first["asked"]),
                "ratio": ratio,
                "measured, s": measured,
                "predicted, s": predicted,
                "error": f"{predicted / measured - 1:+.1%}",
                "error, before": f"{before / measured - 1:+.1%}",
                "error, without": f"{idle_s / measured - 1:+.1%}",
                "load, s": float(first["load_s"]),
                "by max(r* blend, load)": _against(records, first, measured) if first["asked"] == "auto" else "-",
            }
        )
    frame = pd.DataFrame(rows).sort_values(["tokens", "device", "ratio"], kind="stable", ignore_index=True)
    errors = (frame["predicted, s"] / frame["measured, s"] - 1).abs()
    autos = [v for v in frame["by max(r* blend, load)"] if isinstance(v, float)]
    worst = f"Largest error of a prediction: {errors.max():.1%} (median {errors.median():.1%}); wanted: {ERROR:.0%}. "
    slows = ", ".join(f"{d.slows:.2f} beside {d.name}" for d in controller.devices)
    worst += f"Recompute takes so many times as long: {slows}. "
    if autos:
        worst += f"Auto by max(r* blend, load): at most {max(autos):.3f}, wanted: {LIMIT:.2f}."
    return frame, f"{worst}\n\n{NOTES}"


def _against(records: pd.DataFrame, auto: pd.Series, measured: float) -> float:
    """TTFT of auto by the longer of r* from memory and the load."""
    same = records[(records["num_tokens"] == auto["num_tokens"]) & (records["device"] == "memory")]
    blend = statistics.median(same[same["asked"] == 0.15]["ttft_s"])
    return measured / max(blend, float(auto["load_s"]))


def draw(results: Results) -> Figure:
    """Left: predicted against measured. Right: what auto costs."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    frame, _ = tabulate(results)
    devices = {"memory": ("#000000", "s"), "load 1x": (STYLES["CacheBlend"][0], "o"), "load 3x": ("#D55E00", "^")}
    figure = Figure(figsize=(10.5, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for device, (colour, marker) in devices.items():
        rows = frame[frame["device"] == device]
        label = "in memory" if device == "memory" else f"disk throttled: {device} recompute (longest prompt)"
        left.plot(rows["measured, s"], rows["predicted, s"], marker, color=colour, fillstyle="none", label=label)
        autos = rows[rows["asked"] == "auto"]
        values = [float(v) for v in autos["by max(r* blend, load)"]]
        right.plot(autos["tokens"], values, marker, color=colour, markersize=8)
        for (_, row), value in zip(autos.iterrows(), values, strict=True):
            others = frame[(frame["tokens"] == row["tokens"]) & (frame["asked"] == "auto")]["by max(r* blend, load)"]
            offset = (6, 4 if value == others.max() else -11)
            text = f"r = {row['ratio']:.2f}"
            right.annotate(text, (row["tokens"], value), offset, textcoords="offset points", fontsize=8)
    ends = [frame["measured, s"].min() * 0.8, frame["measured, s"].max() * 1.25]
    left.plot(ends, ends, color="#777777", linewidth=0.8)
    band = [[e * (1 + sign * ERROR) for e in ends] for sign in (-1, 1)]
    left.fill_between(ends, band[0], band[1], color="#bbbbbb", alpha=0.35, linewidth=0, label=f"within {ERROR:.0%}")
    left.set_xscale("log")
    left.set_yscale("log")
    for axis in (left.xaxis, left.yaxis):
        axis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    left.set_xlabel("measured TTFT (s, log scale)")
    left.set_ylabel("predicted TTFT (s, log scale)")
    left.set_title("ratios 0.05 to 0.5 and auto's", fontsize=10)
    right.axhline(LIMIT, color="#CC79A7", linestyle="--", label=f"limit {LIMIT:.2f}")
    right.set_ylim(min(0.8, right.get_ylim()[0]), max(1.2, right.get_ylim()[1]))
    right.margins(x=0.2)
    right.set_xlabel("prompt (tokens)")
    right.set_ylabel("TTFT by max(r* blend, load)")
    right.set_title('ratio="auto": the ratio it chose, and what it cost', fontsize=10)
    for axes in (left, right):
        axes.grid(True, color="#e4e4e4", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    h, model = results.header, profile_of(results).model
    figure.suptitle(f"{h['model']}: the loading controller ({model.device}, threads: {model.threads})", fontsize=11)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


CONTROLLER = TimedExperiment(
    name="controller",
    shows="the loading controller's predicted TTFT against the measured one; what auto costs.",
    section="CacheBlend 5",
    cost="20 minutes",
    measure=measure,
    tabulate=tabulate,
    draw=draw,
    repeats=5,
)

if __name__ == "__main__":
    timed_app(CONTROLLER)()
