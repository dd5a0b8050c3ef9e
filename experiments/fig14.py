"""CacheBlend, figure 14: TTFT against request rate on the extended sets, with a cache of fixed size.

The service times are measured on the model; the queue they go through is simulated.

python -m experiments.fig14 --model demo --threads 1
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

import kvreuse as kr
from experiments.extended import extended_set
from experiments.plotting import DATASET_TITLES, STYLES, band, legend_below, new_figure, tidy
from experiments.ragcache.fig02 import machine
from experiments.replay import Found, replay_chunks, replay_prefix
from experiments.results import Results
from experiments.service_times import BLEND, FULL, PREFIX, REUSE, measure_service, service_table
from experiments.timed import Records, TimedConfig, TimedExperiment, prompt_of, timed_app
from experiments.vectors import embedder_named
from experiments.workloads import Workload, poisson_arrivals
from kvreuse.intervals import bootstrap_interval

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

DATASETS = ("musique", "2wikimqa")
CAPACITIES = (0.25, 1.0)  # of the tokens of all different chunks
SEEDS = 5
LOADS = tuple(float(x) for x in np.geomspace(0.2, 8.0, 16))  # rate x full recompute's mean service time
METHODS = (FULL, PREFIX, REUSE, BLEND)
LABELS = {
    FULL: "full recompute",
    PREFIX: "prefix caching",
    REUSE: "full reuse (loses quality)",
    BLEND: "CacheBlend",
}
WITHIN = 2.0  # "keeps up": a mean TTFT below so many times full recompute's service time
SHOWN = 5.0  # the y axis ends at so many times that
NOTES = (
    "A first-in, first-out queue with one server, simulated; a request's service is a measured one of the same method "
    "and number of cached chunks (rounds drawn at random), scaled by its length: the prefill, and what follows the "
    "first token before the server is free (K/V the cache did not have). Decoding is left out. Cache: LRU, its size a "
    "share of the tokens of all different chunks; prefix caching holds document sequences, the others chunks. The "
    "first sixth of the requests fills the cache; behind it the queue begins, empty. Keeps up: the highest simulated "
    f"rate at which the mean TTFT stays below {WITHIN:g} x full recompute's service time; >= and < where that rate "
    "lies beyond the simulated ones. "
    f"Means over {SEEDS} seeds (order of queries and chunks, arrivals) with 95% bootstrap intervals."
)


def measure(config: TimedConfig, model: kr.ReuseModel) -> Records:
    """Service times, then the queue: over datasets, cache sizes, seeds, methods and rates."""
    services = []
    for record in measure_service(model, prompt_of(config, model), config.repeats):
        services.append(record)
        yield record
    yield from queue_records(config, model, services)


def queue_records(config: TimedConfig, model: kr.ReuseModel, services: list[dict[str, Any]]) -> Records:
    """What the simulated queue gives for the measured service times."""
    embedder = embedder_named("words" if config.small else "demo")
    table, tokens = service_table(services), services[0]["tokens"]
    for dataset in DATASETS:
        extended = extended_set(
            dataset,
            model,
            data_dir="small" if config.small else config.data_dir,
            chunk_tokens=config.chunk_tokens,
            top_k=config.num_chunks,
            embedder=embedder,
        )
        for seed in range(SEEDS):
            workload = extended.workload(seed)
            for share in CAPACITIES:
                for method in METHODS:
                    hits = cached_chunks(method, workload, int(share * workload.distinct_tokens))
                    base = {"dataset": dataset, "seed": seed, "share": share, "kind": method}
                    yield from _queue(base, workload, hits, table, tokens)


def cached_chunks(method: str, workload: Workload, capacity: int) -> np.ndarray:
    """How many chunks of every request are cached: leading ones (prefix caching), any (chunk reuse), none."""
    if method == FULL:
        return np.zeros(len(workload.requests), dtype=int)
    found: Iterator[Found] = (replay_prefix if method == PREFIX else replay_chunks)(workload, capacity)
    return np.array([sum(f.hits) for f in found])


def _queue(
    base: Mapping[str, Any], workload: Workload, hits: np.ndarray, table: Mapping[tuple[str, int], Any], tokens: int
) -> Records:
    """One record per rate."""
    kind, seed, warm = base["kind"], base["seed"], workload.warmup
    rng = np.random.default_rng([seed, METHODS.index(kind)])
    drawn = np.array([row[rng.integers(len(row))].numpy() for row in (table[kind, int(n)] for n in hits)])
    sizes = np.array([workload.system_tokens + r.input_tokens for r in workload.requests])
    ttft, after = (drawn * (sizes / tokens)[:, None]).T
    full_s = float(table[FULL, 0][:, 0].mean()) * sizes.mean() / tokens
    for load in LOADS:
        rate = load / full_s
        arrivals = np.array(poisson_arrivals(rate, len(sizes), seed))
        times = fifo_waits(arrivals[warm:], (ttft + after)[warm:]) + ttft[warm:]
        yield {
            "case_id": f"{base['dataset']}, {base['share']}, seed {seed}",
            "method": f"{kind} at {load:.3g}",
            **base,
            "load": load,
            "rate": rate,
            "mean_ttft_s": float(times.mean()),
            "p95_ttft_s": float(np.percentile(times, 95)),
            "service_s": float(ttft[warm:].mean()),
            "full_s": full_s,
            "cached_share": float(hits[warm:].mean() / max(len(r.documents) for r in workload.requests)),
            "requests": len(times),
        }


def fifo_waits(arrivals: np.ndarray, services: np.ndarray) -> np.ndarray:
    """Seconds that each request waits for one server, first come, first served (Lindley's recursion, exactly)."""
    drift = np.concatenate([[0.0], np.cumsum(services[:-1] - np.diff(arrivals))])
    return drift - np.minimum.accumulate(np.minimum(drift, 0.0))


def queue_frame(results: Results) -> pd.DataFrame:
    """A row per dataset, cache size, method and rate: means over seeds, with intervals."""
    import pandas as pd

    frame = pd.DataFrame([r for r in results.records if "rate" in r])
    rows = []
    for key, group in frame.groupby(["dataset", "share", "kind", "load"], sort=False):
        spread = bootstrap_interval(group["mean_ttft_s"].tolist())
        row = dict(zip(("dataset", "share", "kind", "load"), key, strict=True))
        row |= {"ttft": spread.mean, "ttft_low": spread.low, "ttft_high": spread.high}
        rows.append(row | {n: group[n].mean() for n in ("rate", "p95_ttft_s", "service_s", "full_s", "cached_share")})
    return pd.DataFrame(rows)


def tabulate(results: Results) -> tuple[pd.DataFrame, str]:
    """A row per dataset, cache size and method."""
    import pandas as pd

    rows, by_seed = [], _bounds_by_seed(results)
    for (dataset, share), group in queue_frame(results).groupby(["dataset", "share"], sort=False):
        bounds = {kind: keeps_up(part) for kind, part in group.groupby("kind", sort=False)}
        seeds = {kind: by_seed[str(dataset), str(share), str(kind)] for kind in bounds}
        for kind, part in group.groupby("kind", sort=False):
            low = part.iloc[0]
            rows.append(
                {
                    "dataset": f"{DATASET_TITLES[str(dataset)]} extended",
                    "cache": f"{share:.0%}",
                    "method": LABELS[str(kind)],
                    "chunks cached": f"{low['cached_share']:.1%}",
                    "mean service to first token, s": low["service_s"],
                    "TTFT at the lowest rate, s": f"{low['ttft']:.3g} [{low['ttft_low']:.3g}, {low['ttft_high']:.3g}]",
                    "keeps up to, requests/s": f"{bounds[kind]}{_spread(seeds[kind])}",
                    "times prefix caching": "1"
                    if kind == PREFIX
                    else f"{bounds[kind].over(bounds[PREFIX])}{_spread(seeds[kind], seeds[PREFIX])}",
                }
            )
    return pd.DataFrame(rows), NOTES


@dataclass(frozen=True)
class Bound:
    """A rate that is known exactly, or only to be at least (">=") or below ("<") a simulated one."""

    rate: float
    sign: Literal["", ">=", "<"] = ""

    def over(self, other: Bound) -> str:
        """The quotient as far as it is known; "-" where it can be anything."""
        turned = {"": "", ">=": "<=", "<": ">"}[other.sign]  # of 1 / other
        signs = {self.sign, turned} - {""}
        if {s[0] for s in signs} == {"<", ">"}:
            return "-"
        return f"{min(signs, key=len, default='')} {self.rate / other.rate:.3g}".strip()  # one strict: strict

    def __str__(self) -> str:
        return f"{self.sign} {self.rate:.3g}".strip()


def keeps_up(part: pd.DataFrame) -> Bound:
    """The highest rate before the mean TTFT first passes the bound, between simulated rates on a line."""
    bound = WITHIN * part["full_s"].iloc[0]
    rates, times = part["rate"].tolist(), part["ttft"].tolist()
    for place, seconds in enumerate(times):
        if seconds > bound:
            if place == 0:
                return Bound(float(rates[0]), "<")
            part_way = (bound - times[place - 1]) / (seconds - times[place - 1])
            return Bound(float(rates[place - 1] + part_way * (rates[place] - rates[place - 1])))
    return Bound(float(rates[-1]), ">=")


def _bounds_by_seed(results: Results) -> dict[tuple[str, str, str], list[Bound]]:
    """What the curve of each seed keeps up with, by dataset, cache size and method."""
    import pandas as pd

    frame = pd.DataFrame([r for r in results.records if "rate" in r]).rename(columns={"mean_ttft_s": "ttft"})
    found: dict[tuple[str, str, str], list[Bound]] = {}
    for (dataset, share, kind, _), part in frame.groupby(["dataset", "share", "kind", "seed"], sort=False):
        found.setdefault((str(dataset), str(share), str(kind)), []).append(keeps_up(part))
    return found


def _spread(bounds: list[Bound], over: list[Bound] | None = None) -> str:
    """The interval of the seeds' rates, or of their ratios to others'; nothing where one is not known exactly."""
    if any(bound.sign for bound in (*bounds, *(over or ()))):
        return ""
    rates = [bound.rate for bound in bounds]
    if over is not None:
        rates = [rate / other.rate for rate, other in zip(rates, over, strict=True)]
    found = bootstrap_interval(rates)
    return f" [{found.low:.3g}, {found.high:.3g}]"


def draw(results: Results) -> Figure:
    """A column per dataset, a row per cache size."""
    frame = queue_frame(results)
    figure, panels = new_figure(len(CAPACITIES), len(DATASETS), sharex="col")
    ends = [0.0] * len(DATASETS)
    for row, share in enumerate(CAPACITIES):
        for column, dataset in enumerate(DATASETS):
            axes = panels[row][column]
            here = frame[(frame["dataset"] == dataset) & (frame["share"] == share)]
            for kind in METHODS:
                colour, marker = STYLES[kind.split("(", 1)[0]]
                line = here[here["kind"] == kind]
                band(axes, line["rate"], line, "ttft", color=colour, marker=marker, label=LABELS[kind])
            top = SHOWN * here["full_s"].iloc[0]
            axes.set_ylim(0, top)
            ends[column] = max(ends[column], 1.2 * here[here["ttft"] < top]["rate"].max())
            axes.set_xlim(0, ends[column])
            axes.set_title(f"{DATASET_TITLES[dataset]} extended, cache of {share:.0%}", fontsize=10)
            axes.set_ylabel("mean TTFT (s)")
            tidy(axes)
            if row == len(CAPACITIES) - 1:
                axes.set_xlabel("requests per second")
    h = results.header
    figure.suptitle(
        f"{machine(h)}, {h['num_chunks']} chunks of at most {h['chunk_tokens']} tokens: TTFT against request rate\n"
        f"(service times measured, queue simulated with {SEEDS} seeds)",
        fontsize=11,
    )
    legend_below(figure, 4)
    return figure


FIG14 = TimedExperiment(
    name="fig14",
    shows="TTFT against request rate on the extended sets, cache of fixed size (simulated queue).",
    measure=measure,
    tabulate=tabulate,
    draw=draw,
    section="CacheBlend 7.2",
    cost="4 minutes at 256-token chunks; the first time 9, for embeddings",
    repeats=3,
)

if __name__ == "__main__":
    timed_app(FIG14)()
