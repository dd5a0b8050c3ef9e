"""From raw records to one row per method, every mean with its 95% bootstrap interval over cases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from experiments.results import Results, complete_cases
from kvreuse.metrics import Interval, bootstrap_interval, gap_recovered_interval, paired_interval, rouge_l, word_f1

if TYPE_CHECKING:
    import pandas as pd

METRIC_NAMES = {"f1": "F1", "rougeL": "ROUGE-L"}
NOTHING = Interval(math.nan, math.nan, math.nan)

# Columns that are an interval each: name in the frame -> heading.
INTERVALS = {
    "score": "{metric}",
    "score_difference": "{metric} - full recompute's",
    "kl": "KL, nats/token",
    "nll": "NLL, nats/token",
    "gap_same": "gap to FullReuse, same encoder",
    "gap_bare": "gap to FullReuse (bare)",
    "speedup": "speed-up",
    "share": "recomputed",
}
EXPLANATION = (
    "Mean [95% bootstrap interval over cases]; TTFT: median and quartiles. KL: divergence from full recompute over the "
    "tokens of its own greedy answer. NLL: of the gold answer. Gap: share of full reuse's KL that the method removes, "
    "beside full reuse of chunks encoded in the same context, and beside that of chunks encoded bare (1 is as good as "
    "full recompute, 0 as full reuse, below 0 worse). Speed-up: median over cases of full recompute's TTFT by the "
    "method's. Recomputed: share of context tokens, mean over layers."
)
STAGES = {"map_prefill_s": "map prefill (s)", "map_decode_s": "map decode (s)"}


@dataclass(frozen=True)
class Table:
    """One dataset's table: ``frame`` has a row per method; each interval column has NAME, NAME_low and NAME_high.

    ``cases`` has a row per case and method, the raw numbers.
    """

    header: dict[str, Any]
    frame: pd.DataFrame
    cases: pd.DataFrame
    num_cases: int
    skipped: int
    failed: int

    @property
    def dataset(self) -> str:
        """Its name."""
        return str(self.header["dataset"])

    @property
    def metric(self) -> str:
        """F1 or ROUGE-L."""
        return METRIC_NAMES[self.header["metric"]]

    def markdown(self, stages: Sequence[str] = ()) -> str:
        """All columns as Markdown, with what they were measured on above them."""
        return "\n".join([*self._caption(), "", *aligned_lines(self._cells(tuple(INTERVALS), stages))])

    def text(self, stages: Sequence[str] = ()) -> str:
        """The main columns for a terminal."""
        header = self.header
        title = f"{header['figure']}: {self.dataset}, {header['model']}, {self.num_cases} cases from {header['source']}"
        title += f", {self.frame['prompt_tokens'].iloc[0]:.0f} tokens in {self.frame['num_chunks'].iloc[0]:.1f} chunks"
        return "\n".join([title, *aligned_lines(self._cells(("score", "kl", "gap_same", "speedup"), stages))])

    def _cells(self, names: Sequence[str], stages: Sequence[str]) -> list[list[str]]:
        headings = [INTERVALS[name].format(metric=self.metric) for name in names]
        rows = [["method", *headings, "TTFT, s (quartiles)", *(STAGES[s] for s in stages)]]
        for _, row in self.frame.iterrows():
            cells = [interval_cell(row, name, percent=name == "share") for name in names]
            ttft = f"{row['ttft_s']:.3f} ({row['ttft_q25']:.3f}-{row['ttft_q75']:.3f})"
            rows.append([str(row["label"]), *cells, ttft, *(_number(row[s]) for s in stages)])
        return rows

    def _caption(self) -> list[str]:
        h = self.header
        left_out = [f"{n} {what}" for n, what in ((self.skipped, "too long"), (self.failed, "failed")) if n]
        tokens = f"{self.frame['prompt_tokens'].iloc[0]:.0f} tokens in {self.frame['num_chunks'].iloc[0]:.1f} chunks"
        cases = f"{self.num_cases} of {h['num_cases']} cases" + (f" ({', '.join(left_out)})" if left_out else "")
        return [
            f"### {h['figure']}: {h['dataset']}, {h['model']}",
            "",
            f"{cases} from {h['source']}; context: {h['context']}; a prompt has on average {tokens}, an answer at most "
            f"{h['max_new_tokens']}. {h['device']}, {h['dtype']}, threads: {h['threads']}, {h['date'][:10]}.",
            "",
            EXPLANATION,
        ]


def make_table(results: Results) -> Table | None:
    """The table of a results file, over the cases that have every method; None if there is no such case."""
    import pandas as pd

    header = results.header
    methods = [m["method"] for m in header["methods"]]
    skipped = {r["case_id"] for r in results.records if r.get("skipped")}
    cases = complete_cases(results.records, methods) - skipped
    failed = {r["case_id"] for r in results.records if r.get("error")} - cases
    if not cases:
        return None
    frame = pd.DataFrame([r for r in results.records if r["case_id"] in cases and not r.get("error")])
    frame = frame.drop_duplicates(["case_id", "method"], keep="last")
    score = word_f1 if header["metric"] == "f1" else rouge_l
    frame["score"] = [score(a, g) for a, g in zip(frame["answer"], frame["gold"], strict=True)]
    for stage in STAGES:
        frame[stage] = [stages.get(stage, math.nan) for stages in frame["stages"]]
    frame["share"] = frame["recomputed_tokens"].astype(float) / (frame["prompt_tokens"] - frame["question_tokens"])
    # One order of cases for all methods, so that differences are paired.
    by_method = {name: part.sort_values("case_id") for name, part in frame.groupby("method")}
    rows = [_summary(m, by_method, header["methods"]) for m in header["methods"]]
    return Table(header, pd.DataFrame(rows), frame, len(cases), len(skipped), len(failed))


def _summary(
    method: dict[str, Any], by_method: dict[str, pd.DataFrame], methods: list[dict[str, Any]]
) -> dict[str, Any]:
    part = by_method[method["method"]]
    full = next((by_method[m["method"]] for m in methods if m["method"].startswith("FullRecompute(")), None)
    ttft = part["ttft_s"].astype(float)
    row: dict[str, Any] = {
        "method": method["method"],
        "label": method["label"],
        "context": method["context"],
        "cases": len(part),
        "prompt_tokens": float(part["prompt_tokens"].mean()),
        "num_chunks": float(part["num_chunks"].mean()),
        "ttft_s": float(ttft.median()),
        "ttft_q25": float(ttft.quantile(0.25)),
        "ttft_q75": float(ttft.quantile(0.75)),
        "encode_s": float(part["encode_s"].median()),
        **{stage: float(part[stage].median()) for stage in STAGES},
    }
    kl = _values(part, "kl")
    found = {
        "score": bootstrap_interval(_values(part, "score")),
        "kl": bootstrap_interval(kl) if kl else NOTHING,
        "nll": bootstrap_interval(nll) if (nll := _values(part, "nll")) else NOTHING,
        "share": bootstrap_interval(share) if (share := _values(part, "share")) else NOTHING,
        "gap_same": _gap(kl, by_method, methods, method["context"]),
        "gap_bare": _gap(kl, by_method, methods, "bare"),
        "score_difference": NOTHING,
        "speedup": NOTHING,
    }
    if full is not None:
        found["score_difference"] = paired_interval(_values(part, "score"), _values(full, "score"))
        ratios = [a / b for a, b in zip(_values(full, "ttft_s"), _values(part, "ttft_s"), strict=True)]
        found["speedup"] = bootstrap_interval(ratios, statistic=lambda x: float(torch.quantile(x, 0.5)))
    for name, interval in found.items():
        row |= {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}
    return row


def _gap(
    kl: list[float], by_method: dict[str, pd.DataFrame], methods: list[dict[str, Any]], context: str | None
) -> Interval:
    """Against full reuse of chunks encoded in ``context``; nothing where that was not run."""
    reuse = next((m for m in methods if m["method"].startswith("FullReuse(") and m["context"] == context), None)
    if reuse is None or context is None or not kl:
        return NOTHING
    return gap_recovered_interval(kl, _values(by_method[reuse["method"]], "kl"))


def _values(part: pd.DataFrame, column: str) -> list[float]:
    """A column's values, or none at all where the method does not have them."""
    values = part[column].astype(float)
    return [] if values.isna().any() else values.tolist()


def interval_cell(row: pd.Series, name: str, percent: bool) -> str:
    values = [float(row[n]) for n in (name, f"{name}_low", f"{name}_high")]
    if math.isnan(values[0]):
        return "-"
    if percent:
        return "{:.1%} [{:.1%}, {:.1%}]".format(*values)
    return "{:.3f} [{:.3f}, {:.3f}]".format(*values)


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


def aligned_lines(rows: list[list[str]]) -> list[str]:
    """A Markdown table whose columns line up."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    padded.insert(1, ["-" * width for width in widths])
    return ["| " + " | ".join(row) + " |" for row in padded]
