"""Figures that are computed, not timed: from workloads alone, without a model (its tokenizer counts tokens).

The same command line, records and pictures as the timed figures have. Those that simulate a server add to it in
`simulated.py`.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

import kvreuse as kr
from experiments import options
from experiments.corpora import QUESTION_SETS, data_folder, question_sets, source_of
from experiments.datasets import DATASET_NAMES
from experiments.environment import COMMIT, command_line, processor, versions
from experiments.options import HERE, fail, one_command
from experiments.results import RecordWriter, Results, read_results, results_to_draw
from experiments.runner import say
from experiments.timed import Records, file_stem, save_figure
from experiments.vectors import Search, Tokenizer
from experiments.workloads import Retrieved, retrieve

try:
    import typer
except ImportError:
    sys.exit("the experiments' command line needs typer: pip install 'kvreuse[experiments]'")

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

# Okabe and Ito's colours, a workload the same in every figure.
WORKLOAD_STYLES: dict[str, tuple[str, str]] = {
    "mmlu": ("#0072B2", "o"),
    "nq": ("#E69F00", "s"),
    "2wiki": ("#009E73", "^"),
    "musique": ("#CC79A7", "P"),
    "ragpulse": ("#D55E00", "D"),
    "ragpulse-prompt": ("#882255", "v"),
    "mooncake": ("#56B4E9", "X"),
}
WORKLOAD_TITLES: dict[str, str] = {
    "mmlu": "MMLU",
    "nq": "Natural Questions",
    "2wiki": "2WikiMultihopQA",
    "musique": "MuSiQue",
    "ragpulse": "RAGPulse, passages",
    "ragpulse-prompt": "RAGPulse, whole prompts",
    "mooncake": "Mooncake, conversations",
}


@dataclass(frozen=True)
class CountedConfig:
    """What is counted; its hash is part of the records file's name.

    Args:
        figure: which script runs it.
        datasets: question sets.
        model: whose tokenizer counts: "demo", a hub id or a folder.
        embedder: "demo", "words" (lexical, no model), a hub id or a folder.
        limit: questions per set at most; None takes all. A trace is always taken whole.
        seeds: orders of the questions that are replayed.
        small: take the project's own small sets.
        traces: count the traces too, where they are.
    """

    figure: str
    datasets: tuple[str, ...]
    model: str = "demo"
    embedder: str = "demo"
    limit: int | None = None
    seeds: int = 5
    small: bool = False
    data_dir: str | None = None
    traces: bool = True

    def __post_init__(self) -> None:
        for name in ("limit", "seeds"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")

    @property
    def data(self) -> str | None:
        """``data_dir`` for the loaders."""
        return "small" if self.small else self.data_dir

    @property
    def folder(self) -> Path | None:
        """The folder of the real sets; None where the small ones are used."""
        return data_folder(self.data)

    @property
    def stem(self) -> str:
        """Figure and model."""
        return file_stem(self.figure, self.model)

    def about(self) -> dict[str, Any]:
        """What the header says besides."""
        return {"model": self.model}

    @property
    def file_name(self) -> str:
        """Readable, and different for every configuration."""
        return f"{self.stem}-{hashlib.sha256(repr(self).encode()).hexdigest()[:8]}.jsonl"

    def counter(self) -> Tokenizer:
        """What counts tokens."""
        return Tokenizer(self.model)

    def retrieved(self, name: str, search: Search) -> Retrieved:
        """A question set with what was found for it."""
        return retrieve(name, search, data_dir=self.data, limit=self.limit, counter=self.counter())

    def has_trace(self, name: str) -> bool:
        """Whether to count a trace ("ragpulse", "mooncake"): wanted, and there (no small set is a trace)."""
        return self.traces and self.folder is not None and (self.folder / f"trace_{name}").is_dir()


C = TypeVar("C", bound=CountedConfig)


@dataclass(frozen=True)
class CountedExperiment(Generic[C]):
    """One figure: what it shows, what is counted, what its records say.

    ``count`` yields records with a ``case_id`` and a ``method``; ``tabulate`` makes a frame and notes of them, ``draw``
    the picture.
    """

    name: str
    shows: str
    count: Callable[[C], Records]
    tabulate: Callable[[Results], tuple[pd.DataFrame, str]]
    draw: Callable[[Results], Figure]
    section: str
    cost: str
    datasets: tuple[str, ...] = ("mmlu", "nq", "2wiki")
    seeds: int = 5

    @property
    def about(self) -> str:
        """The line of the list of figures, and the help text."""
        return f"{self.shows} [{self.section}; {self.cost}]"


def embedder_note(results: Results) -> str:
    """What the documents were found with, for notes."""
    name = results.header["embedder"]
    known = {"demo": "all-MiniLM-L6-v2", "words": "hashed word weights (lexical, no model)"}
    return f"Embedder: {known.get(name, name)}."


def run_counted(experiment: CountedExperiment[C], config: C, folder: Path, force: bool = False) -> Path:
    """Count, unless the records are there. An interrupted run is begun anew."""
    path = folder / config.file_name
    if path.is_file() and not force:
        say(f"{path} is complete ({read_results(path).header['date']}); --force runs it again")
        return path
    with RecordWriter(path, _header(config), [], force=True) as writer:
        for record in experiment.count(config):
            writer.write(record)
        return writer.finish()


def _header(config: CountedConfig) -> dict[str, Any]:
    return {
        "config": repr(config),
        "figure": config.figure,
        "datasets": config.datasets,
        "source": source_of(config.folder),
        "limit": config.limit,
        "seeds": config.seeds,
        "embedder": config.embedder,
        **config.about(),
        "processor": processor(),
        "versions": versions(),
        "commit": COMMIT,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command_line(),
    }


def draw_or_run(experiment: CountedExperiment[C], config: C, out: Path, figures: Path, **how: Any) -> None:
    """Table and picture, of ``records`` if given, else of what is in ``out``, counted first unless ``plot_only``."""
    if not (how["plot_only"] or how["records"]):
        run_counted(experiment, config, out, how["force"])
    path = how["records"] or results_to_draw(out / config.file_name)
    save_figure(experiment, read_results(path), how.get("stem", config.stem), figures)


def chosen_sets(
    experiment: CountedExperiment[C], named: str | None, data: str | None, of_all: bool = False
) -> tuple[str, ...]:
    """The question sets of a run: those named, else the figure's own, or all, that are there.

    ``of_all``: run by `all`, where other figures' sets may be named; the figure passes over these.

    Raises:
        ValueError: a name is no question set.
    """
    there = question_sets(data)
    wanted = list(experiment.datasets) if named is None else [name.strip() for name in named.split(",")]
    others = {*QUESTION_SETS, *DATASET_NAMES} if of_all else set()
    wrong = [name for name in wanted if name not in there and name not in others]
    if named is not None and wrong:
        raise ValueError(f"{experiment.name} has no question set {wrong[0]!r}: choose some of {','.join(there)}")
    return tuple(name for name in wanted if name in there) or there


def limit_of(limit: int | None, of_all: bool) -> int | None:
    """As given; by `all`, where the figures that ask a model take 0 as "all questions", so does this one."""
    return None if of_all and limit == 0 else limit


def counted_app(experiment: CountedExperiment[CountedConfig]) -> typer.Typer:
    """The command line of one figure."""

    def main(
        context: typer.Context,
        model: Annotated[str, typer.Option(help="whose tokenizer counts: demo, a hub id or a folder")] = "demo",
        dataset: Annotated[str | None, typer.Option(help="question sets, some of mmlu,nq,2wiki")] = None,
        embedder: Annotated[str | None, typer.Option(help="demo, words (no model), a hub id or a folder")] = None,
        data_dir: options.DataDir = None,
        limit: Annotated[int | None, typer.Option(help="questions per set [all]")] = None,
        seeds: Annotated[int | None, typer.Option(help="orders of the questions")] = None,
        device: options.IgnoredText = None,
        dtype: options.IgnoredText = None,
        threads: options.IgnoredNumber = None,
        repeats: options.IgnoredNumber = None,
        smoke: Annotated[bool, typer.Option("--smoke", help="the small sets, few requests: seconds")] = False,
        plot_only: options.PlotOnly = False,
        records: options.RecordsFile = None,
        force: options.Force = False,
        out: options.Out = HERE / "results",
        figures: options.Figures = HERE / "figures",
    ) -> None:
        try:
            data = "small" if smoke and data_dir is None else None if data_dir is None else str(data_dir)
            of_all = context.obj == "all"
            config = CountedConfig(
                figure=experiment.name,
                datasets=chosen_sets(experiment, dataset, data, of_all),
                model=model,
                embedder=embedder or ("words" if smoke else "demo"),
                limit=limit_of(60 if limit is None and smoke else limit, of_all),
                seeds=seeds if seeds is not None else 2 if smoke else experiment.seeds,
                small=data == "small",
                data_dir=None if data == "small" else data,
                traces=not smoke,
            )
            draw_or_run(experiment, config, out, figures, plot_only=plot_only, records=records, force=force)
        except KeyboardInterrupt:
            sys.exit(130)
        except (ValueError, OSError, ImportError, kr.KVReuseError) as error:
            fail(error)

    return one_command(main, experiment.about)
