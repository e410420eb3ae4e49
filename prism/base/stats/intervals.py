"""Estimators with intervals. Arrays in, numbers out; scipy does what scipy has."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

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
    return _ks_sorted(*_on_one_grid(independent(x), independent(y)))


def _on_one_grid(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both samples sorted, to nine digits: sums in another order differ in the last bit, and an atom of
    equal values must not fall apart for that."""
    scale = max(float(np.max(np.abs(x))), float(np.max(np.abs(y))))
    digits = 9 - math.ceil(math.log10(scale)) if scale > 0 else 0
    return np.sort(np.round(x, digits)), np.sort(np.round(y, digits))


def _ks_sorted(x: np.ndarray, y: np.ndarray) -> float:
    # scipy's ks_2samp computes a p-value each time, which a bootstrap pays 2000 times
    both = np.concatenate([x, y])
    below_x = np.searchsorted(x, both, side="right") / x.size
    below_y = np.searchsorted(y, both, side="right") / y.size
    return float(np.max(np.abs(below_x - below_y)))


def anderson_darling(x, y) -> float:
    """Two-sample Anderson-Darling statistic: squared gaps of the distribution functions, the more weight the
    further out.

    Eq. 7 of Scholz and Stephens (1987), ties at mid-rank. Two independent samples of one distribution show 1
    on average, and over 2.49 in one case of twenty; serially correlated ones show more.

    Examples
    --------
    >>> round(anderson_darling([1.0, 2.0, 5.0], [3.0, 4.0]), 2)
    0.74
    """
    samples = _on_one_grid(independent(x), independent(y))
    values, tied = np.unique(np.concatenate(samples), return_counts=True)
    n = int(tied.sum())
    if values.size == 1:
        return 0.0
    below = np.cumsum(tied) - tied / 2
    total = 0.0
    for own in samples:
        count = np.bincount(np.searchsorted(values, own), minlength=values.size)
        gap = n * (np.cumsum(count) - count / 2) - own.size * below
        total += float(np.sum(tied / n * gap**2 / (below * (n - below) - n * tied / 4))) / own.size
    return total * (n - 1) / n


def ks_interval(x, y, *, confidence: float = 0.95, block: int = 1) -> tuple[float, float]:
    """Confidence interval of `ks_distance`, conservative.

    ``D +- K sqrt(1 / n + 1 / m)`` with K the Kolmogorov quantile (1.358 for 95 %), cut to [0, 1]: the
    distance of two samples differs from the true one by at most the largest deviation of both
    empirical distribution functions from theirs. A percentile bootstrap would not do: resampling a
    supremum moves it up, and such an interval misses small distances nearly always.

    Parameters
    ----------
    x : array (n,)
        Independent values (draws). A single one is a constant, known exactly.
    y : array (m,)
        Values in order of time; m is replaced by `effective_size` over lags below `block`.
    block : int
        1: `y` is independent too.
    """
    x, y = independent(x), independent(y)
    k = stats.kstwobign.ppf(confidence)
    by_draws = 1 / x.size if x.size > 1 else 0.0
    half = float(k * math.sqrt(by_draws + 1 / effective_size(y, block)))
    d = ks_distance(x, y)
    return max(0.0, d - half), min(1.0, d + half)


def effective_size(x: np.ndarray, block: int) -> float:
    """Number of independent values that `x`, in order of time, is worth.

    ``n / (1 + 2 sum_{k < block} (1 - k / block) r_k)``, with the autocorrelations r_k of its ranks;
    at most n, at least 2.

    Examples
    --------
    >>> x = np.repeat(np.random.default_rng(0).normal(size=500), 4)
    >>> bool(400 < effective_size(x, 8) < 800)
    True
    """
    n = x.size
    if block <= 1 or n < 4 or np.ptp(x) == 0:
        return float(n)
    ranks = stats.rankdata(x)
    ranks = (ranks - ranks.mean()) / ranks.std()
    lags = np.arange(1, min(block, n - 1))
    r = np.array([np.mean(ranks[k:] * ranks[:-k]) for k in lags])
    inflation = 1 + 2 * float(np.sum((1 - lags / block) * r))
    return float(np.clip(n / max(inflation, 1.0), 2.0, n))


@cache
def ks_noise_floor(n: int, m: int) -> float:
    """Median KS distance between samples of sizes n and m of *one* distribution.

    What a perfect model would show, for independent values; serial correlation raises it. Where one sample
    is far larger, the exact law of the other against it; else, while a sample is small, from 2000 simulated
    pairs with a fixed seed, since the asymptotic law is 5 % too high there.

    Examples
    --------
    >>> round(ks_noise_floor(1000, 32), 2)
    0.14
    """
    if max(n, m) >= 50 * min(n, m):
        return float(stats.kstwo.ppf(0.5, max(round(n * m / (n + m)), 1)))
    if min(n, m) >= 200:
        return float(stats.kstwobign.ppf(0.5) / math.sqrt(n * m / (n + m)))
    rng = np.random.default_rng(0)
    pairs = (np.sort(rng.random(n)) for _ in range(2000))
    return float(np.median([_ks_sorted(x, np.sort(rng.random(m))) for x in pairs]))


def crps(predicted, measured) -> float:
    """Compute the continuous ranked probability score of a predictive distribution, mean over observations.

    ``mean_y E|X - y| - E|X - X'| / 2`` over measured values y, with X and X' drawn from the prediction
    (Gneiting and Raftery 2007), the second mean over pairs of different draws, so that few draws are not
    charged for being few (Ferro 2014). In units of the values; least, on average, for the true distribution;
    for a constant the mean absolute error.

    Examples
    --------
    >>> crps([1.0], [1.5, 2.5])
    1.0
    """
    x, y = np.sort(independent(predicted)), independent(measured)
    n = x.size
    below = np.searchsorted(x, y)
    total = np.concatenate([[0.0], np.cumsum(x)])
    # sum of |x - y| from sums of the values below and above
    apart = (2 * below - n) * y - 2 * total[below] + total[-1]
    spread = 2 * np.sum((2 * np.arange(1, n + 1) - n - 1) * x) / (n * max(n - 1, 1))
    return float(np.mean(apart) / n - spread / 2)


def share_interval(
    hits: np.ndarray, confidence: float = 0.95, block: int = 1
) -> tuple[float, float]:
    """Clopper-Pearson interval of a share; for dependent hits, with their `effective_size`.

    Parameters
    ----------
    hits : bool array (n,), in order of time

    Examples
    --------
    >>> [round(v, 3) for v in share_interval(np.arange(20) < 19)]
    [0.751, 0.999]
    """
    hits = np.asarray(hits, float)
    n = effective_size(hits, block)
    k = float(np.mean(hits)) * n
    tail = (1 - confidence) / 2
    low = 0.0 if k <= 0 else float(stats.beta.ppf(tail, k, n - k + 1))
    high = 1.0 if k >= n else float(stats.beta.isf(tail, k + 1, n - k))
    return low, high


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
        raise ValueError(
            f"{int(np.sum(~np.isfinite(values)))} of {values.size} values are NaN or infinite"
        )
    return values


def _probability(p: float, name: str) -> None:
    if not 0 < p < 1:
        raise ValueError(f"{name} must lie strictly between 0 and 1, got {p}")
