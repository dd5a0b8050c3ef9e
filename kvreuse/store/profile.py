"""What was measured offline: seconds of the model by prompt length and recompute ratio, and the speed of devices."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from itertools import pairwise
from typing import Any, TypeVar

T = TypeVar("T", bound="ModelProfile | DeviceProfile")


@dataclass(frozen=True)
class Work:
    """What one request asks for: tokens of the prompt, of its question, and of those exact or not stored.

    Exact tokens (the prefix, and the first chunk encoded behind it) stand first and are not recomputed.
    """

    num_tokens: int
    num_question: int
    num_exact: int = 0
    num_missing: int = 0

    def __post_init__(self) -> None:
        inside = self.num_question + self.num_exact + self.num_missing
        if self.num_question < 1 or self.num_exact < 0 or self.num_missing < 0 or inside > self.num_tokens:
            raise ValueError(f"{self}: a prompt has at least a token of question, and its parts are not longer than it")

    @property
    def num_reused(self) -> int:
        """Stored and not exact: the recompute ratio's denominator."""
        return self.num_tokens - self.num_question - self.num_exact - self.num_missing

    @property
    def num_stored(self) -> int:
        """Tokens whose K/V are loaded."""
        return self.num_reused + self.num_exact


@dataclass(frozen=True)
class ModelProfile:
    """Seconds of one model on one machine, K/V in memory.

    Args:
        model, fingerprint, device, dtype, threads: what was measured; a profile is of no use to anything else.
        num_layers: L.
        token_bytes: bytes of one token's K/V as they are stored, all layers.
        num_question: tokens of the question in the prompts that were measured.
        lengths: prompt lengths in tokens, ascending [n].
        ratios: recompute ratios, ascending, above 0 [m].
        prefill_s: full prefill [n].
        reuse_s: TTFT of full reuse [n]: K/V put in place, the question through all layers.
        first_s: what selection costs [n]: layer 0 on all tokens and the check layer's projection.
        blend_s: TTFT of CacheBlend [m][n].
    """

    model: str
    fingerprint: str
    device: str
    dtype: str
    threads: int
    num_layers: int
    token_bytes: float
    num_question: int
    lengths: tuple[int, ...]
    ratios: tuple[float, ...]
    prefill_s: tuple[float, ...]
    reuse_s: tuple[float, ...]
    first_s: tuple[float, ...]
    blend_s: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        check_grid("lengths", self.lengths)
        check_grid("ratios", self.ratios)
        if self.ratios[-1] > 1:
            raise ValueError(f"ratios={self.ratios}: a recompute ratio is a fraction in (0, 1]")
        curves = {"prefill_s": self.prefill_s, "reuse_s": self.reuse_s, "first_s": self.first_s}
        curves |= {f"blend_s[{i}]": row for i, row in enumerate(self.blend_s)}
        for name, curve in curves.items():
            if len(curve) != len(self.lengths) or not all(s > 0 and math.isfinite(s) for s in curve):
                raise ValueError(f"{name}={curve}: give a time above 0 for each of {len(self.lengths)} lengths")
        if len(self.blend_s) != len(self.ratios):
            raise ValueError(f"blend_s has {len(self.blend_s)} rows for {len(self.ratios)} ratios")
        if not self.token_bytes > 0 or self.num_layers < 1 or self.num_question < 1:
            raise ValueError("token_bytes, num_layers and num_question must be above 0")

    def prefill(self, length: float) -> float:
        """Seconds of a full prefill of ``length`` tokens."""
        return per_token(length, self.lengths, self.prefill_s)

    def first(self, work: Work) -> float:
        """Seconds of layer 0 and the check: on all tokens behind the exact ones, which they see all the same."""
        first = [per_token(n, self.lengths, self.first_s) for n in (work.num_tokens, work.num_exact)]
        return max(0.0, first[0] - first[1])

    def blend(self, work: Work, ratio: float) -> float:
        """TTFT from memory in seconds: what is reused put in place, then a ``ratio`` of it recomputed.

        Tokens of a longer question, and those that are not stored, are recomputed on every layer besides.
        """
        reuse = max(0.0, interpolate(work.num_tokens, self.lengths, self.reuse_s))
        rows = ratio * work.num_reused + work.num_missing + work.num_question - self.num_question
        share = max(0.0, rows / max(1, work.num_tokens - work.num_exact - self.num_question))
        behind = [self._behind(n, share) for n in (work.num_tokens, work.num_exact)]
        first = self.first(work) if ratio > 0 and work.num_reused else 0.0
        return reuse + first + max(0.0, behind[0] - behind[1])

    def _behind(self, length: float, ratio: float) -> float:
        """What recomputing a ratio of ``length`` tokens costs on the layers behind the check."""
        costs = [0.0]
        for row in self.blend_s:
            extra = [max(0.0, b - r - f) for b, r, f in zip(row, self.reuse_s, self.first_s, strict=True)]
            costs.append(per_token(length, self.lengths, extra))
        return max(0.0, interpolate(ratio, (0.0, *self.ratios), costs))


