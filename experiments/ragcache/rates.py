"""TTFT and throughput against the request rate: what figures 13 to 16 share."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from experiments.plotting import legend_below, log_axis, new_figure, tidy
from experiments.ragcache.bench import Bench, sweep
from experiments.ragcache.frame import WORKLOAD_TITLES
from experiments.ragcache.notes import notes_of, scale_note
from experiments.ragcache.seeds import SYSTEM_STYLES, interval_of, lines, over_seeds, percent, ratio_of, text
from experiments.ragcache.simulated import SimulatedConfig
from experiments.results import Results
from experiments.timed import Records
from kvreuse.intervals import bootstrap_interval
from kvreuse.ragcache.systems import NO_REUSE, RAGCACHE, SGLANG_LIKE, VLLM_LIKE

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

# vLLM's blocks have 16 tokens; larger ones are simulated in a fraction of the time and change little (reproduction.md).
BLOCK_TOKENS = 256
PATIENT = replace(RAGCACHE, name="RAGCache, search first", speculate=False)
SYSTEMS = (NO_REUSE, replace(VLLM_LIKE, block_tokens=BLOCK_TOKENS), SGLANG_LIKE, RAGCACHE, PATIENT)
LOADS = (0.25, 0.5, 0.8, 1.2, 1.8)
SLO = 5.0  # times the TTFT at the lowest rate, of the server that reuses nothing


def measure(config: SimulatedConfig, top_ks: tuple[int, ...] = (2,), servers: int | None = None) -> Records:
    """All systems at all rates, on every question set, server (the first ``servers``) and top k."""
    for name in config.datasets:
        for top_k in top_ks:
            retrieved = config.retrieved(name, config.search(top_k))
            for scale in config.scales[:servers]:
                yield from sweep(config, Bench(retrieved, scale), SYSTEMS, LOADS, top_k=top_k)


VALUES = ("ttft_s", "ttft_p95_s", "throughput_per_s", "document_hits", "token_hits", "prefill_s")
NOTES = (
    "Beyond what a system can serve its TTFT is that of a growing queue and depends on the length of the run. "
    "Throughput: requests per second of the whole run, from the first arrival to the last token."
)


def frame_of(results: Results) -> pd.DataFrame:
    """All records; ``panel``: question set, server and what else is varied."""
    import pandas as pd

    frame = pd.DataFrame(results.records)
    if "top_k" not in frame:
        frame["top_k"] = 2
    return frame


def tabulate(results: Results) -> tuple[pd.DataFrame, str]:
    """A row per panel, rate and system; notes with the ratios that the paper claims."""
    import pandas as pd

    frame = frame_of(results)
    rows = []
    for (name, server, top_k, load), here in frame.groupby(["case_id", "server", "top_k", "load"], sort=False):
        for method in here["method"].unique():
            mine = here[here["method"] == method]
            rows.append(
                {
                    "questions": WORKLOAD_TITLES[str(name)],
                    "server": server,
                    "top k": top_k,
                    "load": f"{load:g}",
                    "rate, 1/s": f"{mine['rate'].iloc[0]:.3g}",
                    "system": method,
                    "TTFT, s": text(interval_of(mine, "ttft_s")),
                    "its ratio to RAGCache's": text(ratio_of(here, "ttft_s", method, RAGCACHE.name)),
                    "95th percentile, s": text(interval_of(mine, "ttft_p95_s")),
                    "throughput, 1/s": text(interval_of(mine, "throughput_per_s")),
                    "documents hit": percent(interval_of(mine, "document_hits")),
                    "tokens hit": percent(interval_of(mine, "token_hits")),
                    "prefill, s": text(interval_of(mine, "prefill_s")),
                }
            )
    compared = [f"{panel}: {claim}" for panel, claim in claims(frame).items()]
    return pd.DataFrame(rows), "\n\n".join((NOTES, notes_of(results), "\n".join(compared)))


def sustained_rate(frame: pd.DataFrame, method: str, limit_s: float) -> tuple[float, bool]:
    """The rate up to which a system's mean TTFT stays within a limit, and whether it lies beyond the last one tried.

    Between two rates TTFT is taken to be linear. 0 if the lowest rate is too much already.
    """
    means = frame[frame["method"] == method].groupby("rate")["ttft_s"].mean().sort_index()
    rates, values = means.index.tolist(), means.tolist()
    if values[0] > limit_s:
        return 0.0, False
    for i in range(1, len(rates)):
        if values[i] > limit_s:
            share = (limit_s - values[i - 1]) / (values[i] - values[i - 1])
            return rates[i - 1] + share * (rates[i] - rates[i - 1]), False
    return rates[-1], True


def limit_of(frame: pd.DataFrame) -> float:
    """The TTFT that a panel's systems are held to."""
    lowest = frame[(frame["method"] == NO_REUSE.name) & (frame["rate"] == frame["rate"].min())]
    return SLO * float(lowest["ttft_s"].mean())


