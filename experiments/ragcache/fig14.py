"""RAGCache, figure 14: TTFT and throughput against the request rate, Natural Questions.

python -m experiments.ragcache.fig14 --data-dir ../shared/data
"""

from __future__ import annotations

from experiments.ragcache.rates import draw, measure, tabulate
from experiments.ragcache.simulated import SimulatedExperiment, simulated_app

FIG14 = SimulatedExperiment(
    name="ragcache.fig14",
    shows="TTFT and throughput against rate, Natural Questions: the systems of figure 13 (simulated).",
    count=measure,
    tabulate=tabulate,
    draw=draw,
    section="RAGCache 7.1",
    cost="a minute; the first time half an hour, for embeddings",
    requests=600,
    datasets=("nq",),
)

if __name__ == "__main__":
    simulated_app(FIG14)()