@dataclass(frozen=True)
class DeviceProfile:
    """One storage device as it was measured, cold.

    ``bytes_per_s``: of reads of one layer of one chunk, with the device's reader threads. ``open_s``: to find and open
    a chunk. ``throttle_bytes_per_s``: it was braked, to stand for a slower device. ``in_memory``: main memory, from
    which loading is part of what the model's own profile holds. ``slows``: recompute beside its reader threads takes so
    many times as long as from memory (1: readers cost it nothing).
    """

    name: str
    bytes_per_s: float
    open_s: float = 0.0
    price_per_gb_month: float = 0.0
    throttle_bytes_per_s: float | None = None
    in_memory: bool = False
    slows: float = 1.0

    def __post_init__(self) -> None:
        if not (self.bytes_per_s > 0 and math.isfinite(self.bytes_per_s)):
            raise ValueError(f"bytes_per_s={self.bytes_per_s!r} of {self.name!r}: give a rate above 0")
        if not self.open_s >= 0 or not self.price_per_gb_month >= 0:
            raise ValueError(f"{self!r}: times and prices are 0 or more")
        if not (self.slows >= 1 and math.isfinite(self.slows)):
            raise ValueError(f"slows={self.slows!r} of {self.name!r}: readers make recompute no faster; give 1 or more")

    @property
    def label(self) -> str:
        """Name, speed, and whether it was throttled."""
        how = ["throttled"] * (self.throttle_bytes_per_s is not None)
        return f"{self.name} ({', '.join([*how, f'measured {self.bytes_per_s * 8 / 1e9:.3g} Gbps'])})"


def interpolate(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Linear between the points, and on along the outer pieces; constant if there is one point."""
    if len(xs) == 1:
        return ys[0]
    i = min(max(bisect_right(xs, x), 1), len(xs) - 1)
    share = (x - xs[i - 1]) / (xs[i] - xs[i - 1])
    return ys[i - 1] + share * (ys[i] - ys[i - 1])


def per_token(length: float, lengths: Sequence[float], seconds: Sequence[float]) -> float:
    """Seconds at ``length``, with seconds per token linear between the points: exact for a n + b n^2, as attention is.

    Below the first point seconds per token stay as they are.
    """
    if length <= 0:
        return 0.0
    rates = [s / n for s, n in zip(seconds, lengths, strict=True)]
    return length * max(0.0, interpolate(max(length, lengths[0]), lengths, rates))


def check_grid(name: str, points: Sequence[float]) -> None:
    """Raise unless the points are above 0 and ascending."""
    if not points or not points[0] > 0 or any(b <= a for a, b in pairwise(points)):
        raise ValueError(f"{name}={tuple(points)}: give one or more numbers above 0, in ascending order")


def to_json(profile: ModelProfile | DeviceProfile) -> dict[str, Any]:
    """JSON values of a profile."""
    return asdict(profile)


def from_json(kind: type[T], data: Any) -> T:
    """A profile from `to_json`'s values; raises ValueError for anything else."""
    names = {f.name for f in fields(kind)}
    needed = {f.name for f in fields(kind) if f.default is MISSING}
    if not isinstance(data, dict) or not needed <= set(data) <= names:
        raise ValueError(f"a {kind.__name__} has the fields {', '.join(sorted(names))}")
    return kind(**{name: _frozen(value) for name, value in data.items()})


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, Iterable) and not isinstance(value, str) else value
