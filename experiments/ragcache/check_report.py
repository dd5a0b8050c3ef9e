"""Table and picture of `check_simulator`: what the simulator said beside what the server took."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.plotting import tidy
from experiments.ragcache.check_run import POLICIES
from experiments.results import Results

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

RUNS = ("server", "simulator")
TTFT_LIMIT, HIT_LIMIT = 0.15, 1.0  # share of the measured; percentage points
COLOURS = {"PGDSF": "#0072B2", "LRU": "#E69F00", "LFU": "#D55E00"}
NOTES = (
    "Both run the same requests: real questions over real retrieval, the question of rank r asked in proportion to "
    "1 / r^{skew}; arrivals are Poisson and the same for every policy. The run is served in {segments} segments. The "
    "simulator's costs in each are the mean of two profiles, measured in the same process right before and behind it, "
    "for this machine's speed drifts within minutes; of the server's run it gets the "
    "answers' lengths, nothing else. Hit rate: documents that were cached, of all that were retrieved."
)


def _cells(results: Results) -> list[tuple[float, str, dict[str, dict[str, np.ndarray]]]]:
    """(rate, policy, values by run and name) of every complete cell."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for record in results.records:
        found.setdefault(record["case_id"], {})[record["method"]] = record
    cells = []
    for runs in found.values():
        if set(runs) == set(RUNS):
            values = {name: {k: np.asarray(v) for k, v in runs[name]["values"].items()} for name in RUNS}
            cells.append((runs["server"]["rate"], runs["server"]["policy"], values))
    if not cells:
        raise ValueError("no cell of these records is complete yet: run it again")
    return cells


def _ttft(values: dict[str, np.ndarray]) -> np.ndarray:
    return values["first_token_s"] - values["arrived_s"]


def tabulate(results: Results) -> tuple[pd.DataFrame, str]:
    """A row per rate and policy."""
    import pandas as pd

    documents = sum(results.header["documents_per_request"])
    rows, worst_ttft, worst_hit = [], 0.0, 0.0
    for rate, policy, values in _cells(results):
        row: dict[str, Any] = {"rate, 1/s": rate, "policy": policy}
        real, simulated = (_ttft(values[name]) for name in RUNS)
        for label, pick in (("mean", np.mean), ("p95", lambda x: np.percentile(x, 95))):
            seen, said = float(pick(real)), float(pick(simulated))
            worst_ttft = max(worst_ttft, abs(said / seen - 1))
            row[f"{label} TTFT, s"], row[f"{label}, simulated"] = seen, said
            row[f"{label} error"] = f"{said / seen - 1:+.1%}"
        hits = [100 * float(values[name]["hit_documents"].sum()) / documents for name in RUNS]
        worst_hit = max(worst_hit, abs(hits[1] - hits[0]))
        row |= {"hit rate, %": hits[0], "simulated, %": hits[1], "difference, points": f"{hits[1] - hits[0]:+.2f}"}
        rows.append(row)
    h = results.header
    verdict = (
        f"Largest error of a TTFT: {worst_ttft:.1%}, wanted: {TTFT_LIMIT:.0%}; of a hit rate: {worst_hit:.2f} points, "
        f"wanted: {HIT_LIMIT:g}. {h['requests']} requests for {h['distinct_questions']} questions and "
        f"{h['distinct_documents']} documents of at most {h['doc_tokens']} tokens, from {h['source'].split(':')[0]}; "
        f"room for {h['gpu_tokens']} tokens in the first tier and {h['host_tokens']} in the second."
    )
    segments = len(next(r["profiles"] for r in results.records if r["method"] == "simulator")) - 1
    return pd.DataFrame(rows), f"{verdict}\n\n{NOTES.format(skew=h['skew'], segments=segments)}"


def draw(results: Results) -> Figure:
    """Left: simulated against measured. Then, per rate, how TTFTs are distributed in both."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    cells = _cells(results)
    rates = sorted({rate for rate, _, _ in cells})
    figure = Figure(figsize=(4.4 * (1 + len(rates)), 4.9), layout="constrained")
    panels = figure.subplots(1, 1 + len(rates), squeeze=False)[0]
    left, points = panels[0], []
    for rate, policy, values in cells:
        real, simulated = (_ttft(values[name]) for name in RUNS)
        for marker, pick in (("o", np.mean), ("^", lambda x: np.percentile(x, 95))):
            place = float(pick(real)), float(pick(simulated))
            points.append(place)
            left.plot(*place, marker, color=COLOURS[policy], fillstyle="none", markersize=7, markeredgewidth=1.6)
        axes = panels[1 + rates.index(rate)]
        share = np.arange(1, len(real) + 1) / len(real)
        for times, line in ((real, "-"), (simulated, "--")):
            axes.plot(np.sort(times), share, line, color=COLOURS[policy], linewidth=1.5)
    ends = np.array([0.0, 1.15 * max(max(place) for place in points)])
    left.plot(ends, ends, color="#777777", linewidth=0.8)
    left.fill_between(ends, ends * (1 - TTFT_LIMIT), ends * (1 + TTFT_LIMIT), color="#bbbbbb", alpha=0.35, linewidth=0)
    left.set(xlim=ends, ylim=ends, xlabel="TTFT of the server (s)", ylabel="TTFT of the simulator (s)")
    left.set_title("all rates", fontsize=10)
    for axes, rate in zip(panels[1:], rates, strict=True):
        axes.set(xlabel="TTFT (s)", ylabel="share of requests below", ylim=(0, 1.02))
        axes.set_xlim(left=0)
        axes.set_title(f"{rate:g} requests per second", fontsize=10)
    for axes in panels:
        tidy(axes)
    grey: dict[str, Any] = {"color": "#555555"}
    handles = [Line2D([], [], color=COLOURS[p], linewidth=4, label=p) for p in POLICIES if p in {c[1] for c in cells}]
    handles += [
        Line2D([], [], marker="o", linestyle="", fillstyle="none", label="mean", **grey),
        Line2D([], [], marker="^", linestyle="", fillstyle="none", label="95th percentile", **grey),
        Line2D([], [], linewidth=7, alpha=0.35, label=f"within {TTFT_LIMIT:.0%}", color="#bbbbbb"),
        Line2D([], [], linestyle="-", label="server", **grey),
        Line2D([], [], linestyle="--", label="simulator", **grey),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    h = results.header
    about = f"{h['requests']} requests ({h['device']}, threads: {h['threads']})"
    figure.suptitle(f"{Path(h['model']).name}: the simulator against the server, {about}", fontsize=11)
    return figure
