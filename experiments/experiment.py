"""What a figure is: methods, settings, how a case is measured, how records become a table and tables a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol

import kvreuse as kr
from experiments.datasets import Dataset
from experiments.measure import measure_case
from experiments.results import Results
from experiments.runner import Measure, RunConfig, say
from experiments.tables import make_table

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


class AnyTable(Protocol):
    """What a picture and the command line need of a table."""

    @property
    def header(self) -> dict[str, Any]: ...
    @property
    def frame(self) -> pd.DataFrame: ...
    @property
    def num_cases(self) -> int: ...
    @property
    def dataset(self) -> str: ...
    def markdown(self, stages: Sequence[str] = ()) -> str: ...
    def text(self, stages: Sequence[str] = ()) -> str: ...


@dataclass(frozen=True)
class Experiment:
    """One figure.

    Args:
        name: of the script, the records and the pictures.
        shows: what is to be seen, in a line.
        methods: what is run on every case.
        draw: from tables (one per configuration, in the order of datasets, then of ``sweep``) to a picture; the second
            argument says whether to add the paper's values.
        section: where in the paper it is.
        cost: what a run on the demo model takes, as measured.
        datasets: what is run without ``--dataset``.
        columns: further columns of the table.
        settings: the figure's own defaults of `RunConfig`; the command line comes before them.
        sweep: settings of which each makes a configuration of its own; they may not be given on the command line.
        cases: cases that belong to the figure, instead of datasets.
        measure: from a case to its records.
        tabulate: from records to a table; None while no case is complete.
        report: writes one table as Markdown in place of the usual columns.
        smoke: fields of this class that a smoke run replaces, where all of it would take longer than seconds.
    """

    name: str
    shows: str
    methods: tuple[kr.ReuseMethod, ...]
    draw: Callable[[list[Any], bool], Figure]
    section: str = ""
    cost: str = ""
    datasets: tuple[str, ...] = ("musique", "2wikimqa", "samsum", "multinews")
    columns: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    sweep: tuple[Mapping[str, Any], ...] = ({},)
    cases: Dataset | None = None
    measure: Measure = measure_case
    tabulate: Callable[[Results], AnyTable | None] = make_table
    report: Callable[[Any], str] | None = None
    smoke: Mapping[str, Any] = field(default_factory=dict)

    @property
    def swept(self) -> list[str]:
        """Names of the settings that the sweep varies."""
        return list(dict.fromkeys(name for settings in self.sweep for name in settings))

    @property
    def about(self) -> str:
        """The line of the list of figures, and the help text."""
        notes = "; ".join(note for note in (self.section, self.cost) if note)
        return f"{self.shows} [{notes}]" if notes else self.shows


@dataclass(frozen=True)
class Preset:
    """Settings for what the command line leaves open; None leaves it to the figure or `RunConfig`."""

    model: str = "demo"
    datasets: tuple[str, ...] | None = None
    limit: int | None = 20
    context: str = "auto"
    num_chunks: int = 6
    chunk_tokens: int = 512
    max_new_tokens: int | None = None
    score_tokens: int = 128
    quantization: str | None = None
    small: bool = False
    cut_words: int | None = None


PRESETS: Mapping[str, Preset] = {
    "default": Preset(),
    # Minutes on two CPU cores.
    "demo": Preset(datasets=("musique", "2wikimqa"), limit=5, max_new_tokens=16),
    # Section 7.1: six retrieved chunks of 512 tokens. A GPU's work.
    "paper": Preset(model="mistralai/Mistral-7B-Instruct-v0.2", limit=None, context="retrieve"),
    # That every part runs, in seconds a figure; what it gives says nothing.
    "smoke": Preset(limit=1, max_new_tokens=2, score_tokens=2, num_chunks=2, chunk_tokens=64, small=True, cut_words=16),
}


def preset_named(name: str) -> Preset:
    """The preset of that name, or a ValueError that lists them."""
    if name not in PRESETS:
        raise ValueError(f"preset {name!r} is unknown: choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def configurations(experiment: Experiment, preset: Preset, given: Mapping[str, Any]) -> list[RunConfig]:
    """One configuration per dataset and step of the sweep.

    What was ``given`` on the command line (not None) comes before the figure's own settings, those before the preset.

    Raises:
        ValueError: a setting is given that the figure sweeps.
    """
    given = {name: value for name, value in given.items() if value is not None}
    for name in experiment.swept:
        if name in given:
            raise ValueError(f"{experiment.name} varies {name} itself: leave --{name.replace('_', '-')} out")
    settings = {f.name: getattr(preset, f.name) for f in fields(preset) if f.name != "datasets"}
    settings |= {**experiment.settings, **given}
    named = settings.pop("dataset", None)
    if settings["limit"] == 0:
        settings["limit"] = None
    if "data_dir" in given:
        settings["small"] = False
    names: Sequence[str] = named.split(",") if named else preset.datasets or experiment.datasets
    if experiment.cases is not None:
        if named:
            say(f"{experiment.name} has its own cases, {experiment.cases.name}; --dataset {named} is not used")
        names = [experiment.cases.name]
    wanted = [n.strip() for n in names]
    if not named and experiment.cases is None:  # a preset names what it would like, a figure what it can use
        wanted = [n for n in wanted if n in experiment.datasets] or list(experiment.datasets)
    return [
        RunConfig(figure=experiment.name, dataset=name, methods=experiment.methods, **{**settings, **step})
        for name in wanted
        for step in experiment.sweep
    ]
