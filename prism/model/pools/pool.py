"""Duration distributions: the leaves and the wrappers.

A pool is a frozen value with one essential method, `quantile`; everything else follows from it.
scipy supplies moments; the engine reads a pool as a table (`lower`).
"""

from __future__ import annotations

import abc
from dataclasses import astuple, dataclass, replace
from typing import ClassVar

import numpy as np
from scipy import stats

from prism.base.schema import finite_durations
from prism.model.pools import mixtures

#: probability of a negative duration above which a Normal is refused
NEGATIVE_MASS = 1e-6


class DurationPool(abc.ABC):
    """Distribution of the duration of one operation, in seconds, on [0, inf)."""

    @abc.abstractmethod
    def quantile(self, q: float | np.ndarray) -> np.ndarray:
        """Quantile function. `q` (...) in [0, 1]; returns (...), seconds."""

    def upper_quantile(self, v: float | np.ndarray) -> np.ndarray:
        """Quantile at 1 - `v`, seconds (...); leaves keep its precision where v is tiny."""
        return self.quantile(1.0 - np.asarray(v))

    @property
    @abc.abstractmethod
    def mean(self) -> float:
        """Mean, seconds."""

    @property
    @abc.abstractmethod
    def std(self) -> float:
        """Standard deviation of the distribution (not of a sample), seconds."""

    @property
    def cv(self) -> float:
        """Coefficient of variation, std / mean; 0 for a pool that is always 0."""
        return self.std / self.mean if self.mean > 0 else 0.0


@dataclass(frozen=True)
class Empirical(DurationPool):
    """The samples themselves, each equally likely.

    `quantile` is the inverse of the empirical distribution function, so mean and standard
    deviation are exactly those of the samples (with n, not n - 1) and nothing outside their
    range can be drawn: for tails beyond the data fit a family.

    Parameters
    ----------
    samples : sequence of float (n,), seconds, in any order

    Raises
    ------
    ValueError
        If there is no sample or one is NaN, infinite or negative.

    Examples
    --------
    >>> pool = Empirical((0.3, 0.1, 0.2, 0.2))
    >>> float(pool.quantile(0.5)), round(pool.mean, 3)
    (0.2, 0.2)
    """

    samples: tuple[float, ...]
    family: ClassVar[str] = "empirical"

    def __post_init__(self) -> None:
        if len(self.samples) == 0:
            raise ValueError("an Empirical pool needs at least one sample, none given")
        x = finite_durations(self.samples, "an Empirical pool")
        object.__setattr__(self, "samples", tuple(np.sort(x).tolist()))

    def quantile(self, q: float | np.ndarray) -> np.ndarray:
        n = len(self.samples)
        # a product that is whole but for rounding is whole
        index = np.ceil(np.asarray(q, float) * n - 1e-9).astype(int) - 1
        return np.asarray(self.samples)[np.clip(index, 0, n - 1)]

    @property
    def mean(self) -> float:
        return float(np.mean(self.samples))

    @property
    def std(self) -> float:
        return float(np.std(self.samples))


class Parametric(DurationPool):
    """A family of scipy; leaves say which by `frozen`."""

    family: ClassVar[str]
    scipy_family: ClassVar[stats.rv_continuous]

    @property
    @abc.abstractmethod
    def frozen(self):
        """The frozen scipy distribution."""

    def quantile(self, q: float | np.ndarray) -> np.ndarray:
        return self.frozen.ppf(q)

    def upper_quantile(self, v: float | np.ndarray) -> np.ndarray:
        return self.frozen.isf(v)

    @property
    def mean(self) -> float:
        return float(self.frozen.mean())

    @property
    def std(self) -> float:
        return float(self.frozen.std())


@dataclass(frozen=True)
class LogNormal(Parametric):
    """``exp(mu + sigma Z)``; `mu` and `sigma` belong to the logarithm (of seconds).

    ``cv = sqrt(exp(sigma^2) - 1)``. Raises `ValueError` unless both are finite and sigma > 0.

    Examples
    --------
    >>> round(LogNormal(mu=0.0, sigma=0.2).cv, 6)
    0.202017
    """

    mu: float
    sigma: float
    family: ClassVar[str] = "lognormal"
    scipy_family: ClassVar[stats.rv_continuous] = stats.lognorm

    def __post_init__(self) -> None:
        _require(np.isfinite(self.mu) and 0 < self.sigma < np.inf, self, "sigma > 0")

    @property
    def frozen(self):
        return stats.lognorm(s=self.sigma, scale=np.exp(self.mu))

    @classmethod
    def from_moments(cls, mean: float, cv: float) -> LogNormal:
        """The LogNormal with this mean (seconds) and coefficient of variation.

        Examples
        --------
        >>> pool = LogNormal.from_moments(mean=2.0, cv=0.3)
        >>> round(pool.mean, 12), round(pool.cv, 12)
        (2.0, 0.3)
        """
        sigma2 = np.log1p(cv**2)
        return cls(float(np.log(mean) - sigma2 / 2), float(np.sqrt(sigma2)))


