"""A few of the selection rules, for large models and long prompts: HKVD, first tokens and the funnel.

python -m experiments.selectors_thin --model demo-gemma3 --dataset musique --limit 30 --max-new-tokens 8 --threads 1
python -m experiments.selectors_thin --model demo --dataset musique --num-chunks 20 --limit 12 --threads 1
"""

from __future__ import annotations

import kvreuse as kr
from experiments.experiment import Experiment
from experiments.options import app_for
from experiments.selector_plot import quality_against_ttft
from experiments.selector_report import BASE_RULE, markdown
from experiments.selectors import HIGH, LOW, MIDDLE, at

METHODS: tuple[kr.ReuseMethod, ...] = (
    kr.FullRecompute(),
    kr.FullReuse(),
    kr.CacheBlend(),
    *(at(rule, MIDDLE) for rule in (BASE_RULE, "First tokens (LegoLink)", "Funnel")),
    at("Funnel", LOW),
    *(at(rule, HIGH) for rule in (BASE_RULE, "Funnel")),
    kr.FullReuse(context="bare"),
    *(at(rule, MIDDLE, "bare") for rule in (BASE_RULE, "Funnel")),
)

SELECTORS_THIN = Experiment(
    name="selectors_thin",
    shows="HKVD, first tokens and the funnel at equal budget, for large models and long prompts.",
    section="CacheBlend 4.3",
    cost="25 s a case",
    methods=METHODS,
    draw=lambda tables, paper: quality_against_ttft(tables),
    datasets=("musique",),
    report=markdown,
)

if __name__ == "__main__":
    app_for(SELECTORS_THIN)()
