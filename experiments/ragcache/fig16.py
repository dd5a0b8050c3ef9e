"""RAGCache, figure 16: large models, two H800: TTFT and throughput against the request rate, MMLU.

python -m experiments.ragcache.fig16 --data-dir ../shared/data
"""

from __future__ import annotations

from experiments.ragcache.rates import draw, measure, tabulate
from experiments.ragcache.simulated import SimulatedExperiment, simulated_app

FIG16 = SimulatedExperiment(
    name="ragcache.fig16",
    shows="TTFT and throughput against rate, Mixtral-8x7B and LLaMA2-70B on two H800 (simulated).",
    count=measure,
    tabulate=tabulate,
    draw=draw,
    section="RAGCache 7.2",
    cost="80 s; the first time half an hour, for embeddings",
    requests=600,
    datasets=("mmlu",),
    costs="h800",
)

if __name__ == "__main__":
    simulated_app(FIG16)()
