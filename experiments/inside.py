"""What the figures inside CacheBlend record of a case: recorders around each method's prefill."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import kvreuse as kr
from experiments.measure import STORE_BYTES, Measurement, method_names
from experiments.plotting import dataset_title, tidy
from experiments.runner import Measure

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from experiments.value_tables import ValueTable

Fields = Callable[[kr.Recording, kr.Prefill], dict[str, Any]]


def recording(recorders: Sequence[kr.Recorder], fields: Fields) -> Measure:
    """A measure that prefills each method under ``recorders``; ``fields`` makes JSON values of what they saw.

    Full recompute, the reference, runs once per case. Nothing is timed.
    """

    def measure(
        methods: Sequence[kr.ReuseMethod],
        model: kr.ReuseModel,
        measurement: Measurement,
        number: int = 0,
        repeats: int = 1,
        warm: bool = True,
    ) -> Iterator[dict[str, Any]]:
        prompt, names = measurement.prompt, method_names(methods)
        stores: dict[Hashable, kr.KVStore] = {}
        for method in methods:
            if method.encoding not in stores:
                stores[method.encoding] = kr.KVStore(STORE_BYTES)
                method.encode(model, prompt, stores[method.encoding])
        with model.record(*recorders) as rec:
            for method in methods:
                result = method.prefill(model, prompt, stores[method.encoding])
                trace, question = result.trace, prompt.question.numel()
                yield {
                    "case_id": measurement.case.case_id,
                    "method": repr(method),
                    "label": names[repr(method)],
                    "prompt_tokens": prompt.num_tokens,
                    "question_tokens": question,
                    "num_chunks": len(prompt.chunks),
                    "num_reused": trace.num_reused,
                    "recomputed_tokens": statistics.fmean(len(s) - question for s in trace.selected),
                    **fields(rec, result),
                    "error": None,
                }

    return measure


def rounded(values: Any, digits: int = 4) -> Any:
    """Numbers with so many significant digits, lists and NaN (as None) included: records are read by people too."""
    if isinstance(values, list):
        return [rounded(v, digits) for v in values]
    return None if values != values else float(f"{values:.{digits}g}")


def number(value: float | None) -> float:
    """A recorded number; None is NaN."""
    return float("nan") if value is None else float(value)


def encoder_panels(panels: Any, tables: Sequence[ValueTable]) -> Iterator[tuple[Axes, pd.DataFrame]]:
    """Each panel and its rows (a row of panels per dataset, a column per encoder), titled and tidied once drawn."""
    for row, table in zip(panels, tables, strict=True):
        for axes, (context, frame) in zip(row, table.frame.groupby("context", sort=True), strict=True):
            yield axes, frame
            axes.set_title(f"{dataset_title(table)}\nchunks encoded {encoder_words(str(context))}", fontsize=10)
            tidy(axes)


def encoder_words(context: str) -> str:
    """An encoder context for the title of a panel."""
    return {"bare": "alone", "bos": "behind a BOS", "prefix": "behind the prefix"}[context]
