"""Real run times, and what a scheduler may know of them: estimators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import xarray as xr
from scipy.stats import norm

from prism.model.pools import DurationPool

#: shortest real run time, as a share of the point estimate: where the Normal is cut off
FLOOR = 0.1
LARGEST_CV = 0.5


@dataclass(frozen=True, eq=False)
class RunTimes:
    """Real run times relative to point estimates.

    ``T = N max(1 + cv z, FLOOR)`` with z standard normal, or ``T = N Q(Phi(z))`` for a pool of relative run times with
    quantile function Q. The same z for every policy and estimator.

    Attributes
    ----------
    point : ndarray (job,)
        Point estimates N, seconds.
    cv : ndarray (job,)
        Coefficient of variation of each job.
    pool : DurationPool, optional
        Relative run times (`prism.simulate`'s step times over their mean, say); then `cv` is not used.
    """

    point: np.ndarray
    cv: np.ndarray
    pool: DurationPool | None = None

    def drawn(self, seed: int) -> np.ndarray:
        """Real run times, seconds, (job,): a pure function of seed and log.

        The cut moves the mean: by 0.01 % at cv 0.3, by 0.7 % at 0.5, beyond which a Normal is no run time.
        """
        return self._at(np.random.default_rng(seed).standard_normal(self.point.size))

    def quantile(self, q: float) -> np.ndarray:
        """Quantile of each job's run time, seconds: ``N (1 + z_q cv)``, or the pool's own."""
        return self._at(np.full(self.point.size, norm.ppf(q)))

    def beyond(self, elapsed: np.ndarray) -> np.ndarray:
        """Mean run time of jobs that have worked for `elapsed` seconds and are not done.

        For a Normal ``N + cv N phi(a) / (1 - Phi(a))`` with ``a = (elapsed / N - 1) / cv``; a pool's by its upper quantiles.
        """
        if self.pool is not None:
            return self._beyond_pool(elapsed)
        varies = self.cv > 0
        a = (elapsed[varies] / self.point[varies] - 1) / self.cv[varies]
        # the hazard of a Normal, by logarithms where the tail is thin
        hazard = np.exp(norm.logpdf(a) - norm.logsf(a))
        mean = self.point.astype(float)
        mean[varies] *= 1 + self.cv[varies] * hazard
        return np.maximum(mean, elapsed)

    def _beyond_pool(self, elapsed: np.ndarray) -> np.ndarray:
        levels = (np.arange(1000) + 0.5) / 1000
        values = np.asarray(self.pool.quantile(levels))
        relative = elapsed / self.point
        first = np.searchsorted(values, relative, side="right")
        tails = np.append(np.cumsum(values[::-1])[::-1] / np.arange(values.size, 0, -1), 0.0)
        return self.point * np.maximum(tails[first], relative)

    def _at(self, z: np.ndarray) -> np.ndarray:
        if self.pool is not None:
            return self.point * np.asarray(self.pool.quantile(norm.cdf(z)))
        return self.point * np.maximum(1 + self.cv * z, FLOOR)


def run_times(jobs: xr.Dataset, cv: float | DurationPool) -> RunTimes:
    """Run times of a log: with its own ``cv(job)`` where it has one, else with a common cv or relative pool.

    Raises
    ------
    ValueError
        A cv outside [0, `LARGEST_CV`]; a pool whose mean is not 1.
    """
    point = jobs["estimate"].values
    if isinstance(cv, DurationPool):
        if abs(cv.mean - 1) > 0.01:
            raise ValueError(f"a pool of relative run times needs mean 1, got {cv.mean:.4g}")
        return RunTimes(point, np.full(point.size, cv.cv), cv)
    own = jobs["cv"].values if "cv" in jobs else np.full(point.size, float(cv))
    if not ((own >= 0) & (own <= LARGEST_CV)).all():
        raise ValueError(
            f"cv must lie between 0 and {LARGEST_CV}, got {float(own.min()):g} to {float(own.max()):g}"
        )
    return RunTimes(point, own)


@dataclass(frozen=True, eq=False)
class Known:
    """Information that an estimator may use.

    Attributes
    ----------
    times : RunTimes
    real : ndarray (job,)
        Real run times: for an oracle only.
    """

    times: RunTimes
    real: np.ndarray


Estimate = Callable[[Known], np.ndarray]


@dataclass(frozen=True)
class Quantile:
    """Plans with a quantile of the run time.

    Examples
    --------
    >>> times = RunTimes(np.array([100.0]), np.array([0.2]))
    >>> Quantile(0.95)(Known(times, np.array([90.0]))).round(1).tolist()
    [132.9]
    """

    q: float

    def __post_init__(self) -> None:
        if not 0 < self.q < 1:
            raise ValueError(f"a quantile lies strictly between 0 and 1, got {self.q}")

    def __call__(self, known: Known) -> np.ndarray:
        return known.times.quantile(self.q)


@dataclass(frozen=True)
class Flat:
    """Plans with the point estimate times a factor: the control of every p95, which at one common cv it equals."""

    factor: float

    def __post_init__(self) -> None:
        if not 0 < self.factor < np.inf:
            raise ValueError(f"a factor is positive and finite, got {self.factor}")

    def __call__(self, known: Known) -> np.ndarray:
        return self.factor * known.times.point


def point(known: Known) -> np.ndarray:
    """Plans with the point estimate."""
    return known.times.point


def oracle(known: Known) -> np.ndarray:
    """Plans with the real run time, which nobody knows: a control."""
    return known.real


def mean_flat(known: Known) -> np.ndarray:
    """Plans with the one factor that plans as much time in all as p95 does: is it the p95, or only not to
    under-estimate?"""
    planned = known.times.quantile(0.95)
    return known.times.point * (planned.sum() / known.times.point.sum())


ESTIMATES: dict[str, Estimate] = {
    "point": point, "p50": Quantile(0.5), "p75": Quantile(0.75), "p90": Quantile(0.9), "p95": Quantile(0.95),
    "p99": Quantile(0.99), "flat": mean_flat, "oracle": oracle,
}  # fmt: skip
