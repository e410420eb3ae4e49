"""Estimators with intervals. Arrays in, numbers out; scipy does what scipy has."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy import stats


def min_draws(q: float = 0.95, *, confidence: float = 0.95) -> int:
    """Fewest independent draws that bound quantile `q` from above with this confidence.

    The largest of n draws is below the quantile with probability ``q^n``; so
    ``n >= log(1 - confidence) / log(q)`` (Wilks 1941).

    Examples
    --------
    >>> min_draws(0.95, confidence=0.95)
    59
    """
    _probability(q, "q")
    _probability(confidence, "confidence")
    return math.ceil(math.log1p(-confidence) / math.log(q))


def guarantee(step_time, q: float = 0.95, confidence: float = 0.95) -> float:
    """Upper confidence bound on a quantile: the guarantee.

    The smallest order statistic ``x_(k)`` with ``P(x_(k) >= Q_q) >= confidence``, that is the
    smallest k with ``P(Binomial(n, q) <= k - 1) >= confidence``. Valid for any continuous
    distribution. It covers the error of simulating finitely often; it does not cover errors in
    the pools or in the graph.

    Parameters
    ----------
    step_time : DataArray (draw) or array (n,), seconds
        Independent draws. Several draws of one job are dependent and are refused.
    q, confidence : float in (0, 1)

    Returns
    -------
    float, seconds

    Raises
    ------
    ValueError
        With fewer than `min_draws` values, or values that are dependent, NaN or infinite.

    Examples
    --------
    >>> guarantee(np.arange(1.0, 60.0))
    59.0
    """
    x = independent(step_time)
    need = min_draws(q, confidence=confidence)
    if x.size < need:
        raise ValueError(
            f"a {confidence:.0%} bound on the {q:.0%} quantile needs {need} draws, got {x.size}; "
            f"simulate at least {need}"
        )
    k = int(stats.binom.ppf(confidence, x.size, q)) + 1
    return float(np.partition(x, k - 1)[k - 1])


def quantile_interval(x, q: float, confidence: float = 0.95) -> tuple[float, float]:
    """Two-sided interval of a quantile from order statistics.

    `scipy.stats.quantile_test(...).confidence_interval`; an end that so few values cannot bound
    is NaN.

    Examples
    --------
    >>> tuple(round(v) for v in quantile_interval(np.arange(1000.0), 0.5))
    (468, 531)
    """
    x = independent(x)
    ci = stats.quantile_test(x, q=float(np.quantile(x, q)), p=q).confidence_interval(confidence)
    return float(ci.low), float(ci.high)


def mean_interval(x, confidence: float = 0.95) -> tuple[float, float, float]:
    """Mean and its Student t interval; all equal where the values do not differ.

    Examples
    --------
    >>> [round(v, 3) for v in mean_interval([1.0, 2.0, 3.0])]
    [2.0, -0.484, 4.484]
    """
    x = independent(x)
    mean = float(np.mean(x))
    if x.size < 2:
        return mean, math.nan, math.nan
    half = stats.t.ppf((1 + confidence) / 2, x.size - 1) * np.std(x, ddof=1) / math.sqrt(x.size)
    return mean, float(mean - half), float(mean + half)


def ks_distance(x, y) -> float:
    """Kolmogorov-Smirnov distance: the largest gap between two empirical distribution functions.

    Examples
    --------
    >>> ks_distance([1.0, 2.0], [3.0, 4.0])
    1.0
    """
    return _ks_sorted(np.sort(independent(x)), np.sort(independent(y)))


def _ks_sorted(x: np.ndarray, y: np.ndarray) -> float:
    # scipy's ks_2samp computes a p-value each time, which a bootstrap pays 2000 times
    both = np.concatenate([x, y])
    below_x = np.searchsorted(x, both, side="right") / x.size
    below_y = np.searchsorted(y, both, side="right") / y.size
    return float(np.max(np.abs(below_x - below_y)))


def ks_interval(
    x, y, *, confidence: float = 0.95, resamples: int = 2000, block: int = 1, seed: int = 0
) -> tuple[float, float]:
    """Bootstrap percentile interval of `ks_distance`, both samples resampled.

    The distance is a maximum, so its bootstrap distribution lies a little above the estimate
    where the true distance is near 0: read it with `ks_noise_floor` beside it.

    Parameters
    ----------
    block : int
        Length of the blocks of consecutive values of `y` that stay together (measured steps are
        serially correlated); `x`, simulated, is resampled singly.
    """
    x, y = independent(x), independent(y)
    rng = np.random.default_rng(seed)
    distances = np.empty(resamples)
    for r in range(resamples):
        xs = x[rng.integers(0, x.size, x.size)]
        ys = y[block_indices(rng, y.size, block)]
        distances[r] = _ks_sorted(np.sort(xs), np.sort(ys))
    tail = (1 - confidence) / 2
    return float(np.quantile(distances, tail)), float(np.quantile(distances, 1 - tail))


def ks_noise_floor(n: int, m: int, *, q: float = 0.5) -> float:
    """Quantile `q` of the KS distance between samples of sizes n and m of *one* distribution.

    What a perfect model would show. Asymptotic (Kolmogorov), for independent values; serial
    correlation raises it.

    Examples
    --------
    >>> round(ks_noise_floor(1000, 32), 3)
    0.149
    """
    return float(stats.kstwobign.ppf(q) / math.sqrt(n * m / (n + m)))


def block_indices(rng: np.random.Generator, n: int, block: int) -> np.ndarray:
    """Indices of a circular block bootstrap resample of n values (Politis and Romano 1992)."""
    if block <= 1:
        return rng.integers(0, n, n)
    starts = rng.integers(0, n, -(-n // block))
    return ((starts[:, None] + np.arange(block)) % n).ravel()[:n]


def p95(x: np.ndarray, axis: int = -1) -> np.ndarray:
    """The 0.95 quantile, linear interpolation."""
    return np.quantile(x, 0.95, axis=axis)


def increase(
    changed,
    reference,
    statistic: Callable[..., np.ndarray] = p95,
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float, float]:
    """Relative increase of a statistic between two runs with common random numbers.

    ``statistic(changed) / statistic(reference) - 1`` with a bootstrap percentile interval that
    resamples *pairs*: draw d of both runs used the same random numbers, and resampling them
    together keeps what they share out of the interval.

    Parameters
    ----------
    changed, reference : arrays (draw,), seconds, paired by draw
    statistic : callable (array, axis=) -> array

    Returns
    -------
    estimate, lower, upper : float, dimensionless

    Examples
    --------
    >>> x = np.random.default_rng(0).normal(1.0, 0.1, 500)
    >>> [round(v, 12) for v in increase(1.2 * x, x)]
    [0.2, 0.2, 0.2]
    """
    a, b = independent(changed), independent(reference)
    if a.size != b.size:
        raise ValueError(f"paired runs need as many draws each, got {a.size} and {b.size}")
    rng = np.random.default_rng(seed)
    ratios = np.empty(resamples)
    for r in range(resamples):
        pick = rng.integers(0, a.size, a.size)
        ratios[r] = statistic(a[pick], axis=-1) / statistic(b[pick], axis=-1) - 1
    tail = (1 - confidence) / 2
    estimate = float(statistic(a, axis=-1) / statistic(b, axis=-1) - 1)
    return estimate, float(np.quantile(ratios, tail)), float(np.quantile(ratios, 1 - tail))


def independent(x) -> np.ndarray:
    """Values as a float64 vector, refused where they cannot be independent draws."""
    dims = getattr(x, "dims", ())
    if "job" in dims and "draw" in dims:
        raise ValueError(
            "several draws of one job are dependent: this estimate needs one draw per job "
            "(x.isel(draw=0)) or an estimate within each job"
        )
    values = np.asarray(x, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"needs a vector of at least one value, got shape {values.shape}")
    if not np.all(np.isfinite(values)):
        raise ValueError(f"{int(np.sum(~np.isfinite(values)))} values are NaN or infinite")
    return values


def _probability(p: float, name: str) -> None:
    if not 0 < p < 1:
        raise ValueError(f"{name} must lie strictly between 0 and 1, got {p}")
