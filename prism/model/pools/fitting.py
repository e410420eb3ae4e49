"""Fit a family to samples by maximum likelihood, and say how well it fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass

import numpy as np
import xarray as xr
from scipy import stats

from prism.base import schema
from prism.base.schema import finite_durations
from prism.model.pools import (
    FAMILIES,
    Bimodal,
    DurationPool,
    Empirical,
    Gamma,
    HeavyTail,
    LogNormal,
    Normal,
    Parametric,
    mixtures,
)


@dataclass(frozen=True)
class Fit:
    """A fitted pool and how well it fits.

    Attributes
    ----------
    pool : DurationPool
    family : str
    count : int
        Number of samples.
    aic : float
        Akaike's information criterion, 2 k - 2 log L; NaN for an empirical pool.
    ks, ad : float
        Kolmogorov-Smirnov distance and Anderson-Darling statistic of samples against the pool.
    ks_pvalue, ad_pvalue : float
        From a parametric bootstrap that fits anew each time, since tables for known parameters
        are far too generous once parameters come from the same data. NaN where not asked for.
    """

    pool: DurationPool
    family: str
    count: int
    aic: float = np.nan
    ks: float = 0.0
    ad: float = np.nan
    ks_pvalue: float = np.nan
    ad_pvalue: float = np.nan


def fit(
    samples: Sequence[float] | np.ndarray,
    family: str = "best",
    *,
    bootstrap: int = 0,
    seed: int = 0,
) -> Fit:
    """Fit a duration pool by maximum likelihood and say how well it fits.

    Parameters
    ----------
    samples : (n,), seconds
    family : {"best", "empirical", "lognormal", "normal", "gamma", "bimodal", "heavy_tail"}
        ``best`` takes the family with the least AIC among those that the data allow.
    bootstrap : int
        Resamples for the p-values (0: none; `scipy.stats.goodness_of_fit`).
    seed : int
        Seed of that bootstrap.

    Returns
    -------
    Fit

    Raises
    ------
    ValueError
        Unknown family; NaN, infinite or negative samples; fewer than 3 samples or no spread
        for a parametric family, 30 for bimodal, 100 for heavy_tail; zeros for all but Normal.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.random.default_rng(0).lognormal(-2.0, 0.3, 2000)
    >>> f = fit(x, "lognormal")
    >>> round(f.pool.mu, 1), round(f.pool.sigma, 1)
    (-2.0, 0.3)
    """
    x = finite_durations(samples, "samples to fit").ravel()
    if family == "empirical":
        return Fit(Empirical(tuple(x)), family, x.size)
    if family != "best" and family not in FAMILIES:
        known = ", ".join(("best", "empirical", *FAMILIES))
        raise ValueError(f"unknown family {family!r}; one of {known}")
    if x.size < 3 or np.ptp(x) == 0:
        raise ValueError(
            f"a parametric family needs at least 3 samples with some spread, got {x.size} "
            f"between {x.min(initial=np.inf):.6g} and {x.max(initial=-np.inf):.6g} s; "
            "use family='empirical'"
        )
    if family != "best":
        return _fit_one(x, family, bootstrap, seed)
    fits, refusals = [], []
    for name in FAMILIES:
        try:
            fits.append(_fit_one(x, name, 0, seed))
        except ValueError as refusal:
            refusals.append(str(refusal))
    if not fits:
        raise ValueError("no family fits: " + "; ".join(refusals))
    best = min(fits, key=lambda f: f.aic)
    return _fit_one(x, best.family, bootstrap, seed) if bootstrap else best


def fit_families(
    samples: Sequence[float] | np.ndarray, *, bootstrap: int = 0, seed: int = 0
) -> dict[str, Fit]:
    """`fit` of every family that the samples allow, by name, least AIC first."""
    fits = {}
    for family in FAMILIES:
        try:
            fits[family] = fit(samples, family, bootstrap=bootstrap, seed=seed)
        except ValueError:
            continue
    if not fits:
        fit(samples, "best")  # raises, and says why each family was refused
    return dict(sorted(fits.items(), key=lambda item: item[1].aic))


def fits_dataset(fits: Mapping[str, Fit], *, source: str) -> xr.Dataset:
    """Goodness of fit of several fits along `scenario`: statistics, p-values, AIC, counts."""
    columns = {
        "aic": "aic", "ks_distance": "ks", "ks_pvalue": "ks_pvalue", "ad_statistic": "ad",
        "ad_pvalue": "ad_pvalue", "count": "count",
    }  # fmt: skip
    return schema.dataset(
        {
            name: ("scenario", [getattr(f, field) for f in fits.values()])
            for name, field in columns.items()
        },
        coords={"scenario": list(fits)},
        made_by="prism.model.pools.fits_dataset",
        source=source,
    )


def _fit_one(x: np.ndarray, family: str, bootstrap: int, seed: int) -> Fit:
    pool = _ESTIMATORS[family](x)
    with np.errstate(divide="ignore"):
        log_likelihood = float(np.sum(pool.frozen.logpdf(x)))
        distance = _anderson_darling(x, pool)
    if not (np.isfinite(log_likelihood) and np.isfinite(distance)):
        raise ValueError(f"{family}: a sample lies on the edge of its support; use another family")
    ks_pvalue, ad_pvalue = _bootstrap_pvalues(x, pool, bootstrap, seed)
    return Fit(
        pool,
        family,
        x.size,
        aic=2.0 * len(astuple(pool)) - 2.0 * log_likelihood,
        ks=float(stats.kstest(x, pool.frozen.cdf).statistic),
        ad=distance,
        ks_pvalue=ks_pvalue,
        ad_pvalue=ad_pvalue,
    )


def _anderson_darling(x: np.ndarray, pool: Parametric) -> float:
    """A^2 = -n - sum (2i - 1)/n (log F(x_i) + log(1 - F(x_{n+1-i}))), Anderson-Darling 1954."""
    x = np.sort(x)
    weight = (2 * np.arange(1, x.size + 1) - 1) / x.size
    with np.errstate(divide="ignore"):
        logs = pool.frozen.logcdf(x) + pool.frozen.logsf(x)[::-1]
    return float(-x.size - np.sum(weight * logs))


def _bootstrap_pvalues(x: np.ndarray, pool: Parametric, n: int, seed: int) -> tuple[float, float]:
    """P-values of the KS distance and of the Anderson-Darling statistic."""
    if n == 0:
        return np.nan, np.nan
    if pool.family in OWN_FAMILIES:
        return _own_bootstrap_pvalues(x, pool, n, seed)
    known = {} if pool.family == "normal" else {"loc": 0.0}
    ks, ad = (
        stats.goodness_of_fit(
            pool.scipy_family,
            x,
            known_params=known,
            statistic=statistic,
            n_mc_samples=n,
            rng=np.random.default_rng(seed),
        ).pvalue
        for statistic in ("ks", "ad")
    )
    return float(ks), float(ad)


def _own_bootstrap_pvalues(
    x: np.ndarray, pool: Parametric, n: int, seed: int
) -> tuple[float, float]:
    """The same for families that scipy does not have: draw, fit anew, compare."""
    rng = np.random.default_rng(seed)

    def distances(sample: np.ndarray, fitted: Parametric) -> np.ndarray:
        ks = stats.kstest(sample, fitted.frozen.cdf).statistic
        return np.array([ks, _anderson_darling(sample, fitted)])

    seen, larger = distances(x, pool), np.ones(2)
    for _ in range(n):
        sample = pool.quantile(rng.random(x.size))
        try:
            larger += distances(sample, _ESTIMATORS[pool.family](sample)) >= seen
        except ValueError:  # a resample that does not show the family: it fits worse, then
            larger += 1
    ks, ad = larger / (n + 1)
    return float(ks), float(ad)


def _positive(x: np.ndarray, family: str) -> np.ndarray:
    if np.any(x <= 0):
        raise ValueError(
            f"{family} needs samples > 0, {int(np.sum(x <= 0))} of {x.size} are 0; "
            "use family='empirical'"
        )
    return x


def _fit_lognormal(x: np.ndarray) -> LogNormal:
    log = np.log(_positive(x, "lognormal"))
    return LogNormal(float(log.mean()), float(log.std()))


def _fit_normal(x: np.ndarray) -> Normal:
    return Normal(float(x.mean()), float(x.std()))


def _fit_gamma(x: np.ndarray) -> Gamma:
    try:
        shape, _, scale = stats.gamma.fit(_positive(x, "gamma"), floc=0)
    except (RuntimeError, ValueError) as fault:
        raise ValueError(f"gamma: {' '.join(str(fault).split())}; use another family") from fault
    return Gamma(float(shape), float(scale))


_ESTIMATORS: dict[str, Callable[[np.ndarray], Parametric]] = {
    "lognormal": _fit_lognormal,
    "normal": _fit_normal,
    "gamma": _fit_gamma,
    "bimodal": lambda x: Bimodal(*astuple(mixtures.fit_two_modes(_positive(x, "bimodal")))),
    "heavy_tail": lambda x: HeavyTail(
        *astuple(mixtures.fit_heavy_tail(_positive(x, "heavy_tail")))
    ),
}
OWN_FAMILIES = ("bimodal", "heavy_tail")
