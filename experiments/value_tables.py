"""Tables of figures with numbers of their own: means over cases with intervals, by method, layer, answer, ..."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.results import Results, complete_cases
from experiments.tables import aligned_lines, interval_cell
from kvreuse.metrics import bootstrap_interval

if TYPE_CHECKING:
    import pandas as pd

Record = Mapping[str, Any]
# A record and its case's records by method -> rows: what they are grouped by besides the method, and their numbers.
Expand = Callable[[Record, Mapping[str, Record]], Iterable[tuple[dict[str, Any], dict[str, float]]]]


@dataclass(frozen=True)
class ValueTable:
    """``frame``: a row per method and group; each number of ``headings`` as NAME, NAME_low, NAME_high, others as means.

    ``records`` are those of the complete cases, for pictures that show single ones.
    """

    header: dict[str, Any]
    frame: pd.DataFrame
    num_cases: int
    records: list[dict[str, Any]]
    headings: Mapping[str, str]
    keys: tuple[str, ...]
    note: str

    @property
    def dataset(self) -> str:
        """Its name."""
        return str(self.header["dataset"])

    def markdown(self, stages: Sequence[str] = ()) -> str:
        """All rows as Markdown, with what they were measured on above them."""
        h = self.header
        tokens = sum(r["prompt_tokens"] for r in self.records) / len(self.records)
        caption = (
            f"{self.num_cases} of {h['num_cases']} cases from {h['source']}; context: {h['context']}; a prompt has on "
            f"average {tokens:.0f} tokens. {h['device']}, {h['dtype']}, threads: {h['threads']}, {h['date'][:10]}."
        )
        title = f"### {h['figure']}: {h['dataset']}, {h['model']}"
        return "\n".join([title, "", caption, "", self.note, "", *aligned_lines(self._cells())])

    def text(self, stages: Sequence[str] = ()) -> str:
        """The rows for a terminal."""
        h = self.header
        title = f"{h['figure']}: {self.dataset}, {h['model']}, {self.num_cases} cases from {h['source']}"
        return "\n".join([title, *aligned_lines(self._cells())])

    def _cells(self) -> list[list[str]]:
        rows = [["method", *self.keys, *self.headings.values()]]
        for _, row in self.frame.iterrows():
            cells = [interval_cell(row, name, percent=False) for name in self.headings]
            rows.append([str(row["label"]), *(str(row[key]) for key in self.keys), *cells])
        return rows


def value_table(
    results: Results, expand: Expand, headings: Mapping[str, str], keys: tuple[str, ...] = (), note: str = ""
) -> ValueTable | None:
    """Means over the cases that have every method, 95% bootstrap intervals for ``headings``; None without such a case.

    NaN is left out of a mean.
    """
    import pandas as pd

    methods = [m["method"] for m in results.header["methods"]]
    skipped = {r["case_id"] for r in results.records if r.get("skipped")}
    complete = complete_cases(results.records, methods) - skipped
    if not complete:
        return None
    by_case: dict[str, dict[str, dict[str, Any]]] = {}
    for record in results.records:
        if record["case_id"] in complete and not record.get("error"):
            by_case.setdefault(record["case_id"], {})[record["method"]] = record
    groups: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for name in methods:
        for case in by_case.values():
            for group, numbers in expand(case[name], case):
                kept = groups.setdefault((name, *(group[key] for key in keys)), {})
                for key, number in numbers.items():
                    kept.setdefault(key, []).append(number)
    about = {m["method"]: m for m in results.header["methods"]}
    rows = []
    for (name, *rest), values in groups.items():
        row: dict[str, Any] = {"method": name, "label": about[name]["label"], "context": about[name]["context"]}
        rows.append(row | dict(zip(keys, rest, strict=True)) | _means(values, headings))
    records = [record for case in by_case.values() for record in case.values()]
    return ValueTable(results.header, pd.DataFrame(rows), len(by_case), records, headings, keys, note)


def _means(values: Mapping[str, list[float]], headings: Mapping[str, str]) -> dict[str, float]:
    found = {}
    for name, all_numbers in values.items():
        numbers = [n for n in all_numbers if not math.isnan(n)]
        if name not in headings:
            found[name] = sum(numbers) / len(numbers) if numbers else math.nan
            continue
        low = mean = high = math.nan
        if numbers:
            interval = bootstrap_interval(numbers)
            low, mean, high = interval.low, interval.mean, interval.high
        found |= {name: mean, f"{name}_low": low, f"{name}_high": high}
    return found
