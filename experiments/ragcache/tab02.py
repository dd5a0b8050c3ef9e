"""RAGCache, table 2: how much more PGDSF hits than the other policies, and what that saves; from figure 17's records.

python -m experiments.ragcache.tab02 --data-dir ../shared/data
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from experiments.plotting import legend_below, log_axis, new_figure, tidy
from experiments.ragcache.fig17 import NOTES, POLICIES, count, look
from experiments.ragcache.frame import WORKLOAD_TITLES
from experiments.ragcache.notes import notes_of, scale_note
from experiments.ragcache.seeds import ratio_of, text
from experiments.ragcache.simulated import SimulatedExperiment, simulated_app
from experiments.results import Results

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

OURS = "PGDSF"
RATIOS = {
    "document_hits": "documents hit, PGDSF / other",
    "token_hits": "tokens hit, PGDSF / other",
    "prefill_s": "prefill s, other / PGDSF",
    "ttft_s": "TTFT, other / PGDSF",
}
MORE = "Ratios are means over seeds of the same requests under both policies; above 1 PGDSF is better, below 1 worse."


def ratios(results: Results) -> pd.DataFrame:
    """A row per question set, host memory and other policy: each ratio with its bounds."""
    import pandas as pd

    rows = []
    frame = pd.DataFrame(results.records)
    for (name, gib), here in frame.groupby(["case_id", "host_gib"], sort=False):
        for other in [p for p in POLICIES if p != OURS]:
            row = {"case_id": name, "host_gib": gib, "method": other}
            for value in RATIOS:
                pair = (OURS, other) if value.endswith("hits") else (other, OURS)
                found = ratio_of(here, value, *pair)
                row |= {
                    value: found.mean,
                    f"{value}_low": found.low,
                    f"{value}_high": found.high,
                    f"{value}_text": text(found),
                }
            rows.append(row)
    return pd.DataFrame(rows)


def tabulate(results: Results) -> tuple[pd.DataFrame, str]:
    """The ratios."""
    found = ratios(results)
    table = found[["case_id", "host_gib", "method", *(f"{value}_text" for value in RATIOS)]].copy()
    table["case_id"] = table["case_id"].map(WORKLOAD_TITLES)
    table["host_gib"] = table["host_gib"].map("{:.3g}".format)
    table.columns = ["questions", "host, GiB", "other policy", *RATIOS.values()]
    return table, f"{MORE} {NOTES}\n\n{notes_of(results)}"


def draw(results: Results) -> Figure:
    """A row of panels per question set: hits, and prefill seconds."""
    found = ratios(results)
    names = list(found["case_id"].unique())
    figure, axes = new_figure(len(names), 2, sharex=True)
    sizes = sorted(found["host_gib"].unique())
    for row, name in enumerate(names):
        mine = found[found["case_id"] == name]
        for panel, value in zip(axes[row], ("document_hits", "prefill_s"), strict=True):
            for place, other in enumerate(mine["method"].unique()):
                here = mine[mine["method"] == other]
                spread = [here[value] - here[f"{value}_low"], here[f"{value}_high"] - here[value]]
                at = here["host_gib"] * 1.04 ** (place - 2.5)  # side by side
                panel.errorbar(at, here[value], yerr=spread, label=other, **({"linewidth": 1.0} | look(other)))
            panel.axhline(1.0, color="#777777", linewidth=1.0)
            panel.set_title(WORKLOAD_TITLES[name], fontsize=10)
            panel.set_ylabel(RATIOS[value])
            log_axis(panel, (1.0,))
            panel.set_xticks(sizes, [f"{g:.3g}" for g in sizes])
            tidy(panel)
            if row == len(names) - 1:
                panel.set_xlabel("host memory for K/V (GiB, log scale)")
    title = (
        f"Simulated, {results.records[0]['server']}, {scale_note(results)}\nPGDSF against others: above 1 it is better"
    )
    figure.suptitle(title, fontsize=11)
    legend_below(figure, 3)
    return figure


TAB02 = SimulatedExperiment(
    name="ragcache.tab02",
    shows="PGDSF's hits and prefill seconds against the other policies', from figure 17's records (simulated).",
    count=count,
    tabulate=tabulate,
    draw=draw,
    section="RAGCache 7.3",
    cost="seconds, behind figure 17",
    records_of="ragcache.fig17",
)

if __name__ == "__main__":
    simulated_app(TAB02)()
