"""`CostProfiler`: T(alpha, beta), the seconds to prefill beta new tokens behind alpha cached ones (RAGCache, 5.1).

Measured once on the real model on a grid, interpolated bilinearly afterwards (Algorithm 1). Looking a cost up needs no
torch: a simulator reads a saved profile.
"""

from __future__ import annotations

import bisect
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvreuse.model import ReuseModel

DEFAULT_CACHED = (0, 64, 128, 256, 512, 1024)
DEFAULT_NEW = (1, 16, 64, 128, 256, 512, 1024)
_FORMAT = "kvreuse cost profile 1"


@dataclass(frozen=True)
class CostProfiler:
    """Seconds by (cached tokens, new tokens).

    ``seconds[i][j]`` is the time of ``new_tokens[j]`` tokens behind ``cached_tokens[i]``; both axes rise strictly.
    ``conditions``: what it was measured on (model fingerprint, device, threads, dtype).
    """

    cached_tokens: tuple[int, ...]
    new_tokens: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    conditions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, axis, least in (("cached_tokens", self.cached_tokens, 0), ("new_tokens", self.new_tokens, 1)):
            rises = all(a < b for a, b in pairwise(axis))
            if not axis or axis[0] < least or not rises:
                raise ValueError(f"{name}={axis}: give rising numbers of tokens from {least} up")
        shape = {len(row) for row in self.seconds}
        if len(self.seconds) != len(self.cached_tokens) or shape != {len(self.new_tokens)}:
            raise ValueError(
                f"seconds has {len(self.seconds)} rows of lengths {sorted(shape)}: the grid is "
                f"{len(self.cached_tokens)} x {len(self.new_tokens)}"
            )
        if not all(0 < s < float("inf") for row in self.seconds for s in row):
            raise ValueError("seconds must all be positive and finite")

    def __call__(self, alpha: float, beta: float) -> float:
        """T(alpha, beta) in seconds: bilinear inside the grid, the nearest edge's value outside of it."""
        return bilinear(self.cached_tokens, self.new_tokens, self.seconds, alpha, beta)

    # -- measuring --------------------------------------------------------------------------------------------------

    @classmethod
    def measure(
        cls,
        model: ReuseModel,
        cached_tokens: Sequence[int] = DEFAULT_CACHED,
        new_tokens: Sequence[int] = DEFAULT_NEW,
        repeats: int = 3,
        progress: Callable[[int, int], None] | None = None,
    ) -> CostProfiler:
        """Time the model on the whole grid, as the tree-backed prefill runs it; medians over interleaved rounds.

        Args:
            model: measured on its device, at the threads torch has now.
            cached_tokens: alpha, rising, from 0 up.
            new_tokens: beta, rising, from 1 up. The largest alpha and beta together must fit the model's context.
            repeats: timed rounds behind one of warm-up.
            progress: called with (points done, points in all).

        Raises:
            ValueError: for axes that do not rise or do not fit the model.
        """
        alphas, betas = tuple(map(int, cached_tokens)), tuple(map(int, new_tokens))
        cls(alphas, betas, tuple((1.0,) * len(betas) for _ in alphas))  # the axes' check
        if repeats < 1:
            raise ValueError(f"repeats={repeats}: measure every point at least once")
        model.check_length(alphas[-1] + betas[-1])
        model.require_supported()
        prefill = _SuffixPrefill(model, alphas[-1], betas[-1])
        points = [(a, b) for a in alphas for b in betas]
        times: dict[tuple[int, int], list[float]] = {point: [] for point in points}
        for number in range(repeats + 1):
            # Another order every round, so that a slow spell of the machine does not fall on the same points.
            shift = number * len(points) // (repeats + 1)
            for done, point in enumerate(points[shift:] + points[:shift]):
                seconds = prefill.seconds(*point)
                if number > 0:
                    times[point].append(seconds)
                if progress is not None:
                    progress(number * len(points) + done + 1, (repeats + 1) * len(points))
        rows = tuple(tuple(statistics.median(times[a, b]) for b in betas) for a in alphas)
        return cls(alphas, betas, rows, conditions(model))

    # -- files ------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, under a temporary name first."""
        path = Path(path)
        record = {
            "format": _FORMAT,
            "conditions": dict(self.conditions),
            "cached_tokens": self.cached_tokens,
            "new_tokens": self.new_tokens,
            "seconds": self.seconds,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.{time.monotonic_ns()}.tmp")
        partial.write_text(json.dumps(record, indent=1))
        partial.replace(path)

    @classmethod
    def load(cls, path: str | Path, model: ReuseModel | None = None) -> CostProfiler:
        """Read a profile; with ``model``, only if it was measured on that model, device and number of threads.

        Raises:
            ValueError: the file is no profile, or was measured on something else.
        """
        path = Path(path)
        try:
            record = json.loads(path.read_text())
            if record["format"] != _FORMAT:
                raise ValueError(f"its format is {record['format']!r}, not {_FORMAT!r}")
            profile = cls(
                tuple(record["cached_tokens"]),
                tuple(record["new_tokens"]),
                tuple(tuple(row) for row in record["seconds"]),
                record["conditions"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a usable cost profile ({error}): measure it again and save it") from error
        if model is not None:
            now = conditions(model)
            was = profile.conditions
            differs = [f"{k} {was.get(k)!r}, now {now[k]!r}" for k in now if was.get(k) != now[k]]
            if differs:
                raise ValueError(
                    f"{path} was measured on something else ({'; '.join(differs)}): costs from it would be wrong; "
                    "measure again with CostProfiler.measure(model)"
                )
        return profile

    def __repr__(self) -> str:
        return f"CostProfiler(cached_tokens={self.cached_tokens}, new_tokens={self.new_tokens})"


class _SuffixPrefill:
    """Times the prefill of new tokens behind an exact prefix, as it runs in a request: K/V put in place included."""

    def __init__(self, model: ReuseModel, max_cached: int, max_new: int) -> None:
        import torch

        from kvreuse.kv import ChunkKV, encode_chunk

        self._model = model
        count = model.config.vocab_size
        ids = torch.randint(0, count, (max_cached + max_new,), generator=torch.Generator().manual_seed(0))
        self._ids, self._nothing = ids, ids[:0]
        self._kv: ChunkKV | None = encode_chunk(model, ids[:0], ids[:max_cached]) if max_cached else None

    def seconds(self, alpha: int, beta: int) -> float:
        """One prefill of ``beta`` tokens behind ``alpha``."""
        from kvreuse.blend.fusor import Fusor
        from kvreuse.blend.plan import Segment
        from kvreuse.kv import ChunkKV
        from kvreuse.prompt import RagPrompt
        from kvreuse.timing import StageTimer

        ids = self._ids[: alpha + beta]
        timer = StageTimer(self._model.device)
        if alpha == 0:
            self._model.prefill(ids)
        else:
            assert self._kv is not None
            keys, values = (tuple(t[:, :, :alpha] for t in side) for side in (self._kv.keys, self._kv.values))
            held = Segment(ids[:alpha], 0, self._nothing, 0, True, stored=ChunkKV(ids[:alpha], 0, keys, values))
            Fusor().prefill(self._model, RagPrompt([], [ids[:alpha]], ids[alpha:]), [held], timer)
        timer.mark("rest")
        return sum(timer.stages.values())


def conditions(model: ReuseModel) -> dict[str, str]:
    """What decides a profile's times: the model by content, its type, the device by name, torch's threads."""
    import torch

    device = model.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "model": model.fingerprint(),
        "dtype": str(model.dtype),
        "device": name,
        "threads": str(torch.get_num_threads()) if device.type == "cpu" else "any",
    }


def bilinear(
    rows: tuple[int, ...], columns: tuple[int, ...], values: tuple[tuple[float, ...], ...], row: float, column: float
) -> float:
    """The value between four grid points, ``values[i][j]`` at ``(rows[i], columns[j])``; clamped to the grid."""
    i, u = _locate(rows, row)
    j, v = _locate(columns, column)

    def along(j: int) -> float:
        value = values[i][j]
        return value if u == 0.0 else value + u * (values[i + 1][j] - value)

    low = along(j)
    return low if v == 0.0 else low + v * (along(j + 1) - low)


def _locate(axis: tuple[int, ...], value: float) -> tuple[int, float]:
    """The grid point at or below a value, and how far on the way to the next one it is, in [0, 1); clamped."""
    if value <= axis[0]:
        return 0, 0.0
    if value >= axis[-1]:
        return len(axis) - 1, 0.0
    i = bisect.bisect_right(axis, value) - 1
    return i, (value - axis[i]) / (axis[i + 1] - axis[i])
