"""CacheBlend, figure 15a: the least compute that keeps the quality, by the number of chunks.

python -m experiments.fig15a --model demo --limit 10
"""

from __future__ import annotations

from experiments.least_compute import least_compute_experiment
from experiments.options import app_for

FIG15A = least_compute_experiment(
    "fig15a", "num_chunks", (2, 4, 6, 8), "number of chunks", {"chunk_tokens": 128}, "75 s a case"
)

if __name__ == "__main__":
    app_for(FIG15A)()
