"""Figures about time alone: one prompt of equal chunks, interleaved rounds, no datasets' answers."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import torch

import kvreuse as kr
from experiments import options
from experiments.datasets import load_dataset
from experiments.environment import origin
from experiments.models import model_named
from experiments.options import HERE, fail, one_command
from experiments.results import RecordWriter, Results, read_results, results_to_draw
from experiments.runner import say

try:
    import typer
except ImportError:
    sys.exit("the experiments' command line needs typer: pip install 'kvreuse[experiments]'")

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Records = Iterator[dict[str, Any]]


class Drawn(Protocol):
    """What `save_figure` needs of a figure."""

    @property
    def name(self) -> str: ...
    @property
    def tabulate(self) -> Callable[[Results], tuple[pd.DataFrame, str]]: ...
    @property
    def draw(self) -> Callable[[Results], Figure]: ...


def file_stem(figure: str, model: str) -> str:
    """Figure and model, as files are named."""
    short = re.sub(r"[^A-Za-z0-9.]+", "-", Path(model).name).strip("-") or "model"
    return f"{figure.replace('.', '-')}-{short}"


@dataclass(frozen=True)
class TimedConfig:
    """What is timed; its hash is part of the records file's name.

    Args:
        figure: which script runs it.
        model: "demo", a hub id or a folder.
        dataset: where the chunks' running text comes from.
        num_chunks, chunk_tokens: of the prompt.
        repeats: interleaved rounds, behind a warm-up.
        small: take the project's own small set.
        device, dtype, threads: as in `kr.load_model`; threads of PyTorch.
    """

    figure: str
    model: str = "demo"
    dataset: str = "musique"
    num_chunks: int = 6
    chunk_tokens: int = 512
    repeats: int = 5
    small: bool = False
    data_dir: str | None = None
    device: str | None = None
    dtype: str | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_chunks", "chunk_tokens", "repeats", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")

    @property
    def stem(self) -> str:
        """Figure and model."""
        return file_stem(self.figure, self.model)

    @property
    def file_name(self) -> str:
        """Readable, and different for every configuration."""
        return f"{self.stem}-{hashlib.sha256(repr(self).encode()).hexdigest()[:8]}.jsonl"


@dataclass(frozen=True)
class TimedExperiment:
    """One figure: what it shows, how it is measured, and what its records say.

    ``measure`` yields records with a ``case_id`` (the round) and a ``method``; ``tabulate`` makes a frame and notes of
    them, ``draw`` the picture.
    """

    name: str
    shows: str
    measure: Callable[[TimedConfig, kr.ReuseModel], Records]
    tabulate: Callable[[Results], tuple[pd.DataFrame, str]]
    draw: Callable[[Results], Figure]
    section: str
    cost: str
    repeats: int = 5

    @property
    def about(self) -> str:
        """The line of the list of figures, and the help text."""
        return f"{self.shows} [{self.section}; {self.cost}]"


def equal_chunks(
    model: kr.ReuseModel, num_chunks: int, chunk_tokens: int, dataset: str = "musique", data_dir: str | None = None
) -> tuple[kr.RagPrompt, str]:
    """A prompt of equal chunks cut from a dataset's running text, repeated if it is too short; and its source."""
    data = load_dataset(dataset, data_dir=data_dir, limit=20)
    case, task = data.cases[0], data.task
    tokens = model.tokenize(" ".join(document.text for c in data.cases for document in c.documents))
    needed = num_chunks * chunk_tokens
    tokens = tokens.repeat(-(-needed // tokens.numel()))[:needed]
    question = f"Question: {case.question}\nAnswer:"
    frame = kr.RagPrompt.from_texts(model, system=task.system, chunks=["-"], question=question)
    return kr.RagPrompt(frame.prefix, list(tokens.split(chunk_tokens)), frame.question), data.source


def prompt_of(config: TimedConfig, model: kr.ReuseModel, num_chunks: int | None = None) -> kr.RagPrompt:
    """The configuration's prompt, of another number of chunks if one is given."""
    data_dir = "small" if config.small else config.data_dir
    return equal_chunks(model, num_chunks or config.num_chunks, config.chunk_tokens, config.dataset, data_dir)[0]


def run_timed(experiment: TimedExperiment, config: TimedConfig, folder: Path, force: bool = False) -> Path:
    """Measure, unless the records are there. An interrupted run leaves its whole rounds, and is begun anew."""
    path = folder / config.file_name
    if path.is_file() and not force:
        say(f"{path} is complete ({read_results(path).header['date']}); --force runs it again")
        return path
    model = model_named(config.model, config.device, config.dtype)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    with RecordWriter(path, _header(config, model), [], force=True) as writer:
        for record in experiment.measure(config, model):
            writer.write(record)
        return writer.finish()


def _header(config: TimedConfig, model: kr.ReuseModel) -> dict[str, Any]:
    return {
        "config": repr(config),
        "figure": config.figure,
        "dataset": config.dataset,
        "num_chunks": config.num_chunks,
        "chunk_tokens": config.chunk_tokens,
        "repeats": config.repeats,
        **origin(config.model, model),
    }


def save_figure(experiment: Drawn, results: Results, stem: str, figures: Path) -> list[Path]:
    """Table (.md, .csv) and picture (.png) of a run; prints the table."""
    frame, notes = experiment.tabulate(results)
    h = results.header
    timed = f"{h['device']}, {h['dtype']}, threads: {h['threads']}" if "device" in h else h["source"]
    about = f"{h['model']}, {timed}, {h['date'][:10]}."
    if not results.complete:
        about += " Unfinished."
    table = markdown(frame)
    figures.mkdir(parents=True, exist_ok=True)
    paths = [figures / f"{stem}.{suffix}" for suffix in ("md", "csv", "png")]
    paths[0].write_text(f"### {experiment.name}\n\n{about}\n\n{table}\n\n{notes}\n", encoding="utf-8")
    frame.to_csv(paths[1], index=False)
    experiment.draw(results).savefig(paths[2], dpi=200)
    print(f"{experiment.name}: {about}\n\n{table}\n\n{notes}\n\n" + "\n".join(map(str, paths)))
    return paths


def markdown(frame: pd.DataFrame) -> str:
    """A frame as a Markdown table; numbers to three digits."""
    rows = [[f"{v:.3g}" if isinstance(v, float) else str(v) for v in row] for row in frame.itertuples(index=False)]
    lines = [list(map(str, frame.columns)), ["---"] * len(frame.columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def timed_app(experiment: TimedExperiment) -> typer.Typer:
    """The command line of one figure."""

    def main(
        model: Annotated[str, typer.Option(help="demo, a hub id or a folder")] = "demo",
        dataset: Annotated[str, typer.Option(help="where the chunks' text comes from")] = "musique",
        data_dir: options.DataDir = None,
        device: options.Device = None,
        dtype: options.Dtype = None,
        threads: options.Threads = None,
        num_chunks: Annotated[int | None, typer.Option(help="chunks of the prompt [6]")] = None,
        chunk_tokens: Annotated[int | None, typer.Option(help="tokens of a chunk [512]")] = None,
        repeats: Annotated[int | None, typer.Option(help="rounds behind a warm-up")] = None,
        limit: options.IgnoredNumber = None,
        smoke: Annotated[bool, typer.Option("--smoke", help="short chunks, one round: seconds")] = False,
        plot_only: options.PlotOnly = False,
        records: options.RecordsFile = None,
        force: options.Force = False,
        out: options.Out = HERE / "results",
        figures: options.Figures = HERE / "figures",
    ) -> None:
        stopped = False
        try:
            config = TimedConfig(
                figure=experiment.name,
                model=model,
                dataset=dataset.split(",")[0],
                num_chunks=num_chunks or (2 if smoke else 6),
                chunk_tokens=chunk_tokens or (48 if smoke else 512),
                repeats=repeats if repeats is not None else 1 if smoke else experiment.repeats,
                small=smoke and data_dir is None,
                data_dir=None if data_dir is None else str(data_dir),
                device=device,
                dtype=dtype,
                threads=threads,
            )
            if not (plot_only or records):
                try:
                    run_timed(experiment, config, out, force)
                except KeyboardInterrupt:
                    stopped = True
                    say("stopped: the whole rounds are kept")
            path = records or results_to_draw(out / config.file_name)
            save_figure(experiment, read_results(path), config.stem, figures)
        except (ValueError, OSError, ImportError, kr.KVReuseError) as error:
            fail(error)
        if stopped:
            sys.exit(130)

    return one_command(main, experiment.about)
