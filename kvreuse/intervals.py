"""How sure we are of a mean: 95% percentile bootstraps over cases, paired where two methods saw the same cases."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Values = Sequence[float] | Tensor  # one value per case


def gap_recovered(kl_method: float | Values, kl_full_reuse: float | Values) -> float:
    """Share of full reuse's divergence that a method removes: 1 - sum(kl_method) / sum(kl_full_reuse).

    1 is as good as full recompute, 0 no better than full reuse, below 0 worse. NaN if full reuse has no
    divergence at all: then there is no gap to recover.

    Args:
        kl_method: KL divergence to full recompute, one value or one per case.
        kl_full_reuse: the same of full reuse, for the same cases.

    Raises:
        ValueError: the lengths differ, there is no case, or a value is negative or not finite.
    """
    method, reuse = _paired_kl(kl_method, kl_full_reuse)
    return float(_gap(method, reuse))


def _gap(method: Tensor, reuse: Tensor) -> Tensor:
    """Gap recovered along the last dimension; both hold cases there."""
    whole = reuse.sum(dim=-1)
    return torch.where(whole > 0, 1 - method.sum(dim=-1) / whole, math.nan)


@dataclass(frozen=True)
class Interval:
    """A statistic (a mean, unless said otherwise) and the bounds of its bootstrap interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self:.3f}"

    def __format__(self, spec: str) -> str:
        """The statistic and its bounds, each by ``spec``: ``f"{found:.2f}"`` is "0.91 [0.87, 0.96]"."""
        return f"{self.mean:{spec}} [{self.low:{spec}}, {self.high:{spec}}]" if spec else str(self)


def bootstrap_interval(
    values: Values,
    statistic: Callable[[Tensor], float] | None = None,
    samples: int = 2000,
    seed: int = 0,
) -> Interval:
    """95% percentile bootstrap over cases; the same values and seed give the same interval.

    Args:
        values: one value per case.
        statistic: from a 1-D fp64 tensor of values to a number; the mean if None.

    Raises:
        ValueError: there is no value, one is not finite, or `samples` is less than 1.
    """
    cases = _as_cases(values, "values")
    drawn = cases[_resamples(len(cases), samples, seed)]
    if statistic is None:
        return _interval(float(cases.mean()), drawn.mean(dim=-1))
    statistics = torch.tensor([float(statistic(row)) for row in drawn], dtype=torch.float64)
    return _interval(float(statistic(cases)), statistics)


def paired_interval(a: Values, b: Values, samples: int = 2000, seed: int = 0) -> Interval:
    """Interval of the mean of a - b, where a[i] and b[i] are of the same case and are resampled together.

    Raises:
        ValueError: the lengths differ, there is no case, or a value is not finite.
    """
    first, second = _paired(a, b, ("a", "b"))
    return bootstrap_interval(first - second, samples=samples, seed=seed)


def gap_recovered_interval(kl_method: Values, kl_full_reuse: Values, samples: int = 2000, seed: int = 0) -> Interval:
    """`gap_recovered` with its interval: a case's two values are resampled together, the ratio is of sums.

    All NaN if full reuse has no divergence at all. Raises like `gap_recovered`.
    """
    method, reuse = _paired_kl(kl_method, kl_full_reuse)
    drawn = _resamples(len(method), samples, seed)
    return _interval(float(_gap(method, reuse)), _gap(method[drawn], reuse[drawn]))


def _interval(value: float, statistics: Tensor) -> Interval:
    bounds = torch.nanquantile(statistics, torch.tensor([0.025, 0.975], dtype=torch.float64))
    return Interval(value, *bounds.tolist())


def _resamples(cases: int, samples: int, seed: int) -> Tensor:
    """[samples, cases] indices drawn with replacement."""
    if samples < 1:
        raise ValueError(f"samples={samples}: draw at least one resample")
    return torch.randint(cases, (samples, cases), generator=torch.Generator().manual_seed(seed))


def _paired_kl(kl_method: float | Values, kl_full_reuse: float | Values) -> tuple[Tensor, Tensor]:
    names = ("kl_method", "kl_full_reuse")
    pair = _paired(kl_method, kl_full_reuse, names)
    for values, name in zip(pair, names, strict=True):
        if bool((values < 0).any()):
            raise ValueError(f"{name} has a negative value, {float(values.min())}: a KL divergence has none")
    return pair


def _paired(a: float | Values, b: float | Values, names: tuple[str, str]) -> tuple[Tensor, Tensor]:
    first, second = _as_cases(a, names[0]), _as_cases(b, names[1])
    if len(first) != len(second):
        raise ValueError(f"{names[0]} has {len(first)} values, {names[1]} {len(second)}: give the same cases")
    return first, second


def _as_cases(values: float | Values, name: str) -> Tensor:
    cases = torch.as_tensor(values, dtype=torch.float64).cpu().reshape(-1)
    if len(cases) == 0:
        raise ValueError(f"{name} is empty: give one value per case")
    bad = int((~cases.isfinite()).sum())
    if bad:
        raise ValueError(f"{name} has {bad} values that are NaN or infinite: leave those cases out")
    return cases
