"""CacheBlend, figure 15b: the least compute that keeps the quality, by the length of chunks.

python -m experiments.fig15b --model demo --limit 10
"""

from __future__ import annotations

from experiments.least_compute import least_compute_experiment
from experiments.options import app_for

FIG15B = least_compute_experiment(
    "fig15b", "chunk_tokens", (64, 128, 256, 384), "most tokens of a chunk", {"num_chunks": 4}, "75 s a case"
)

if __name__ == "__main__":
    app_for(FIG15B)()
