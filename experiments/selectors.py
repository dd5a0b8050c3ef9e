"""Every selection rule at equal budget: quality against measured TTFT, for three encoder contexts.

python -m experiments.selectors --model demo --dataset musique,2wikimqa --limit 60 --max-new-tokens 24 --threads 1
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import kvreuse as kr
from experiments.budgets import AtBudget
from experiments.experiment import Experiment
from experiments.options import app_for
from experiments.selector_plot import quality_against_ttft
from experiments.selector_report import BASE_RULE, markdown

_UPPER = kr.QuestionAttention()
# Rules without a deviation to drop tokens by run at a constant ratio.
RULES: dict[str, Any] = {
    BASE_RULE: kr.CacheBlend(),
    "HKVD V, constant": kr.CacheBlend(metric="v", schedule="constant"),
    "First tokens (LegoLink)": kr.CacheBlend(selector=kr.FirstTokens(), schedule="constant"),
    "Question attention, all layers": kr.CacheBlend(selector=kr.QuestionAttention(0.0), schedule="constant"),
    "Question attention, upper 2/3": kr.CacheBlend(selector=_UPPER, schedule="constant"),
    "Question attention x deviation": kr.CacheBlend(selector=kr.AttendedDeviation()),
    "Random": kr.CacheBlend(selector=kr.RandomTokens(), schedule="constant"),
    "Windows": kr.CacheBlend(selector=kr.Windows(), schedule="constant"),
    "Oracle deviation": kr.CacheBlend(selector=kr.OracleDeviation(), schedule="constant"),
    "Funnel 1.8, by deviation": kr.Funnel(start=1.8, drop="deviation", question_tokens=None),
    "Funnel 1.8, attended": kr.Funnel(start=1.8, drop="attended", question_tokens=None),
    "Funnel": kr.Funnel(),
}
LOW, MIDDLE, HIGH = 0.05, 0.15, 0.30


def at(rule: str, budget: float, context: str = "prefix") -> AtBudget:
    """A rule at a budget, on chunks encoded in a context."""
    return AtBudget(rule, replace(RULES[rule], context=context), budget)


METHODS: tuple[kr.ReuseMethod, ...] = (
    kr.FullRecompute(),
    kr.FullReuse(),
    kr.CacheBlend(),
    *(at(rule, MIDDLE) for rule in RULES if rule not in ("Windows", "Oracle deviation", "Funnel 1.8, by deviation")),
    *(at(rule, LOW) for rule in (BASE_RULE, "First tokens (LegoLink)", "Funnel")),
    *(at(rule, HIGH) for rule in (BASE_RULE, "Funnel")),
    *(kr.FullReuse(context=context) for context in ("bare", "bos")),
    *(at(rule, MIDDLE, context) for context in ("bare", "bos") for rule in (BASE_RULE, "Funnel")),
)

SELECTORS = Experiment(
    name="selectors",
    shows="all selection rules at equal budget, three encoder contexts: quality against measured TTFT.",
    section="CacheBlend 4.3",
    cost="80 s a case",
    methods=METHODS,
    draw=lambda tables, paper: quality_against_ttft(tables),
    datasets=("musique", "2wikimqa"),
    report=markdown,
    smoke={"methods": METHODS[:15], "datasets": ("musique",)},  # every rule; selectors_thin runs the other encoder
)

if __name__ == "__main__":
    app_for(SELECTORS)()
