"""Methods in interleaved rounds, with what they had to compute and the machine's rates of the same round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import kvreuse as kr
from benchmarks.flops import Costs, Work
from benchmarks.rates import Meter, Rates
from kvreuse.intervals import Interval, bootstrap_interval
from kvreuse.results import TTFT_STAGES, BatchPrefill, Prefill

Run = Callable[[kr.ReuseMethod], Prefill | BatchPrefill]


@dataclass(frozen=True)
class Round:
    """One pass over all methods: the machine's rates, and per method seconds.

    ``ttft_s`` and the stages as the method reports them; ``taken_s``: of the whole prefill by the meter's clock
    (`clock_of`), which is what is held against the floor and against other methods.
    """

    rates: Rates
    seconds: dict[str, dict[str, float]]


@dataclass
class Measured:
    """``work`` per method (by repr), and the rounds. The first method is the reference."""

    work: dict[str, Work] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)

    def median(self, of: Callable[[Round], float]) -> float:
        """The median of a number over the rounds."""
        return statistics.median(of(r) for r in self.rounds)

    def interval(self, of: Callable[[Round], float]) -> Interval:
        """The median of a number over the rounds, and its bootstrap interval (of up to five rounds their range)."""
        return bootstrap_interval([of(r) for r in self.rounds], statistic=lambda values: float(values.quantile(0.5)))

    def ttft_s(self, name: str) -> float:
        """Median TTFT."""
        return self.median(lambda r: r.seconds[name]["ttft_s"])

    def taken_s(self, name: str) -> float:
        """Median time by the meter's clock."""
        return self.median(lambda r: r.seconds[name]["taken_s"])

    def floor_s(self, name: str) -> float:
        """Median floor."""
        return self.median(lambda r: r.rates.floor_s(self.work[name]))

    def gemm_floor_s(self, name: str) -> float:
        """Median of the floor at the GEMM rate alone."""
        return self.median(lambda r: r.rates.gemm_floor_s(self.work[name]))

    def reached(self, name: str) -> float:
        """Fraction of the floor reached: floor over time taken, both of the same round; median."""
        return self.median(lambda r: self._reached(r, name))

    def relative(self, name: str, reference: str) -> Interval:
        """The fraction reached over the reference's own, within the round; median."""
        return self.interval(lambda r: self._reached(r, name) / self._reached(r, reference))

    def _reached(self, one: Round, name: str) -> float:
        return one.rates.floor_s(self.work[name]) / one.seconds[name]["taken_s"]

    def speed_up(self, name: str, reference: str) -> Interval:
        """How many times faster than the reference, within the round; median."""
        return self.interval(lambda r: r.seconds[reference]["taken_s"] / r.seconds[name]["taken_s"])

    def stage_share(self, name: str, stages: Iterable[str]) -> float:
        """Share of the TTFT that these stages take; median."""
        return self.median(lambda r: sum(r.seconds[name].get(s, 0.0) for s in stages) / r.seconds[name]["ttft_s"])

    def rate(self, name: str) -> float:
        """Median of one of the `Rates`."""
        return self.median(lambda r: float(getattr(r.rates, name)))

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "work": {name: asdict(work) for name, work in self.work.items()},
            "rounds": [{"rates": asdict(r.rates), "seconds": r.seconds} for r in self.rounds],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Measured:
        """What `as_json` has made."""
        return cls(
            {name: Work(**work) for name, work in data["work"].items()},
            [Round(Rates(**r["rates"]), r["seconds"]) for r in data["rounds"]],
        )


def measure(
    methods: Sequence[kr.ReuseMethod],
    run: Run,
    costs: Costs,
    meter: Meter,
    repeats: int,
    budget_s: float = float("inf"),
    note: Callable[[int], None] = lambda number: None,
) -> Measured:
    """Run all methods and the meter in ``repeats`` rounds, each round beginning at another method.

    No new round is begun that would not end within ``budget_s``, after the first. ``note(number)`` is called behind
    every round.
    """
    out, clock = Measured(), meter.clock
    begun = time.perf_counter()
    for number in range(repeats):
        shift = number % len(methods)
        seconds: dict[str, dict[str, float]] = {}
        rates = meter.measure()
        for method in [*methods[shift:], *methods[:shift]]:
            started = clock()
            result = run(method)
            taken = clock() - started
            stages = result.stages if isinstance(result, BatchPrefill) else result.trace.stages
            shown = {name: s for name, s in stages.items() if name in TTFT_STAGES}
            seconds[repr(method)] = {"ttft_s": result.ttft_s, "taken_s": taken, **shown}
            out.work.setdefault(repr(method), costs.work(result))
            del result  # its cache, before the next method makes its own
        out.rounds.append(Round(rates, seconds))
        note(number)
        spent = time.perf_counter() - begun
        if spent + spent / (number + 1) > budget_s:
            break
    return out
