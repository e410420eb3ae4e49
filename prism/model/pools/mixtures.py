"""Distributions for what fleets and collectives show and scipy has no family for: two modes, and tails
that are heavier than the body lets expect. Frozen, with the methods of scipy's that pools use.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import optimize, stats

BISECTIONS = 60


@dataclass(frozen=True)
class TwoModes:
    """Mixture of two LogNormals: ``w LN(mu1, sigma1) + (1 - w) LN(mu2, sigma2)``."""

    mu1: float
    sigma1: float
    mu2: float
    sigma2: float
    weight: float

    @cached_property
    def _parts(self):
        one = stats.lognorm(self.sigma1, scale=np.exp(self.mu1))
        two = stats.lognorm(self.sigma2, scale=np.exp(self.mu2))
        return ((self.weight, one), (1 - self.weight, two))

    def _mixed(self, method: str, x):
        return sum(w * getattr(d, method)(x) for w, d in self._parts)

    def cdf(self, x):
        return self._mixed("cdf", x)

    def sf(self, x):
        return self._mixed("sf", x)

    def logcdf(self, x):
        return np.log(self.cdf(x))

    def logsf(self, x):
        return np.log(self.sf(x))

    def logpdf(self, x):
        return np.log(self._mixed("pdf", x))

    def ppf(self, q):
        return self._invert(np.asarray(q, float), "ppf", self.cdf, rising=True)

    def isf(self, v):
        return self._invert(np.asarray(v, float), "isf", self.sf, rising=False)

    def _invert(self, p: np.ndarray, inverse: str, function, rising: bool) -> np.ndarray:
        """Bisection between the quantiles of the parts, where the mixture's must lie; in logs."""
        ends = np.array([getattr(d, inverse)(p) for _, d in self._parts])
        with np.errstate(divide="ignore"):
            low, high = np.log(ends.min(axis=0)), np.log(ends.max(axis=0))
        inner = np.isfinite(low) & np.isfinite(high)
        low, high = np.where(inner, low, 0.0), np.where(inner, high, 0.0)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            below = (function(np.exp(middle)) < p) == rising
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        return np.where(inner, np.exp((low + high) / 2), ends[0])

    def mean(self) -> float:
        return float(sum(w * d.mean() for w, d in self._parts))

    def std(self) -> float:
        second = sum(w * (d.var() + d.mean() ** 2) for w, d in self._parts)
        return float(np.sqrt(second - self.mean() ** 2))


@dataclass(frozen=True)
class HeavyTail:
    """LogNormal body up to `threshold`, generalised Pareto beyond it with probability `tail`.

    ``F(x) = (1 - tail) B(x) / B(threshold)`` below, ``1 - tail (1 + shape (x - threshold) /
    scale)^(-1 / shape)`` above (peaks over threshold, Pickands 1975).
    """

    mu: float
    sigma: float
    threshold: float
    tail: float
    shape: float
    scale: float

    @cached_property
    def _body(self):
        return stats.lognorm(self.sigma, scale=np.exp(self.mu))

    @cached_property
    def _beyond(self):
        return stats.genpareto(self.shape, loc=self.threshold, scale=self.scale)

    @cached_property
    def _share(self) -> float:
        return (1 - self.tail) / float(self._body.cdf(self.threshold))

    def cdf(self, x):
        x = np.asarray(x, float)
        return np.where(
            x <= self.threshold, self._share * self._body.cdf(x), 1 - self.tail * self._beyond.sf(x)
        )

    def sf(self, x):
        x = np.asarray(x, float)
        return np.where(
            x <= self.threshold, 1 - self._share * self._body.cdf(x), self.tail * self._beyond.sf(x)
        )

    def logcdf(self, x):
        return np.log(self.cdf(x))

    def logsf(self, x):
        return np.log(self.sf(x))

    def logpdf(self, x):
        x = np.asarray(x, float)
        return np.where(
            x <= self.threshold,
            np.log(self._share) + self._body.logpdf(x),
            np.log(self.tail) + self._beyond.logpdf(np.maximum(x, self.threshold)),
        )

    def ppf(self, q):
        q = np.asarray(q, float)
        body = np.minimum(self._body.ppf(np.minimum(q / self._share, 1.0)), self.threshold)
        return np.where(
            q <= 1 - self.tail, body, self._beyond.isf(np.minimum((1 - q) / self.tail, 1.0))
        )

    def isf(self, v):
        v = np.asarray(v, float)
        body = np.minimum(self._body.ppf(np.minimum((1 - v) / self._share, 1.0)), self.threshold)
        return np.where(v >= self.tail, body, self._beyond.isf(np.minimum(v / self.tail, 1.0)))

    def _moment(self, k: int) -> float:
        cut = (np.log(self.threshold) - self.mu) / self.sigma
        below = np.exp(k * self.mu + (k * self.sigma) ** 2 / 2) * stats.norm.cdf(
            cut - k * self.sigma
        )
        return self._share * float(below) + self.tail * float(self._beyond.moment(k))

    def mean(self) -> float:
        return self._moment(1)

    def std(self) -> float:
        return float(np.sqrt(self._moment(2) - self._moment(1) ** 2))


