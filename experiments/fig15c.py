"""CacheBlend, figure 15c: the least compute that keeps the quality, by the batch size.

python -m experiments.fig15c --model demo --limit 8
"""

from __future__ import annotations

import kvreuse as kr
from experiments.least_compute import METHODS, least_compute_experiment
from experiments.options import app_for

FIG15C = least_compute_experiment(
    "fig15c",
    "batch_size",
    (1, 2, 4),
    "prompts in a batch",
    {"num_chunks": 4, "chunk_tokens": 128},
    "1 min a case",
    tuple(m for m in METHODS if not isinstance(m, kr.PrefixCaching)),  # which takes prompts one at a time
)

if __name__ == "__main__":
    app_for(FIG15C)()
