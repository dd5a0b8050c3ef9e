"""The case for blending: what caches find as an exact prefix, at any place, and with both, over cache sizes.

python -m experiments.reuse_gap --data-dir ../shared/data
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from experiments.plotting import STYLES, legend_below, new_figure, tidy
from experiments.ragcache.frame import WORKLOAD_TITLES, CountedConfig, CountedExperiment, counted_app, embedder_note
from experiments.replay import INFINITE, Found, Totals, replay_chunks, replay_hybrid, replay_prefix, totals
from experiments.results import Results
from experiments.timed import Records
from experiments.traces import mooncake, ragpulse
from experiments.vectors import Search
from experiments.workloads import Workload
from kvreuse.intervals import bootstrap_interval

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, None)  # of all different documents' tokens; None: no limit
TOP_K = 5
REPLAYS: dict[str, Callable[[Workload, int], Iterator[Found]]] = {
    "prefix": replay_prefix,
    "any place": replay_chunks,
    "hybrid": replay_hybrid,
}
LABELS = {
    "prefix": "exact prefix (knowledge tree, LRU)",
    "any place": "any place (chunk store, LRU)",
    "hybrid": "hybrid (half tree, half chunks)",
}
STYLE = {"prefix": STYLES["PrefixCaching"], "any place": STYLES["CacheBlend"], "hybrid": ("#009E73", "^")}
NOTES = (
    "Hit rate: share of the documents' tokens whose K/V the cache had. Computed: share of all input tokens (question "
    "included, system prompt not) whose K/V are computed; of K/V reused at another place 15% are recomputed, a blend's "
    "full first layer not counted. Cache size: share of all different documents' tokens; a tree of exact prefixes may "
    "need more than 100%. Mean over orders of the questions, with 95% bootstrap intervals; a trace has one order. "
    "Mooncake's block ids are chained, so what it could reuse at another place cannot be seen: its curves are equal by "
    "construction."
)


def workloads(config: CountedConfig) -> Iterator[tuple[str, int, Workload]]:
    """Name, seed of the order (-1: a trace's own), requests."""
    for name in config.datasets:
        found = config.retrieved(name, Search("flat", TOP_K, embedder=config.embedder))
        for seed in range(config.seeds):
            yield name, seed, found.workload(seed=seed)
    if config.has_trace("ragpulse"):
        yield "ragpulse", -1, ragpulse(config.data)
        yield "ragpulse-prompt", -1, ragpulse(config.data, view="prompt")
    if config.has_trace("mooncake"):
        yield "mooncake", -1, mooncake(config.data)


def count(config: CountedConfig) -> Records:
    """Totals of every workload, cache size and kind of reuse."""
    for name, seed, workload in tqdm(list(workloads(config)), desc="workloads"):
        distinct = workload.distinct_tokens
        for share in SHARES:
            capacity = INFINITE if share is None else int(share * distinct)
            for kind, replay in REPLAYS.items():
                if name == "mooncake" and kind != "prefix":
                    continue
                found = totals(workload, replay(workload, capacity))
                record: dict[str, Any] = {"case_id": name, "method": f"{kind}, {share}", "kind": kind, "share": share}
                yield record | {"seed": seed, "distinct_tokens": distinct, **asdict(found)}


def _measures(results: Results) -> dict[tuple[str, str, float | None], list[Totals]]:
    """(workload, kind, cache size) -> totals of every order."""
    found: dict[tuple[str, str, float | None], list[Totals]] = {}
    for r in results.records:
        values = Totals(**{name: r[name] for name in Totals.__dataclass_fields__})
        found.setdefault((r["case_id"], r["kind"], r["share"]), []).append(values)
    return found


def tabulate(results: Results) -> tuple[pd.DataFrame, str]:
    """A row per workload and cache size."""
    import pandas as pd

    measured = _measures(results)
    rows = []
    for name in dict.fromkeys(case for case, _, _ in measured):
        for share in SHARES:
            row: dict[str, Any] = {
                "workload": WORKLOAD_TITLES[name],
                "cache": "no limit" if share is None else f"{share:.0%}",
            }
            for kind in REPLAYS:
                row[f"hits, {kind}"] = _percent([t.hit_rate for t in measured.get((name, kind, share), [])])
            for kind in REPLAYS:
                row[f"computed, {kind}"] = _percent([t.computed_share for t in measured.get((name, kind, share), [])])
            rows.append(row)
    return pd.DataFrame(rows), f"{embedder_note(results)} {NOTES}"


def _percent(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.1%}" if values else "-"
    return f"{bootstrap_interval(values):.1%}"


def draw(results: Results) -> Figure:
    """A column per workload: hit rate above, tokens computed below, over the cache's size."""
    measured = _measures(results)
    names = list(dict.fromkeys(case for case, _, _ in measured))
    figure, panels = new_figure(2, len(names), sharex=True, sharey="row")
    figure.set_size_inches(max(6.4, 3.1 * len(names)), 6.6)
    at = range(len(SHARES))
    for column, name in enumerate(names):
        for kind in REPLAYS:
            colour, marker = STYLE[kind]
            for row, measure in enumerate(("hit_rate", "computed_share")):
                lines = [[getattr(t, measure) for t in measured.get((name, kind, s), [])] for s in SHARES]
                if not lines[0]:
                    continue
                spread = [bootstrap_interval(values) for values in lines]
                axes = panels[row][column]
                style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 5, "label": LABELS[kind]}
                axes.plot(at, [100 * s.mean for s in spread], **style)
                bounds = [[100 * s.low for s in spread], [100 * s.high for s in spread]]
                axes.fill_between(at, *bounds, color=colour, alpha=0.2, linewidth=0)
        for row in (0, 1):
            tidy(panels[row][column])
            panels[row][column].set_ylim(0, 102)
        seeds = {r["seed"] for r in results.records if r["case_id"] == name}
        orders = f"{len(seeds)} orders" if len(seeds) > 1 or -1 not in seeds else "as it came"
        requests = next(r["requests"] for r in results.records if r["case_id"] == name)
        panels[0][column].set_title(f"{WORKLOAD_TITLES[name]}\n{requests:,} requests, {orders}", fontsize=9)
        labels = ["no\nlimit" if s is None else f"{100 * s:g}" for s in SHARES]
        panels[1][column].set_xticks(list(at), labels, fontsize=8)
        panels[1][column].set_xlabel("cache (% of different documents' tokens)", fontsize=8)
    panels[0][0].set_ylabel("documents' tokens found (%)")
    panels[1][0].set_ylabel("input tokens computed (%)\nblended ones at ratio 0.15")
    figure.suptitle("What can be reused as an exact prefix, and at any place", fontsize=11)
    legend_below(figure, 3 if len(names) > 2 else 1)
    return figure


REUSE_GAP = CountedExperiment(
    name="reuse_gap",
    shows="tokens found as an exact prefix, at any place, and with both, over cache sizes.",
    count=count,
    tabulate=tabulate,
    draw=draw,
    section="RAGCache 3.2, CacheBlend 3.1",
    cost="5 minutes",
)

if __name__ == "__main__":
    counted_app(REUSE_GAP)()