def fit_two_modes(x: np.ndarray, iterations: int = 80) -> TwoModes:
    """Maximum likelihood by expectation-maximisation on the logarithms, begun at the best split.

    Raises
    ------
    ValueError
        With fewer than 30 samples, or where one of the modes vanishes.
    """
    if x.size < 30:
        raise ValueError(f"bimodal needs at least 30 samples, got {x.size}")
    y = np.sort(np.log(x))
    first = y < _best_split(y)
    r = np.where(first, 0.95, 0.05)
    least = 1e-3 * y.std()
    for _ in range(iterations):
        parts = []
        for weight in (r, 1 - r):
            total = weight.sum()
            mu = float(weight @ y / total)
            parts.append(
                (total / y.size, mu, max(float(np.sqrt(weight @ (y - mu) ** 2 / total)), least))
            )
        density = [w * stats.norm.pdf(y, mu, sigma) for w, mu, sigma in parts]
        r = density[0] / np.maximum(density[0] + density[1], 1e-300)
        if not 0.01 < r.mean() < 0.99:
            raise ValueError("bimodal: there is only one mode; use another family")
    (w, mu1, sigma1), (_, mu2, sigma2) = parts
    return TwoModes(mu1, sigma1, mu2, sigma2, w)


def _best_split(y: np.ndarray) -> float:
    """The cut of sorted values that leaves the least variance within its two sides (Otsu 1979)."""
    n = np.arange(1, y.size)
    left = np.cumsum(y)[:-1]
    between = (left / n - (y.sum() - left) / (y.size - n)) ** 2 * n * (y.size - n)
    return float(y[int(np.argmax(between)) + 1])


def fit_heavy_tail(x: np.ndarray, tail: float = 0.1) -> HeavyTail:
    """Threshold at the quantile ``1 - tail``; body and tail each by maximum likelihood.

    Raises
    ------
    ValueError
        With fewer than 100 samples, ties that leave no tail, or a tail without a variance (shape of 1/2
        or more), whose mean and spread no sample of this size can tell.
    """
    if x.size < 100:
        raise ValueError(f"heavy_tail needs at least 100 samples, got {x.size}")
    threshold = float(np.quantile(x, 1 - tail))
    above = x[x > threshold] - threshold
    if above.size < 8 or np.ptp(above) == 0:
        raise ValueError("heavy_tail: too few distinct samples beyond the threshold")
    shape, _, scale = stats.genpareto.fit(above, floc=0)
    if shape >= 0.5:
        raise ValueError(
            f"heavy_tail: a tail of shape {shape:.2f} has no variance; use 'empirical'"
        )
    y, cut = np.log(x[x <= threshold]), np.log(threshold)

    def loss(p):
        sigma = np.exp(p[1])
        return -np.sum(stats.norm.logpdf(y, p[0], sigma)) + y.size * stats.norm.logcdf(
            cut, p[0], sigma
        )

    found = optimize.minimize(loss, (y.mean(), np.log(y.std() + 1e-12)), method="Nelder-Mead")
    share = above.size / x.size
    reached = stats.norm.cdf(cut, found.x[0], np.exp(found.x[1]))
    if not (found.success and reached > 0.05):
        raise ValueError("heavy_tail: what lies below the threshold is no body of a LogNormal")
    return HeavyTail(
        float(found.x[0]), float(np.exp(found.x[1])), threshold, share, float(shape), float(scale)
    )
