"""How the recompute ratio falls from layer to layer: gradual filtering (CacheBlend, 4.3)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constant:
    """The same ratio on every layer: one check layer, as in the released code."""

    def ratio(self, ratio: float, step: int, steps: int) -> float:
        """Fraction of the reused tokens recomputed on the ``step``-th of ``steps`` selecting layers."""
        return ratio


@dataclass(frozen=True)
class Gradual:
    """Ratios fall linearly from ``(1 + spread) r`` to ``(1 - spread) r``; their average is ``r``.

    The paper says r1 > r > r2 > ... and publishes no numbers; this is our reading. Near r = 1 the spread shrinks so
    that no ratio passes 1, and r = 1 stays exact.
    """

    spread: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.spread <= 1:
            raise ValueError(f"spread={self.spread}: give a fraction in [0, 1]")

    def ratio(self, ratio: float, step: int, steps: int) -> float:
        """Fraction of the reused tokens recomputed on the ``step``-th of ``steps`` selecting layers."""
        room = min(self.spread * ratio, 1 - ratio)
        return ratio + room * (1 - 2 * step / max(1, steps - 1)) if steps > 1 else ratio


Schedule = Constant | Gradual
SCHEDULES: dict[str, Schedule] = {"constant": Constant(), "gradual": Gradual()}


def parse_schedule(schedule: str | Schedule) -> Schedule:
    """A schedule from its name ("constant", "gradual"), or itself."""
    if isinstance(schedule, str):
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule={schedule!r}: choose one of {', '.join(SCHEDULES)}, or a schedule object")
        return SCHEDULES[schedule]
    if not isinstance(schedule, Constant | Gradual):
        raise TypeError(f"schedule={schedule!r}: choose one of {', '.join(SCHEDULES)}, or a schedule object")
    return schedule
