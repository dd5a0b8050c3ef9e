"""How the recompute ratio falls from layer to layer: gradual filtering (CacheBlend, 4.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Constant:
    """The same ratio on every layer: one check layer, as in the released code."""

    from_layer_0: ClassVar[bool] = False

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
    from_layer_0: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 <= self.spread <= 1:
            raise ValueError(f"spread={self.spread}: give a fraction in [0, 1]")

    def ratio(self, ratio: float, step: int, steps: int) -> float:
        """Fraction of the reused tokens recomputed on the ``step``-th of ``steps`` selecting layers."""
        room = min(self.spread * ratio, 1 - ratio)
        return ratio + room * (1 - 2 * step / max(1, steps - 1)) if steps > 1 else ratio


@dataclass(frozen=True)
class Narrowing:
    """From ``start * r`` on layer 0 down to the last layer; the average over all layers is ``r``.

    The excess over the last layer's ratio falls as ``(1 - depth) ** power``: linear at 1, and then it ends at
    ``(2 - start) r``. Near r = 1 the differences shrink so that no ratio passes 1, and r = 1 stays exact.
    """

    start: float = 1.8
    power: float = 1.0
    from_layer_0: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.power <= 0:
            raise ValueError(f"power={self.power}: give a number above 0")
        if not 1 <= self.start <= 1 + self.power:
            raise ValueError(
                f"start={self.start}: give a number from 1 to 1 + power = {1 + self.power:g}; beyond it the last "
                "layers would have less than no tokens"
            )

    def ratio(self, ratio: float, step: int, steps: int) -> float:
        """Fraction of the reused tokens recomputed on the ``step``-th of ``steps`` layers."""
        if steps <= 1 or self.start == 1:
            return ratio
        fall = [(1 - i / (steps - 1)) ** self.power for i in range(steps)]
        mean = sum(fall) / steps
        # Deviation from the average, scaled to be `start - 1` at the top; below it is at least -1 as long as start
        # is at most 1 / mean, which for few layers is less than 1 + power.
        top = min(self.start, 1 / mean) - 1
        room = min(ratio * top, 1 - ratio)
        return ratio + room * (fall[step] - mean) / (1 - mean)


Schedule = Constant | Gradual | Narrowing
SCHEDULES: dict[str, Schedule] = {"constant": Constant(), "gradual": Gradual()}


def layer_ratio(schedule: Schedule, ratio: float, layer: int, num_layers: int) -> float:
    """The ratio on one layer. A schedule that does not start at layer 0 has there what it has on layer 1."""
    if schedule.from_layer_0:
        return schedule.ratio(ratio, layer, num_layers)
    return schedule.ratio(ratio, max(0, layer - 1), num_layers - 1)


def parse_schedule(schedule: str | Schedule) -> Schedule:
    """A schedule from its name ("constant", "gradual"), or itself."""
    if isinstance(schedule, str):
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule={schedule!r}: choose one of {', '.join(SCHEDULES)}, or a schedule object")
        return SCHEDULES[schedule]
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule={schedule!r}: choose one of {', '.join(SCHEDULES)}, or a schedule object")
    return schedule
