"""RAGCache, table 4: what scheduling takes: the tree, the queue and the speculator, timed while a workload is served.

python -m experiments.ragcache.tab04 --data-dir ../shared/data
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.plotting import legend_below, new_figure, tidy
from experiments.ragcache.bench import DIGITS, Bench, record
from experiments.ragcache.frame import WORKLOAD_STYLES, WORKLOAD_TITLES
from experiments.ragcache.notes import notes_of, scale_note
from experiments.ragcache.seeds import interval_of, lines, over_seeds, percent, text
from experiments.ragcache.simulated import WARMUP, SimulatedConfig, SimulatedExperiment, simulated_app
from experiments.results import Results
from experiments.timed import Records
from kvreuse.ragcache.controller import Controller, Request
from kvreuse.ragcache.node import Match
from kvreuse.ragcache.segments import MakePayload
from kvreuse.ragcache.simulator import Simulator
from kvreuse.ragcache.speculative import Decision, Documents, Generation, Speculator
from kvreuse.ragcache.systems import RAGCACHE
from kvreuse.ragcache.tree import KnowledgeTree

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

LOADS = (0.25, 0.5, 1.0, 2.0)
NOTES = (
    "Milliseconds per request, all its decisions together: candidates of every search stage (speculation), the dequeue "
    "(reordering), match, promotion, insertion with its evictions, update. Processor time is what the decisions took; "
    "the wall clock also counts what the machine did for other programs meanwhile. The simulated server calls the very "
    "objects that the real one does."
)
PARTS = ("search stages", "dequeue and match", "insert and update")


class TimedController(Controller):
    """A controller that knows how long it took for every request. ``spent``: (wall, processor) seconds by request."""

    def __init__(self, tree: KnowledgeTree, speculator: Speculator, window: int) -> None:
        super().__init__(tree, speculator, window)
        self.spent: dict[int, np.ndarray] = defaultdict(lambda: np.zeros((len(PARTS), 2)))

    @contextmanager
    def _timed(self, part: int) -> Iterator[list[int]]:
        """Adds to the request whose number is put into the list."""
        whose: list[int] = []
        begun = time.perf_counter(), time.thread_time()
        yield whose
        taken = np.subtract((time.perf_counter(), time.thread_time()), begun)
        for request_id in whose:
            self.spent[request_id][part] += taken

    def stage(self, request_id: int, documents: Documents) -> Decision:
        """Timed."""
        with self._timed(0) as whose:
            whose.append(request_id)
            return super().stage(request_id, documents)

    def final(self, request_id: int, documents: Documents, now: float) -> Request | None:
        """Timed."""
        with self._timed(0) as whose:
            whose.append(request_id)
            return super().final(request_id, documents, now)

    def next_prefill(self) -> tuple[Generation, Match] | None:
        """Timed."""
        with self._timed(1) as whose:
            ready = super().next_prefill()
            if ready is not None:
                whose.append(ready[0].request_id)
            return ready

    def prefilled(self, generation: Generation, make_payload: MakePayload | None, now: float) -> None:
        """Timed."""
        with self._timed(2) as whose:
            whose.append(generation.request_id)
            super().prefilled(generation, make_payload, now)

    def finished(self, generation: Generation, num_tokens: int, now: float) -> Request | None:
        """Timed."""
        with self._timed(2) as whose:
            whose.append(generation.request_id)
            return super().finished(generation, num_tokens, now)


@dataclass(frozen=True)
class TimedSimulator(Simulator):
    """Keeps its timed controllers in ``made``."""

    made: list[TimedController] = field(default_factory=list, compare=False)

    def new_controller(self, tree: KnowledgeTree) -> TimedController:
        """A timed one in place of the usual."""
        speculator = Speculator(self.max_prefill_batch, self.system.speculate)
        self.made.append(TimedController(tree, speculator, self.system.window))
        return self.made[-1]


def count(config: SimulatedConfig) -> Records:
    """Times of all requests behind the warm-up, at every rate."""
    (scale, *_) = config.scales
    for name in config.datasets:
        bench = Bench(config.retrieved(name, config.search()), scale)
        for load in LOADS:
            for seed in range(config.seeds):
                simulator = TimedSimulator(**vars(bench.simulator(RAGCACHE)))
                rate = bench.rate(load)
                simulator.run(bench.requests(rate, config.requests, seed))
                spent = simulator.made[0].spent
                taken = np.array([spent[n] for n in range(int(WARMUP * config.requests), config.requests)])
                yield record(bench, RAGCACHE, seed, load=load, rate=rate) | numbers(taken)


def numbers(taken: np.ndarray) -> dict[str, float]:
    """Of [requests, parts, (wall, processor)] seconds: milliseconds, and the share of requests above one."""
    found: dict[str, float] = {}
    for place, clock in enumerate(("wall", "processor")):
        ms = 1000 * taken[:, :, place].sum(axis=1)
        median, p99 = np.percentile(ms, (50, 99)).tolist()
        found |= {
            f"{clock}_ms": ms.mean(),
            f"{clock}_median_ms": median,
            f"{clock}_p99_ms": p99,
            f"{clock}_max_ms": ms.max(),
        }
        found[f"{clock}_above_1_ms"] = (ms > 1).mean()
    for place, part in enumerate(PARTS):
        found[f"{part}_ms"] = 1000 * taken[:, place, 1].mean()
    return {key: float(f"{float(value):.{DIGITS}g}") for key, value in found.items()}


def tabulate(results: Results) -> tuple[pd.DataFrame, str]:
    """A row per question set and rate."""
    import pandas as pd

    rows = []
    for (name, load), here in pd.DataFrame(results.records).groupby(["case_id", "load"], sort=False):
        columns: dict[str, Any] = {
            "questions": WORKLOAD_TITLES[name],
            "load": f"{load:g}",
            "rate, 1/s": f"{here['rate'].iloc[0]:.3g}",
            "processor ms, mean": text(interval_of(here, "processor_ms")),
            "median": text(interval_of(here, "processor_median_ms")),
            "99th percentile": text(interval_of(here, "processor_p99_ms")),
            "above 1 ms": percent(interval_of(here, "processor_above_1_ms")),
            "wall ms, median": text(interval_of(here, "wall_median_ms")),
            "wall ms, mean": text(interval_of(here, "wall_ms")),
        }
        parts = {f"{part}, ms": f"{interval_of(here, f'{part}_ms').mean:.3f}" for part in PARTS}
        rows.append(columns | parts)
    return pd.DataFrame(rows), f"{NOTES}\n\n{notes_of(results)}"


def draw(results: Results) -> Figure:
    """Mean and 99th percentile of processor time, and the wall clock's median, over the rate."""
    import pandas as pd

    panels = {
        "processor_ms": "processor time, mean (ms)",
        "processor_p99_ms": "processor time, 99th percentile (ms)",
        "wall_median_ms": "wall clock, median (ms)",
    }
    frame = pd.DataFrame(results.records).assign(method=lambda f: f["case_id"].map(WORKLOAD_TITLES))
    figure, axes = new_figure(1, len(panels), sharey=True)
    points = over_seeds(frame, ["method", "rate"], panels)
    styles = {WORKLOAD_TITLES[name]: WORKLOAD_STYLES[name] for name in frame["case_id"].unique()}
    for panel, (value, label) in zip(axes[0], panels.items(), strict=True):
        lines(panel, points, "rate", value, styles)
        panel.axhline(1.0, color="#777777", linestyle="--", linewidth=1.0, label="paper: under one millisecond")
        panel.set_xlabel("arriving requests per second")
        panel.set_ylabel(label)
        panel.set_ylim(0, None)
        tidy(panel)
    title = f"Scheduling time of a request, measured under {frame['server'].iloc[0]}'s load ({scale_note(results)})"
    figure.suptitle(title, fontsize=11)
    legend_below(figure, 3)
    return figure


TAB04 = SimulatedExperiment(
    name="ragcache.tab04",
    shows="scheduling time per request, measured while a simulated server is at work.",
    count=count,
    tabulate=tabulate,
    draw=draw,
    section="RAGCache 7.4",
    cost="half a minute; the first time half an hour, for embeddings",
)

if __name__ == "__main__":
    simulated_app(TAB04)()
