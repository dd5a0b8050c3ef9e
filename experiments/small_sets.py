"""The project's own small sets, asked for by name: what `--smoke` runs on, with or without real data at hand."""

from __future__ import annotations

from experiments.dataset_formats import parse_2wikimqa, parse_multinews, parse_musique, parse_samsum
from experiments.dataset_sources import SMALL_SETS, SOURCES, read_records
from experiments.datasets import TASKS, Dataset

_PARSERS = {
    "musique": parse_musique,
    "2wikimqa": parse_2wikimqa,
    "samsum": parse_samsum,
    "multinews": parse_multinews,
}


def load_small_set(name: str, limit: int | None = None, seed: int = 0) -> Dataset:
    """The first ``limit`` cases of the small set for dataset ``name``.

    Raises:
        ValueError: there is no small set of that name.
    """
    if name not in _PARSERS:
        raise ValueError(f"dataset {name!r} has no small set; choose one of {', '.join(_PARSERS)}")
    records = read_records(SMALL_SETS / str(SOURCES[name].small))
    shots = [record for record in records if record.get("split") == "validation"]
    cases = _PARSERS[name]({"cases": [r for r in records if r not in shots], "shots": shots}, seed)
    return Dataset(name, "small set", tuple(cases[:limit]), TASKS[name])