@dataclass(frozen=True)
class Normal(Parametric):
    """Normal with mean `mu` and standard deviation `sigma`, seconds.

    Durations are not negative: a Normal with more than `NEGATIVE_MASS` below zero is refused
    rather than cut off in silence, since cutting moves the mean.

    Examples
    --------
    >>> Normal(mu=1.0, sigma=0.5)
    Traceback (most recent call last):
        ...
    ValueError: Normal(mu=1.0, sigma=0.5) puts 2.3 % of its mass below zero; use LogNormal or Gamma
    """

    mu: float
    sigma: float
    family: ClassVar[str] = "normal"
    scipy_family: ClassVar[stats.rv_continuous] = stats.norm

    def __post_init__(self) -> None:
        _require(np.isfinite(self.mu) and 0 < self.sigma < np.inf, self, "sigma > 0")
        below = stats.norm.cdf(0.0, self.mu, self.sigma)
        if below > NEGATIVE_MASS:
            raise ValueError(
                f"{self!r} puts {100 * below:.2g} % of its mass below zero; use LogNormal or Gamma"
            )

    @property
    def frozen(self):
        return stats.norm(self.mu, self.sigma)


@dataclass(frozen=True)
class Gamma(Parametric):
    """Gamma with `shape` and `scale` (seconds); mean = shape * scale, cv = shape^-1/2.

    Examples
    --------
    >>> Gamma(shape=4.0, scale=0.5).cv
    0.5
    """

    shape: float
    scale: float
    family: ClassVar[str] = "gamma"
    scipy_family: ClassVar[stats.rv_continuous] = stats.gamma

    def __post_init__(self) -> None:
        _require(
            0 < self.shape < np.inf and 0 < self.scale < np.inf, self, "shape > 0 and scale > 0"
        )

    @property
    def frozen(self):
        return stats.gamma(self.shape, scale=self.scale)


@dataclass(frozen=True)
class Bimodal(Parametric):
    """Two LogNormals: fast and slow devices, or two states of a link. Share `weight` has the first.

    Examples
    --------
    >>> pool = Bimodal(mu1=0.0, sigma1=0.01, mu2=0.1, sigma2=0.01, weight=0.8)
    >>> [round(float(pool.quantile(q)), 3) for q in (0.4, 0.9)]
    [1.0, 1.105]
    """

    mu1: float
    sigma1: float
    mu2: float
    sigma2: float
    weight: float
    family: ClassVar[str] = "bimodal"

    def __post_init__(self) -> None:
        finite = np.all(np.isfinite([self.mu1, self.mu2, self.sigma1, self.sigma2]))
        ok = finite and self.sigma1 > 0 and self.sigma2 > 0 and 0 < self.weight < 1
        _require(bool(ok), self, "sigmas > 0 and a weight in (0, 1)")

    @property
    def frozen(self):
        return mixtures.TwoModes(*astuple(self))


@dataclass(frozen=True)
class HeavyTail(Parametric):
    """LogNormal up to `threshold` (s), generalised Pareto beyond it with probability `tail`: collectives
    between nodes, whose tail is heavier than the body suggests. `shape` < 1/2, so that a variance exists.

    Examples
    --------
    >>> pool = HeavyTail(mu=0.0, sigma=0.1, threshold=1.2, tail=0.05, shape=0.3, scale=0.5)
    >>> round(float(pool.quantile(0.999)), 2)
    4.92
    """

    mu: float
    sigma: float
    threshold: float
    tail: float
    shape: float
    scale: float
    family: ClassVar[str] = "heavy_tail"

    def __post_init__(self) -> None:
        finite = np.all(np.isfinite(astuple(self)))
        ok = (
            finite
            and self.sigma > 0
            and self.scale > 0
            and 0 < self.tail < 1
            and self.threshold > 0
        )
        _require(bool(ok) and self.shape < 0.5, self, "0 < tail < 1, shape < 1/2, others > 0")

    @property
    def frozen(self):
        return mixtures.HeavyTail(*astuple(self))


@dataclass(frozen=True)
class Fixed(DurationPool):
    """Always `value` seconds. What a frozen pool becomes."""

    value: float
    family: ClassVar[str] = "fixed"

    def __post_init__(self) -> None:
        finite_durations([self.value], "a Fixed pool")

    def quantile(self, q: float | np.ndarray) -> np.ndarray:
        return np.full(np.shape(q), self.value)

    @property
    def mean(self) -> float:
        return self.value

    @property
    def std(self) -> float:
        return 0.0


