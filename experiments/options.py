"""The command line that the figures share: options, presets, and the order run, table, picture."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import kvreuse as kr
from experiments.datasets import DATASET_NAMES
from experiments.experiment import PRESETS, AnyTable, Experiment, configurations, preset_named
from experiments.results import Results, find_results, read_results
from experiments.runner import RunConfig, load_model, run, say

try:
    import typer
except ImportError:
    sys.exit("the experiments' command line needs typer: pip install 'kvreuse[experiments]'")

HERE = Path(__file__).resolve().parent

# Options that mean the same on every figure's command line.
DataDir = Annotated[Path | None, typer.Option(help="folder of the real sets, see data/README.md")]
Device = Annotated[str | None, typer.Option(help="cuda, cpu, ... [a GPU if there is one]")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, float16")]
Threads = Annotated[int | None, typer.Option(help="threads of PyTorch on the CPU")]
RecordsFile = Annotated[Path | None, typer.Option(help="draw this file; run nothing")]
PlotOnly = Annotated[bool, typer.Option("--plot-only", help="draw what is there, run nothing")]
Force = Annotated[bool, typer.Option("--force", help="run again even what is complete")]
Out = Annotated[Path, typer.Option(help="folder of the raw records")]
Figures = Annotated[Path, typer.Option(help="folder of tables and pictures")]
# For `all`, which hands every figure the same options: this figure has nothing that they could change.
IgnoredText = Annotated[str | None, typer.Option(hidden=True)]
IgnoredNumber = Annotated[int | None, typer.Option(hidden=True)]


def run_experiment(
    experiment: Experiment,
    configs: list[RunConfig],
    results: Path,
    figures: Path,
    *,
    force: bool = False,
    plot_only: bool = False,
    paper: bool = False,
    records: Sequence[Path] = (),
) -> list[Path]:
    """Run what is missing, print the tables, save them (.md, .csv) and the picture (.png); returns those paths.

    After Ctrl-C the tables and the picture show what there is. With ``records`` nothing is run and those files are
    drawn, whatever configuration made them.

    Raises:
        FileNotFoundError: with ``plot_only``, and there are no results of these configurations.
    """
    stopped = False
    if not (plot_only or records):
        try:
            for config in configs:
                run(config, results, lambda: load_model(configs[0]), force, experiment.cases, experiment.measure)
        except KeyboardInterrupt:
            stopped = True
            say("stopped: what is done is kept, the same command (without --force) continues it")
    paths = records or [path for c in configs if (path := find_results(results / c.file_name))]
    found = [(path, read_results(path)) for path in paths]
    tables = [table for path, data in found if (table := _table(experiment, path, data)) is not None]
    if not tables and not stopped:
        names = ", ".join(str(results / c.file_name) for c in configs)
        raise FileNotFoundError(f"no results to draw: {names} not there or without a complete case; run it first")
    saved = _save(experiment, tables, figures, paper) if tables else []
    if stopped:
        raise KeyboardInterrupt
    return saved


def _table(experiment: Experiment, path: Path, data: Results) -> AnyTable | None:
    table = experiment.tabulate(data)
    if table is None:
        say(f"{path}: no complete case yet")
    elif not data.complete:
        say(f"{path}: unfinished, {table.num_cases} of {data.header['num_cases']} cases")
    return table


def _save(experiment: Experiment, tables: list[AnyTable], figures: Path, paper: bool) -> list[Path]:
    figures.mkdir(parents=True, exist_ok=True)
    header = tables[0].header
    small = ["small"] if header["source"] == "small set" else []
    parts = [experiment.name, Path(header["model"]).name, *dict.fromkeys(t.dataset for t in tables), *small]
    stem = figures / "-".join([*parts, f"n{max(t.num_cases for t in tables)}"])
    report = experiment.report or (lambda table: table.markdown(experiment.columns))
    texts = [report(table) for table in tables]
    if paper:
        from experiments.paper_values import markdown

        texts.append(markdown(experiment.name))
    print("\n\n".join(table.text(experiment.columns) for table in tables))
    paths = [Path(f"{stem}.{suffix}") for suffix in ("md", "csv", "png")]
    paths[0].write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    import pandas as pd

    swept = [{f"swept_{name}": table.header[name] for name in experiment.swept} for table in tables]
    frames = [t.frame.assign(dataset=t.dataset, **settings) for t, settings in zip(tables, swept, strict=True)]
    pd.concat(frames).to_csv(paths[1], index=False)
    experiment.draw(tables, paper).savefig(paths[2], dpi=200)
    print(f"\nall columns  {paths[0]}\n             {paths[1]}\nfigure       {paths[2]}")
    return paths


def command(experiment: Experiment) -> Callable[..., None]:
    """The typer command of one figure."""

    def main(
        model: Annotated[str | None, typer.Option(help="demo, a hub id or a folder [demo]")] = None,
        dataset: Annotated[str | None, typer.Option(help=f"some of {','.join(DATASET_NAMES)}")] = None,
        limit: Annotated[int | None, typer.Option(help="cases per dataset [20]; 0 takes all")] = None,
        data_dir: DataDir = None,
        device: Device = None,
        dtype: Dtype = None,
        quantization: Annotated[str | None, typer.Option(help="8bit or 4bit, with bitsandbytes")] = None,
        threads: Threads = None,
        context: Annotated[str | None, typer.Option(help="auto, paragraphs or retrieve [auto]")] = None,
        num_chunks: Annotated[int | None, typer.Option(help="chunks of a prompt [6]")] = None,
        chunk_tokens: Annotated[int | None, typer.Option(help="most tokens of a cut piece [512]")] = None,
        max_new_tokens: Annotated[int | None, typer.Option(help="of an answer [the task's: 32, 128 or 512]")] = None,
        repeats: Annotated[int | None, typer.Option(help="TTFT measurements per case and method [1]")] = None,
        seed: Annotated[int | None, typer.Option(help="of the sample of cases and chunks [0]")] = None,
        preset: Annotated[str, typer.Option(help=f"defaults of the above: {', '.join(PRESETS)}")] = "default",
        smoke: Annotated[bool, typer.Option("--smoke", help="everything on one short case, in seconds")] = False,
        records: Annotated[list[Path] | None, typer.Option(help="draw these files; run nothing")] = None,
        plot_only: PlotOnly = False,
        force: Force = False,
        paper: Annotated[bool, typer.Option("--paper", help="add the paper's own values")] = False,
        out: Out = HERE / "results",
        figures: Figures = HERE / "figures",
    ) -> None:
        given = {
            "data_dir": None if data_dir is None else str(data_dir),
            "model": model,
            "dataset": dataset,
            "limit": limit,
            "device": device,
            "dtype": dtype,
            "quantization": quantization,
            "threads": threads,
            "context": context,
            "num_chunks": num_chunks,
            "chunk_tokens": chunk_tokens,
            "max_new_tokens": max_new_tokens,
            "repeats": repeats,
            "seed": seed,
        }
        try:
            name = "smoke" if smoke else preset
            chosen = replace(experiment, **experiment.smoke) if name == "smoke" else experiment
            configs = configurations(chosen, preset_named(name), given)
            settings: Any = {"force": force, "plot_only": plot_only, "paper": paper, "records": records or ()}
            run_experiment(chosen, configs, out, figures, **settings)
        except KeyboardInterrupt:
            sys.exit(130)
        except (ValueError, OSError, ImportError, kr.KVReuseError) as error:
            fail(error)

    main.__doc__ = experiment.shows
    return main


def fail(error: Exception) -> NoReturn:
    """One line for a wrong argument; KVREUSE_DEBUG=1 shows where it came from."""
    if os.environ.get("KVREUSE_DEBUG"):
        raise error
    sys.exit(f"error: {error}")


def app_for(experiment: Experiment) -> typer.Typer:
    """One figure's command line."""
    return one_command(command(experiment), experiment.about)


def one_command(main: Callable[..., None], about: str) -> typer.Typer:
    """The command line of one function; ``about`` is its help."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(help=about)(main)
    return app
