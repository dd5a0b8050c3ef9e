"""RAGCache, figure 15: TTFT and throughput against the request rate at top-k 1, 3 and 5, MMLU.

python -m experiments.ragcache.fig15 --data-dir ../shared/data
"""

from __future__ import annotations

from functools import partial

from experiments.ragcache.rates import draw, measure, tabulate
from experiments.ragcache.simulated import SimulatedExperiment, simulated_app

FIG15 = SimulatedExperiment(
    name="ragcache.fig15",
    shows="TTFT and throughput against rate at top-k 1, 3, 5, MMLU (simulated).",
    count=partial(measure, top_ks=(1, 3, 5), servers=1),
    tabulate=tabulate,
    draw=draw,
    section="RAGCache 7.2",
    cost="two minutes; the first time half an hour, for embeddings",
    requests=600,
    datasets=("mmlu",),
)

if __name__ == "__main__":
    simulated_app(FIG15)()
