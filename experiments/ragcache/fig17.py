"""RAGCache, figure 17: replacement policies over host memory: hit rate, prefill seconds, TTFT.

python -m experiments.ragcache.fig17 --data-dir ../shared/data
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import kvreuse as kr
from experiments.plotting import legend_below, log_axis, new_figure, tidy
from experiments.ragcache.bench import Bench, sweep
from experiments.ragcache.frame import WORKLOAD_TITLES
from experiments.ragcache.notes import notes_of, scale_note
from experiments.ragcache.seeds import interval_of, lines, over_seeds, percent, text
from experiments.ragcache.simulated import SimulatedConfig, SimulatedExperiment, simulated_app
from experiments.results import Results
from experiments.timed import Records
from kvreuse.ragcache.systems import RAGCACHE, System

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

HOST_GIB = (8, 16, 32, 64, 128)  # the paper's, of its 192; other scales take the same shares of theirs
WHOLE_GIB = 192
LOAD = 1.0
# Frequencies outlive the last copy (the paper's reading), or go with it.
POLICIES: Mapping[str, kr.Policy] = {
    "PGDSF": kr.PGDSF(),
    "GDSF": kr.GDSF(),
    "LFU": kr.LFU(),
    "LRU": kr.LRU(),
    "PGDSF, forgetting": kr.PGDSF(persistent=False),
    "GDSF, forgetting": kr.GDSF(persistent=False),
    "LFU, forgetting": kr.LFU(persistent=False),
}
_LOOKS = {"PGDSF": ("#0072B2", "o"), "GDSF": ("#E69F00", "s"), "LFU": ("#D55E00", "v"), "LRU": ("#009E73", "^")}
VALUES = ("document_hits", "token_hits", "prefill_s", "ttft_s", "moving_s")
NOTES = (
    "RAGCache under each policy; hits in any tier. Forgetting: frequencies go with a document's last copy; otherwise "
    "they are kept. GDSF's cost is the document's prefill alone."
)


def systems() -> Iterator[System]:
    """RAGCache under every policy."""
    for name, policy in POLICIES.items():
        yield replace(RAGCACHE, name=name, policy=policy)


def look(policy: str) -> dict[str, Any]:
    """Colour and marker of a policy; one that forgets is hollow and dashed."""
    name, _, forgets = policy.partition(",")
    colour, marker = _LOOKS[name]
    hollow = {"markerfacecolor": "white", "linestyle": "--"} if forgets else {}
    return {"color": colour, "marker": marker, **hollow}


def count(config: SimulatedConfig) -> Records:
    """Every policy with every host memory, at one rate."""
    (scale, *_) = config.scales
    for name in config.datasets:
        bench = Bench(config.retrieved(name, config.search()), scale)
        for gib in HOST_GIB:
            host = scale.host * gib // WHOLE_GIB
            yield from sweep(config, bench.with_host(host), list(systems()), (LOAD,), host_gib=host / 2**30)


def tabulate(results: Results) -> tuple[pd.DataFrame, str]:
    """A row per question set, host memory and policy."""
    import pandas as pd

    rows = [
        {
            "questions": WORKLOAD_TITLES[name],
            "host, GiB": f"{gib:.3g}",
            "policy": method,
            "documents hit": percent(interval_of(here, "document_hits")),
            "tokens hit": percent(interval_of(here, "token_hits")),
            "prefill, s": text(interval_of(here, "prefill_s")),
            "TTFT, s": text(interval_of(here, "ttft_s")),
        }
        for (name, gib, method), here in pd.DataFrame(results.records).groupby(
            ["case_id", "host_gib", "method"], sort=False
        )
    ]
    rate = ", ".join(f"{name} {r:.3g}/s" for name, r in {r["case_id"]: r["rate"] for r in results.records}.items())
    return pd.DataFrame(rows), f"{NOTES} Load {LOAD:g}: {rate}.\n\n{notes_of(results)}"


def draw(results: Results) -> Figure:
    """A row of panels per question set: hits of documents, prefill seconds, TTFT."""
    import pandas as pd

    frame = pd.DataFrame(results.records)
    names = list(frame["case_id"].unique())
    figure, axes = new_figure(len(names), 3, sharex=True)
    titles = {"document_hits": "documents hit (%)", "prefill_s": "prefill of a request (s)", "ttft_s": "mean TTFT (s)"}
    for row, name in enumerate(names):
        points = over_seeds(frame[frame["case_id"] == name], ["method", "host_gib"], VALUES)
        for panel, (value, label) in zip(axes[row], titles.items(), strict=True):
            looks = {policy: look(policy) for policy in POLICIES}
            lines(panel, points, "host_gib", value, looks, 100.0 if value == "document_hits" else 1.0)
            panel.set_ylabel(label)
            panel.set_title(WORKLOAD_TITLES[name], fontsize=10)
            log_axis(panel, (1.0, 2.0, 4.0, 8.0))
            panel.set_xticks(
                sorted(frame["host_gib"].unique()), [f"{g:.3g}" for g in sorted(frame["host_gib"].unique())]
            )
            tidy(panel)
            if row == len(names) - 1:
                panel.set_xlabel("host memory for K/V (GiB, log scale)")
    server = frame["server"].iloc[0]
    figure.suptitle(f"Simulated, {server}, {scale_note(results)}: replacement policies", fontsize=11)
    legend_below(figure, 4)
    return figure


FIG17 = SimulatedExperiment(
    name="ragcache.fig17",
    shows="replacement policies over host memory: hits, prefill seconds, TTFT (simulated).",
    count=count,
    tabulate=tabulate,
    draw=draw,
    section="RAGCache 7.3",
    cost="two minutes; the first time half an hour, for embeddings",
)

if __name__ == "__main__":
    simulated_app(FIG17)()
