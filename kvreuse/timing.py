"""A stage timer that waits for the device, so that each stage is charged what it cost."""

from __future__ import annotations

import time

import torch


class StageTimer:
    """Splits one request into named stages, in seconds.

    ``mark(name)`` ends the stage that runs since the last mark.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stages: dict[str, float] = {}
        self._last = self._now()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()
        return time.perf_counter()

    def mark(self, name: str) -> None:
        """Charge the time since the last mark to stage ``name``."""
        now = self._now()
        self.stages[name] = self.stages.get(name, 0.0) + now - self._last
        self._last = now