@dataclass(frozen=True)
class Scaled(DurationPool):
    """`pool` times `factor` >= 0: a slower device, another size. The cv stays.

    Examples
    --------
    >>> Scaled(Fixed(0.2), 1.5).mean
    0.30000000000000004
    """

    pool: DurationPool
    factor: float

    def __post_init__(self) -> None:
        _require(0 <= self.factor < np.inf, self, "a factor >= 0")

    def quantile(self, q: float | np.ndarray) -> np.ndarray:
        return self.factor * self.pool.quantile(q)

    @property
    def mean(self) -> float:
        return self.factor * self.pool.mean

    @property
    def std(self) -> float:
        return self.factor * self.pool.std


@dataclass(frozen=True)
class Shifted(DurationPool):
    """`pool` plus `by` seconds. The standard deviation stays. Raises if it could go negative."""

    pool: DurationPool
    by: float

    def __post_init__(self) -> None:
        # a Normal alone may have a negligible mass below zero; the others begin where they begin
        lowest = float(self.pool.quantile(0.0))
        lowest = (
            lowest if np.isfinite(lowest) else max(0.0, float(self.pool.quantile(NEGATIVE_MASS)))
        )
        _require(np.isfinite(self.by) and lowest + self.by >= 0, self, "support >= 0")

    def quantile(self, q: float | np.ndarray) -> np.ndarray:
        return self.pool.quantile(q) + self.by

    @property
    def mean(self) -> float:
        return self.pool.mean + self.by

    @property
    def std(self) -> float:
        return self.pool.std


@dataclass(frozen=True)
class MaxOf(DurationPool):
    """The longest of `n` independent draws of `pool`: n alike ranks that meet in one barrier.

    ``Q(q) = Q_pool(q^(1/n))``, exact. Mean and standard deviation by quadrature over the quantiles.

    Examples
    --------
    >>> round(float(MaxOf(Normal(1.0, 0.05), 64).quantile(0.95)), 4)
    1.1578
    """

    pool: DurationPool
    n: int

    def __post_init__(self) -> None:
        _require(self.n == int(self.n) and self.n >= 1, self, "a whole n >= 1")

    def quantile(self, q: float | np.ndarray) -> np.ndarray:
        return self.pool.quantile(np.asarray(q, float) ** (1 / self.n))

    def upper_quantile(self, v: float | np.ndarray) -> np.ndarray:
        # 1 - (1 - v)^(1/n) without cancellation
        return self.pool.upper_quantile(-np.expm1(np.log1p(-np.asarray(v, float)) / self.n))

    def _moment(self, k: int) -> float:
        # in the logarithm of the tail probability, where a heavy tail is no spike
        log_v = np.linspace(np.log(1e-280), np.log(0.5), 20_000)
        v = np.exp(log_v)
        both = np.maximum(self.quantile(v), 0.0) ** k + self.upper_quantile(v) ** k
        return float(np.trapezoid(both * v, log_v))

    @property
    def mean(self) -> float:
        return self._moment(1)

    @property
    def std(self) -> float:
        return float(np.sqrt(max(0.0, self._moment(2) - self._moment(1) ** 2)))


FAMILIES: dict[str, type[Parametric]] = {
    c.family: c for c in (LogNormal, Normal, Gamma, Bimodal, HeavyTail)
}


@dataclass(frozen=True)
class Lowered:
    """A pool as the engine reads it: ``shift + scale * Q_base(u^(1 / largest_of))``.

    `base` identifies the table, so that pools which differ in scale alone share one.
    """

    base: DurationPool
    scale: float
    shift: float
    largest_of: int = 1


def lower(pool: DurationPool) -> Lowered:
    """Peel wrappers off a pool until a table remains; constants become scale 0.

    Examples
    --------
    >>> lower(Scaled(Shifted(Fixed(1.0), 0.5), 2.0))
    Lowered(base=Fixed(value=1.0), scale=0.0, shift=3.0, largest_of=1)
    """
    if isinstance(pool, Fixed):
        return Lowered(pool, 0.0, pool.value)
    if isinstance(pool, Scaled):
        inner = lower(pool.pool)
        return replace(inner, scale=inner.scale * pool.factor, shift=inner.shift * pool.factor)
    if isinstance(pool, Shifted):
        inner = lower(pool.pool)
        return replace(inner, shift=inner.shift + pool.by)
    if isinstance(pool, MaxOf):
        inner = lower(pool.pool)
        return replace(inner, largest_of=inner.largest_of * int(pool.n))
    return Lowered(pool, 1.0, 0.0)


def _require(ok: bool, pool: DurationPool, what: str) -> None:
    if not ok:
        raise ValueError(f"{pool!r}: needs finite parameters with {what}")
