"""CacheBlend, figure 13: quality against TTFT beside MapReduce and MapRerank, whose TTFT includes their map passes.

python -m experiments.fig13 --model demo --dataset musique,2wikimqa --limit 20
"""

from __future__ import annotations

import kvreuse as kr
from experiments.options import Experiment, app_for
from experiments.plotting import quality_against_ttft

FIG13 = Experiment(
    name="fig13",
    shows="quality against TTFT of CacheBlend, MapReduce and MapRerank, map passes included.",
    section="CacheBlend 7.2",
    cost="40 s a case",
    methods=(
        kr.FullRecompute(),
        kr.FullReuse(context="bare"),
        kr.FullReuse(context="prefix"),
        kr.CacheBlend(context="bare"),
        kr.CacheBlend(context="prefix"),
        kr.MapReduce(),
        kr.MapRerank(),
    ),
    draw=lambda tables, paper: quality_against_ttft(tables, paper=paper),
    columns=("map_prefill_s", "map_decode_s"),
    smoke={"datasets": ("musique", "samsum")},
)

if __name__ == "__main__":
    app_for(FIG13)()
