"""`python -m experiments` lists the figures; `python -m experiments all --smoke` runs them all."""

from __future__ import annotations

import sys

from experiments.fig12 import FIG12
from experiments.fig13 import FIG13
from experiments.options import app_for
from experiments.selectors import SELECTORS
from experiments.selectors_thin import SELECTORS_THIN

EXPERIMENTS = {experiment.name: experiment for experiment in (FIG12, FIG13, SELECTORS, SELECTORS_THIN)}


def listing() -> str:
    """Every figure with what it shows."""
    lines = [f"  python -m experiments.{name}  {experiment.shows}" for name, experiment in EXPERIMENTS.items()]
    return "\n".join(
        [*lines, "  python -m experiments all     all of them; options go to each (--smoke, --limit, ...)"]
    )


def main(arguments: list[str]) -> int:
    """Run the figure named first with the arguments behind it; the exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(listing())
        return 0
    name, *rest = arguments
    if name != "all" and name not in EXPERIMENTS:
        print(f"error: there is no experiment {name!r}; these there are:\n{listing()}", file=sys.stderr)
        return 2
    status = 0
    for experiment in EXPERIMENTS.values() if name == "all" else [EXPERIMENTS[name]]:
        try:
            app_for(experiment)(rest, prog_name=f"python -m experiments.{experiment.name}")
        except SystemExit as ended:  # each command ends with its own status; the next one runs all the same
            if isinstance(ended.code, str):
                print(ended.code, file=sys.stderr)
            status = status or (ended.code if isinstance(ended.code, int) else 1 if ended.code else 0)
            if ended.code == 130:  # Ctrl-C ends them all
                break
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
