"""What takes how long in a simulated server: seconds of prefills, decode steps, moved K/V and searches.

`MeasuredCosts` is what `cost_profiling.measure_costs` has found on a machine; `published.py` derives the like for the
hardware of RAGCache's evaluation.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from kvreuse.ragcache.profiler import CostProfiler, bilinear

_FORMAT = "kvreuse serving costs 2"
_SAME = ("model", "dtype", "device", "threads")  # conditions under which a mean makes sense


class CostModel(Protocol):
    """Seconds of everything a simulated server does."""

    @property
    def name(self) -> str:
        """For labels: what was measured, or whose published hardware it stands for."""
        ...

    @property
    def bytes_per_token(self) -> int:
        """Size of one token's K/V."""
        ...

    @property
    def search_stage_s(self) -> tuple[float, ...]:
        """Seconds of each stage of a search, the embedding of the question in the first."""
        ...

    @property
    def contended_search(self) -> float:
        """How many times as long a search takes beside one of the model's iterations; 1 where they share nothing."""
        ...

    @property
    def contention_s(self) -> float:
        """What a search adds to the iterations that it runs beside."""
        ...

    def prefill_s(self, cached_tokens: int, new_tokens: int) -> float:
        """T(alpha, beta): the computation alone."""
        ...

    def prefill_overhead_s(self, num_rows: int) -> float:
        """What a prefill iteration takes besides, its sequence joining a batch of ``num_rows``."""
        ...

    def step_s(self, num_rows: int, longest: int, total: int) -> float:
        """A decode step, overhead included; ``longest``, ``total``: tokens in K/V, of the longest row and of all."""
        ...

    def move_s(self, kept: int, to_gpu: int, to_host: int) -> float:
        """Bytes kept from a prefill, copied from host to GPU, and from GPU to host."""
        ...


@runtime_checkable
class Bounded(Protocol):
    """A cost model that holds up to some numbers of tokens only."""

    def check(self, cached_tokens: int, new_tokens: int, length: int, num_rows: int) -> None:
        """Raise ValueError if a prefill or a decode step can be larger than what is known.

        ``cached_tokens``, ``new_tokens``: the most of a prefill; ``length``, ``num_rows``: of a decode step, 0 if there
        is none.
        """
        ...


@dataclass(frozen=True)
class StepTable:
    """Seconds of a decode step, ``seconds[i][j]`` of ``num_rows[i]`` rows with ``lengths[j]`` tokens each."""

    num_rows: tuple[int, ...]
    lengths: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        for name, axis in (("num_rows", self.num_rows), ("lengths", self.lengths)):
            if not axis or axis[0] < 1 or not all(a < b for a, b in pairwise(axis)):
                raise ValueError(f"{name}={axis}: give rising numbers from 1 up")
        if len(self.seconds) != len(self.num_rows) or {len(row) for row in self.seconds} != {len(self.lengths)}:
            raise ValueError(f"seconds is not a grid of {len(self.num_rows)} x {len(self.lengths)}")
        if not all(0 < s < float("inf") for row in self.seconds for s in row):
            raise ValueError("seconds must all be positive and finite")

    def __call__(self, num_rows: int, length: float) -> float:
        """Bilinear inside the grid, the nearest edge's value outside of it."""
        return bilinear(self.num_rows, self.lengths, self.seconds, num_rows, length)