def claims(frame: pd.DataFrame) -> dict[str, str]:
    """Per panel: how many times RAGCache's TTFT the others have while they keep up, and the rates they keep up with."""
    found = {}
    for (name, server, top_k), here in frame.groupby(["case_id", "server", "top_k"], sort=False):
        limit_s = limit_of(here)
        own, own_beyond = sustained_rate(here, RAGCACHE.name, limit_s)
        parts = [f"RAGCache keeps mean TTFT within {limit_s:.2f} s up to {own:.2f}{' or more' * own_beyond} requests/s"]
        for method in [m for m in here["method"].unique() if m != RAGCACHE.name]:
            rate, _ = sustained_rate(here, method, limit_s)
            kept = here[here["rate"] <= rate]
            ratios = [ratio_of(g, "ttft_s", method, RAGCACHE.name).mean for _, g in kept.groupby("rate")]
            gain = f"{own / rate:.2f}" if rate else "?"
            span = f"{min(ratios):.2f}-{max(ratios):.2f} times the TTFT" if ratios else "never"
            parts.append(
                f"{method}: up to {rate:.2f} (1/{gain}{_gain_by_seed(here, method, limit_s)}), until there {span}"
            )
        found[f"{WORKLOAD_TITLES[str(name)]}, {server}, top {top_k}"] = "; ".join(parts)
    return found


def _gain_by_seed(frame: pd.DataFrame, method: str, limit_s: float) -> str:
    """The interval of RAGCache's rate over a system's, each seed's own; nothing where one lies beyond those tried."""
    gains = []
    for _, here in frame.groupby("seed"):
        (own, own_beyond), (rate, beyond) = (sustained_rate(here, m, limit_s) for m in (RAGCACHE.name, method))
        if own_beyond or beyond or not rate:
            return ""
        gains.append(own / rate)
    found = bootstrap_interval(gains)
    return f" [{found.low:.2f}, {found.high:.2f}]"


def draw(results: Results) -> Figure:
    """Columns are panels; TTFT above, throughput below."""
    frame = frame_of(results)
    panels = list(frame.groupby(["case_id", "server", "top_k"], sort=False))
    figure, axes = new_figure(2, len(panels), sharex="col")
    for column, ((name, server, top_k), here) in enumerate(panels):
        points = over_seeds(here, ["method", "rate"], VALUES)
        above, below = axes[0][column], axes[1][column]
        lines(above, points, "rate", "ttft_s", SYSTEM_STYLES)
        lines(below, points, "rate", "throughput_per_s", SYSTEM_STYLES)
        limit_s = limit_of(here)
        above.axhline(limit_s, color="#777777", linestyle="--", linewidth=1.0, label=f"{SLO:g} x no reuse, lowest rate")
        top = float(here["rate"].max())
        below.plot([0, top], [0, top], color="#777777", linestyle=":", linewidth=1.0, label="all that arrive")
        log_axis(above, which="y")
        above.set_title(f"{WORKLOAD_TITLES[str(name)]}, top {top_k}\n{server}", fontsize=10)
        below.set_xlabel("arriving requests per second")
        above.set_ylabel("mean TTFT (s, log scale)")
        below.set_ylabel("throughput (requests/s)")
        for panel in (above, below):
            panel.set_xlim(0, None)
            tidy(panel)
        below.set_ylim(0, None)
    figure.suptitle(f"Simulated, {scale_note(results)}: TTFT and throughput against request rate", fontsize=11)
    legend_below(figure, 3)
    return figure
