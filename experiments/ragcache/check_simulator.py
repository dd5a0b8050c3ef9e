"""The simulator against the real server: same requests, two rates, three policies, costs measured in the same run.

python -m experiments.ragcache.check_simulator --data-dir ../shared/data
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import kvreuse as kr
from experiments import options
from experiments.environment import origin
from experiments.options import HERE, fail, one_command
from experiments.ragcache.check_report import RUNS, draw, tabulate
from experiments.ragcache.check_run import POLICIES, Check, CheckConfig
from experiments.results import RecordWriter, Results, read_results, results_to_draw
from experiments.runner import say
from experiments.timed import file_stem, save_figure
from kvreuse.ragcache.cost_models import MeasuredCosts

try:
    import typer
except ImportError:
    sys.exit("the experiments' command line needs typer: pip install 'kvreuse[experiments]'")

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

NAME = "ragcache.check_simulator"


def run_check(config: CheckConfig, folder: Path, force: bool = False) -> Path:
    """Run what is not in the records yet: a cell is a rate and a policy."""
    path = folder / file_name(config)
    if path.is_file() and not force:
        say(f"{path} is complete ({read_results(path).header['date']}); --force runs it again")
        return path
    check = Check(config)
    header = {
        "config": repr(config),
        "figure": NAME,
        "rates": config.rates,
        "policies": config.policies,
        "requests": config.requests,
        "skew": config.skew,
        "doc_tokens": config.doc_tokens,
        "gpu_tokens": config.gpu_tokens,
        "host_tokens": config.host_tokens,
        **check.header(),
        **origin(config.model, check.model),
    }
    with RecordWriter(path, header, RUNS, force=force) as writer:
        profile: MeasuredCosts | None = None
        for rate in config.rates:
            for policy in config.policies:
                cell = f"{rate:g} {policy}"
                if cell in writer.done:
                    profile = None  # whatever was measured before it was not just before the next one
                    continue
                before = profile or check.profile()
                say(f"{cell}: the server, about {config.requests / rate:.0f} s")
                real, between = check.serve(rate, policy, before)
                profile = check.profile()
                profiles = [before, *between, profile]
                simulated = check.simulate(rate, policy, profiles, real["iterations"])
                common = {"case_id": cell, "rate": rate, "policy": policy}
                writer.write({**common, "method": "server", "values": real})
                records = [p.record() for p in profiles]
                writer.write({**common, "method": "simulator", "values": simulated, "profiles": records})
        return writer.finish()


def file_name(config: CheckConfig) -> str:
    """Readable, and different for every configuration."""
    return f"{file_stem(NAME, config.model)}-{hashlib.sha256(repr(config).encode()).hexdigest()[:8]}.jsonl"


@dataclass(frozen=True)
class _Figure:
    """What is written of the records, and the line of the list of figures."""

    name: str = NAME
    about: str = "the simulator's TTFT and hit rates against the real server's. [RAGCache 7; 50 minutes, not in `all`]"
    tabulate: Callable[[Results], tuple[pd.DataFrame, str]] = tabulate
    draw: Callable[[Results], Figure] = draw


CHECK_SIMULATOR = _Figure()


def check_app() -> typer.Typer:
    """The command line."""

    def main(
        model: Annotated[str, typer.Option(help="demo, a hub id or a folder")] = "demo",
        data_dir: options.DataDir = None,
        requests: Annotated[int | None, typer.Option(help="of each run [300]")] = None,
        rates: Annotated[str | None, typer.Option(help="requests per second [0.8,1.1]")] = None,
        policies: Annotated[str | None, typer.Option(help=f"some of {','.join(POLICIES)}")] = None,
        speculate: Annotated[bool, typer.Option("--speculate", help="start prefills during the search")] = False,
        threads: Annotated[int, typer.Option(help="threads of PyTorch")] = 1,
        seed: Annotated[int, typer.Option(help="of order and arrivals")] = 0,
        smoke: Annotated[bool, typer.Option("--smoke", help="the small set, a few requests: seconds")] = False,
        plot_only: options.PlotOnly = False,
        records: options.RecordsFile = None,
        force: options.Force = False,
        out: options.Out = HERE / "results",
        figures: options.Figures = HERE / "figures",
    ) -> None:
        stopped = False
        try:
            config = _config(model, data_dir, requests, rates, policies, speculate, threads, seed, smoke)
            if not (plot_only or records):
                try:
                    run_check(config, out, force)
                except KeyboardInterrupt:
                    stopped = True
                    say("stopped: whole cells are kept, the next run goes on behind them")
            path = records or results_to_draw(out / file_name(config))
            save_figure(CHECK_SIMULATOR, read_results(path), file_stem(NAME, config.model), figures)
        except (ValueError, OSError, ImportError, kr.KVReuseError) as error:
            fail(error)
        if stopped:
            sys.exit(130)

    return one_command(main, CHECK_SIMULATOR.about)


def _config(
    model: str,
    data_dir: Path | None,
    requests: int | None,
    rates: str | None,
    policies: str | None,
    speculate: bool,
    threads: int,
    seed: int,
    smoke: bool,
) -> CheckConfig:
    """A smoke run: six requests at one rate, two policies, the small set."""
    given: dict[str, Any] = {"requests": requests}
    if rates is not None:
        given["rates"] = tuple(float(r) for r in rates.split(","))
    if policies is not None:
        given["policies"] = tuple(p.strip() for p in policies.split(","))
    small = smoke and data_dir is None
    defaults: dict[str, Any] = {}
    if smoke:
        defaults = {
            "requests": 6,
            "questions": 4,
            "rates": (2.0,),
            "policies": ("PGDSF", "LRU"),
            "repeats": 1,
            "segments": 2,
        }
        defaults |= {"gpu_tokens": 300, "host_tokens": 300, "pause_s": 0.0}
    chosen = {**defaults, **{k: v for k, v in given.items() if v is not None}}
    return CheckConfig(
        model=model,
        speculate=speculate,
        threads=threads,
        seed=seed,
        small=small,
        data_dir=None if data_dir is None else str(data_dir),
        **chosen,
    )


if __name__ == "__main__":
    check_app()()
