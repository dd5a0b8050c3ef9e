"""CacheBlend, figure 12: quality against TTFT, for five methods and the prefix-encoded variants of three of them.

python -m experiments.fig12 --model demo --dataset musique,2wikimqa --limit 50
"""

from __future__ import annotations

import kvreuse as kr
from experiments.options import Experiment, app_for
from experiments.plotting import quality_against_ttft

FIG12 = Experiment(
    name="fig12",
    shows="quality against TTFT, five methods and their prefix-encoded variants.",
    section="CacheBlend 7.2",
    cost="half a minute a case, SAMSum and MultiNews 1 to 2",
    methods=(
        kr.FullRecompute(),
        kr.PrefixCaching(insert=False),
        kr.FullReuse(context="bare"),
        kr.CacheBlend(context="bare"),
        kr.LegoLink(context="bare"),
        kr.FullReuse(context="prefix"),
        kr.CacheBlend(context="prefix"),
        kr.LegoLink(context="prefix"),
    ),
    draw=lambda tables, paper: quality_against_ttft(tables, paper=paper),
    smoke={"datasets": ("musique", "samsum", "multinews")},
)

if __name__ == "__main__":
    app_for(FIG12)()