@dataclass(frozen=True)
class MeasuredCosts:
    """A server's costs as measured on one machine.

    Args:
        prefill: T(alpha, beta).
        step: decode steps, computation alone.
        prefill_overheads_s: of a prefill iteration beside the computation and moved K/V, by the rows of the batch that
            the sequence joins (the last value for more): decisions, the copy of its K/V into the batch.
        step_overhead_s: of a decode step.
        search_stage_s: of each stage of a search, the question's embedding in the first.
        keep_s_per_byte: cutting K/V out of a prefill; ``to_gpu_s_per_byte``, ``to_host_s_per_byte``: copies.
        bytes_per_token: of K/V.
        contended_search: how many times as long a search takes beside one of the model's iterations.
        contention_s: what a search adds to the iterations that it runs beside.
        conditions: what it was measured on.
    """

    prefill: CostProfiler
    step: StepTable
    prefill_overheads_s: tuple[float, ...]
    step_overhead_s: float
    search_stage_s: tuple[float, ...]
    keep_s_per_byte: float
    to_gpu_s_per_byte: float
    to_host_s_per_byte: float
    bytes_per_token: int
    contended_search: float = 1.0
    contention_s: float = 0.0
    conditions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.prefill_overheads_s or not self.search_stage_s:
            raise ValueError("prefill_overheads_s and search_stage_s need at least one value")
        rates = (self.keep_s_per_byte, self.to_gpu_s_per_byte, self.to_host_s_per_byte)
        overheads = (*self.prefill_overheads_s, self.step_overhead_s, self.contention_s)
        if min(*overheads, *self.search_stage_s, *rates) < 0:
            raise ValueError("seconds must not be negative")
        if not self.contended_search > 0:
            raise ValueError(f"contended_search={self.contended_search}: give a factor above 0")

    @property
    def name(self) -> str:
        """The device and threads it was measured on."""
        return f"measured on {self.conditions.get('device', '?')}, threads: {self.conditions.get('threads', '?')}"

    def prefill_s(self, cached_tokens: int, new_tokens: int) -> float:
        """T(alpha, beta)."""
        return self.prefill(cached_tokens, new_tokens)

    def prefill_overhead_s(self, num_rows: int) -> float:
        """By the rows of the batch."""
        return self.prefill_overheads_s[min(num_rows, len(self.prefill_overheads_s) - 1)]

    def step_s(self, num_rows: int, longest: int, total: int) -> float:
        """All rows run over the columns of the longest."""
        return self.step_overhead_s + self.step(num_rows, longest)

    def move_s(self, kept: int, to_gpu: int, to_host: int) -> float:
        """By bytes."""
        copied = to_gpu * self.to_gpu_s_per_byte + to_host * self.to_host_s_per_byte
        return kept * self.keep_s_per_byte + copied

    def check(self, cached_tokens: int, new_tokens: int, length: int, num_rows: int) -> None:
        """Look-ups beyond a grid give its edge's value: good enough to rank documents by, wrong for a clock."""
        for what, value, axis, argument in (
            ("cached tokens", cached_tokens, self.prefill.cached_tokens, "cached_tokens"),
            ("new tokens in a prefill", new_tokens, self.prefill.new_tokens, "new_tokens"),
            ("tokens in a decoding sequence", length, self.step.lengths, "lengths"),
            ("sequences that decode together", num_rows, self.step.num_rows, "max_batch"),
        ):
            if value > axis[-1]:
                raise ValueError(
                    f"up to {value:,} {what}, but costs were measured up to {axis[-1]:,}: "
                    f"measure them again, measure_costs(..., {argument}=) with {value} or more"
                )

    @classmethod
    def mean(cls, profiles: Sequence[MeasuredCosts]) -> MeasuredCosts:
        """Number by number, of profiles over the same grids: before and after a run, as a machine's speed drifts.

        Raises:
            ValueError: they are of different grids, models or machines, or there are none.
        """
        grids = {(p.prefill.cached_tokens, p.prefill.new_tokens, p.step.num_rows, p.step.lengths) for p in profiles}
        if len(grids) != 1:
            raise ValueError(f"{len(profiles)} profiles over {len(grids)} different grids: they have no mean")
        fields: list[tuple[str, set[Any]]] = [
            ("bytes_per_token", {p.bytes_per_token for p in profiles}),
            ("number of prefill_overheads_s", {len(p.prefill_overheads_s) for p in profiles}),
            ("number of search_stage_s", {len(p.search_stage_s) for p in profiles}),
            *((f"conditions[{key!r}]", {p.conditions.get(key) for p in profiles}) for key in _SAME),
        ]
        for name, values in fields:
            if len(values) > 1:
                raise ValueError(f"profiles differ in {name}, {', '.join(sorted(map(str, values)))}: no mean")
        found: MeasuredCosts = cls.from_record(mean_of([profile.record() for profile in profiles]))
        return found

    # -- files --------------------------------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        """As JSON values."""
        return {"format": _FORMAT, **asdict(self), "conditions": dict(self.conditions)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> MeasuredCosts:
        """From `record`, through JSON or not.

        Raises:
            ValueError: it is something else.
        """
        try:
            values = dict(record)
            if values.pop("format") != _FORMAT:
                raise ValueError(f"its format is {record['format']!r}, not {_FORMAT!r}")
            prefill, step = values.pop("prefill"), values.pop("step")
            return cls(
                prefill=CostProfiler(**{k: frozen(v) for k, v in prefill.items()}),
                step=StepTable(**{k: frozen(v) for k, v in step.items()}),
                **{k: frozen(v) for k, v in values.items()},
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"no usable serving costs ({error}): measure them again") from error

    def save(self, path: str | Path) -> None:
        """Write as JSON, under a temporary name first."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.{time.monotonic_ns()}.tmp")
        partial.write_text(json.dumps(self.record(), indent=1))
        partial.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> MeasuredCosts:
        """Read what `save` wrote; ValueError naming the file if it is something else."""
        try:
            return cls.from_record(json.loads(Path(path).read_text()))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def mean_of(values: Sequence[Any]) -> Any:
    """Of floats; lists and mappings part by part; of all else, which is equal, the first."""
    first = values[0]
    if isinstance(first, float):
        return statistics.fmean(values)
    if isinstance(first, Mapping):
        return {key: mean_of([value[key] for value in values]) for key in first}
    if isinstance(first, list | tuple):
        return [mean_of(parts) for parts in zip(*values, strict=True)]
    return first


def frozen(value: Any) -> Any:
    """Lists to tuples, all the way down."""
    return tuple(frozen(v) for v in value) if isinstance(value, list | tuple) else value
