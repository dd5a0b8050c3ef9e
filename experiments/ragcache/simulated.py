"""Figures that simulate a server under real questions: command line, configuration, and what a record says.

Costs, capacities and documents' lengths are a `Scale`; requests are real questions with what real retrieval found for
them, in another order and with other Poisson arrivals for every seed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Any

import kvreuse as kr
from experiments import options
from experiments.options import HERE, fail, one_command
from experiments.ragcache.frame import CountedConfig, CountedExperiment, chosen_sets, draw_or_run, limit_of
from experiments.ragcache.scales import SCALE_NAMES, Scale, scales_named
from experiments.timed import file_stem
from experiments.vectors import Search

try:
    import typer
except ImportError:
    sys.exit("the experiments' command line needs typer: pip install 'kvreuse[experiments]'")

WARMUP = 0.25  # of the requests: results leave the first ones out, whose caches are still empty


@dataclass(frozen=True)
class SimulatedConfig(CountedConfig):
    """What is simulated; its hash is part of the records file's name.

    Args:
        costs: a name of `scales`.
        requests: per run, the warm-up among them.
    """

    costs: str = "a10g"
    requests: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.requests < 8:
            raise ValueError(f"requests={self.requests}: give at least 8, of which a quarter warms up")

    @property
    def stem(self) -> str:
        """Figure and costs."""
        return file_stem(self.figure, self.costs)

    @property
    def scales(self) -> tuple[Scale, ...]:
        """The servers."""
        return scales_named(self.costs, self.model, self.small)

    def search(self, top_k: int = 2) -> Search:
        """The paper's default: an IVF index, searched in four stages."""
        return Search("ivf", top_k, embedder=self.embedder)

    def about(self) -> dict[str, Any]:
        """Costs and capacities of every server."""
        return {
            "model": f"{self.requests} requests a run, {self.seeds} seeds, costs: {self.costs}",
            "tokenizer": self.model,
            "requests": self.requests,
            "warmup": int(WARMUP * self.requests),
            "scales": [scale.describe() for scale in self.scales],
        }


@dataclass(frozen=True)
class SimulatedExperiment(CountedExperiment[SimulatedConfig]):
    """One simulated figure.

    Args:
        costs: the ``--costs`` it has by default.
        requests: per run.
        records_of: the figure whose records it draws, and makes if they are not there; its own if None.
    """

    datasets: tuple[str, ...] = ("mmlu", "nq")
    costs: str = "a10g"
    requests: int = 1000
    records_of: str | None = None


def simulated_app(experiment: SimulatedExperiment) -> typer.Typer:
    """The command line of one figure."""

    def main(
        context: typer.Context,
        costs: Annotated[str | None, typer.Option(help=f"of the server: {', '.join(SCALE_NAMES)}")] = None,
        requests: Annotated[int | None, typer.Option(help="requests per run, a quarter of them warm-up")] = None,
        model: Annotated[str, typer.Option(help="whose tokenizer counts: demo, a hub id or a folder")] = "demo",
        dataset: Annotated[str | None, typer.Option(help="question sets, some of mmlu,nq,2wiki")] = None,
        embedder: Annotated[str | None, typer.Option(help="demo, words (no model), a hub id or a folder")] = None,
        data_dir: options.DataDir = None,
        limit: Annotated[int | None, typer.Option(help="questions of a set to draw from [all]")] = None,
        seeds: Annotated[int | None, typer.Option(help="orders of the questions, and arrivals")] = None,
        device: options.IgnoredText = None,
        dtype: options.IgnoredText = None,
        threads: options.IgnoredNumber = None,
        repeats: options.IgnoredNumber = None,
        smoke: Annotated[bool, typer.Option("--smoke", help="one small set, few requests: seconds")] = False,
        plot_only: options.PlotOnly = False,
        records: options.RecordsFile = None,
        force: options.Force = False,
        out: options.Out = HERE / "results",
        figures: options.Figures = HERE / "figures",
    ) -> None:
        try:
            data = "small" if smoke and data_dir is None else None if data_dir is None else str(data_dir)
            of_all = context.obj == "all"
            sets = chosen_sets(experiment, dataset, data, of_all)
            config = SimulatedConfig(
                figure=experiment.records_of or experiment.name,
                datasets=sets[:1] if smoke and dataset is None else sets,
                model=model,
                embedder=embedder or ("words" if smoke else "demo"),
                limit=limit_of(limit, of_all),
                seeds=seeds if seeds is not None else 2 if smoke else experiment.seeds,
                small=data == "small",
                data_dir=None if data == "small" else data,
                costs=costs or experiment.costs,
                requests=requests if requests is not None else 60 if smoke else experiment.requests,
            )
            stem = file_stem(experiment.name, config.costs)
            how: Any = {"stem": stem, "plot_only": plot_only, "records": records, "force": force}
            draw_or_run(experiment, config, out, figures, **how)
        except KeyboardInterrupt:
            sys.exit(130)
        except (ValueError, OSError, ImportError, kr.KVReuseError) as error:
            fail(error)

    return one_command(main, experiment.about)
