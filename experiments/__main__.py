"""`python -m experiments` lists the figures; `python -m experiments all --smoke` runs them all."""

from __future__ import annotations

import sys

from experiments.controller import CONTROLLER
from experiments.fig02 import FIG02
from experiments.fig03 import FIG03
from experiments.fig04 import FIG04
from experiments.fig06 import FIG06
from experiments.fig07 import FIG07
from experiments.fig08 import FIG08
from experiments.fig10 import FIG10
from experiments.fig12 import FIG12
from experiments.fig13 import FIG13
from experiments.fig14 import FIG14
from experiments.fig15a import FIG15A
from experiments.fig15b import FIG15B
from experiments.fig15c import FIG15C
from experiments.fig16 import FIG16
from experiments.fig17 import FIG17
from experiments.options import app_for
from experiments.pipelining import PIPELINING
from experiments.ragcache.check_simulator import CHECK_SIMULATOR, check_app
from experiments.ragcache.fig02 import FIG02 as RAGCACHE_FIG02
from experiments.ragcache.fig03 import FIG03 as RAGCACHE_FIG03
from experiments.ragcache.fig04 import FIG04 as RAGCACHE_FIG04
from experiments.ragcache.fig05 import FIG05 as RAGCACHE_FIG05
from experiments.ragcache.fig06 import FIG06 as RAGCACHE_FIG06
from experiments.ragcache.fig13 import FIG13 as RAGCACHE_FIG13
from experiments.ragcache.fig14 import FIG14 as RAGCACHE_FIG14
from experiments.ragcache.fig15 import FIG15 as RAGCACHE_FIG15
from experiments.ragcache.fig16 import FIG16 as RAGCACHE_FIG16
from experiments.ragcache.fig17 import FIG17 as RAGCACHE_FIG17
from experiments.ragcache.fig18 import FIG18 as RAGCACHE_FIG18
from experiments.ragcache.fig19 import FIG19 as RAGCACHE_FIG19
from experiments.ragcache.frame import counted_app
from experiments.ragcache.simulated import simulated_app
from experiments.ragcache.tab02 import TAB02
from experiments.ragcache.tab03 import TAB03
from experiments.ragcache.tab04 import TAB04
from experiments.reuse_gap import REUSE_GAP
from experiments.selectors import SELECTORS
from experiments.selectors_thin import SELECTORS_THIN
from experiments.timed import timed_app

_INSIDE = (FIG02, FIG03, FIG04, FIG06, FIG07, FIG08, FIG15A, FIG15B, FIG15C, FIG16)
_ALL = (*_INSIDE, FIG12, FIG13, FIG17, SELECTORS, SELECTORS_THIN)
EXPERIMENTS = {experiment.name: experiment for experiment in _ALL}
_TIMED = (FIG10, FIG14, PIPELINING, CONTROLLER, RAGCACHE_FIG02, RAGCACHE_FIG04)
TIMED = {experiment.name: experiment for experiment in _TIMED}
_COUNTED = (RAGCACHE_FIG03, RAGCACHE_FIG05, RAGCACHE_FIG06, REUSE_GAP)
COUNTED = {experiment.name: experiment for experiment in _COUNTED}
# RAGCache's figures 13 to 19; CacheBlend's of the same numbers have no "ragcache." before them.
_OVER_RATE = (RAGCACHE_FIG13, RAGCACHE_FIG14, RAGCACHE_FIG15, RAGCACHE_FIG16)
_SIMULATED = (*_OVER_RATE, RAGCACHE_FIG17, TAB02, RAGCACHE_FIG18, RAGCACHE_FIG19, TAB03, TAB04)
SIMULATED = {experiment.name: experiment for experiment in _SIMULATED}


def listing() -> str:
    """Every figure with what it shows, where in the paper it is, and what a run on the demo model takes."""
    every = sorted(
        (EXPERIMENTS | TIMED | COUNTED | SIMULATED).items(), key=lambda item: (not item[0].startswith("fig"), item[0])
    )
    rows = [(f"python -m experiments.{name}", experiment.about) for name, experiment in every]
    rows.append((f"python -m experiments.{CHECK_SIMULATOR.name}", CHECK_SIMULATOR.about))
    rows.append(("python -m experiments all", "all the others; options go to each (--smoke, --limit, ...)"))
    width = max(len(command) for command, _ in rows)
    return "\n".join(f"  {command:{width}}  {about}" for command, about in rows)


def main(arguments: list[str]) -> int:
    """Run the figure named first with the arguments behind it; the exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(listing())
        return 0
    name, *rest = arguments
    apps = {n: app_for(e) for n, e in EXPERIMENTS.items()} | {n: timed_app(e) for n, e in TIMED.items()}
    apps |= {n: counted_app(e) for n, e in COUNTED.items()} | {n: simulated_app(e) for n, e in SIMULATED.items()}
    apart = {CHECK_SIMULATOR.name: check_app()}  # too long for `all`
    if name != "all" and name not in apps | apart:
        print(f"error: there is no experiment {name!r}; these there are:\n{listing()}", file=sys.stderr)
        return 2
    status = 0
    for figure in apps if name == "all" else [name]:
        try:
            (apps | apart)[figure](rest, prog_name=f"python -m experiments.{figure}", obj=name)
        except SystemExit as ended:  # each command ends with its own status; the next one runs all the same
            if isinstance(ended.code, str):
                print(ended.code, file=sys.stderr)
            status = status or (ended.code if isinstance(ended.code, int) else 1 if ended.code else 0)
            if ended.code == 130:  # Ctrl-C ends them all
                break
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
