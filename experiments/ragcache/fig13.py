"""RAGCache, figure 13: TTFT and throughput against the request rate, MMLU.

python -m experiments.ragcache.fig13 --data-dir ../shared/data
"""

from __future__ import annotations

from experiments.ragcache.rates import draw, measure, tabulate
from experiments.ragcache.simulated import SimulatedExperiment, simulated_app

FIG13 = SimulatedExperiment(
    name="ragcache.fig13",
    shows="TTFT and throughput against rate, MMLU: no reuse, vLLM-like, SGLang-like, RAGCache (simulated).",
    count=measure,
    tabulate=tabulate,
    draw=draw,
    section="RAGCache 7.1",
    cost="a minute; the first time half an hour, for embeddings",
    requests=600,
    datasets=("mmlu",),
)

if __name__ == "__main__":
    simulated_app(FIG13)()
