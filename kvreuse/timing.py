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

    def _now(self, wait: bool = True) -> float:
        if wait and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif wait and self.device.type == "mps":
            torch.mps.synchronize()
        return time.perf_counter()

    def mark(self, name: str, wait: bool = True) -> None:
        """Charge the time since the last mark to stage ``name``.

        ``wait=False`` does not wait for the device: for marks inside a pass, where waiting would undo the overlap. What
        the device still does then is charged to a later stage.
        """
        now = self._now(wait)
        self.stages[name] = self.stages.get(name, 0.0) + now - self._last
        self._last = now
