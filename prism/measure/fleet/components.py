"""Variance components, outlying devices and correlations of a fleet."""

from __future__ import annotations

import numpy as np
import xarray as xr
from scipy import stats

from prism.base import schema
from prism.base.stats.random_effects import Components, variance_components

#: what a duration may go with
FIELDS = ("clock_sm", "power", "temperature")
#: lags of the autocorrelation
LAGS = 10
#: devices, or runs of one, below which nothing is said
LEAST = 3


def characterise(
    fleet: xr.Dataset, *, confidence: float = 0.95, resamples: int = 1000, seed: int = 0
) -> xr.Dataset:
    """Components of variability, the device in the middle, and those that stand out, per kernel.

    Durations are taken relative to the median over devices of their median. ``x_gt = 1 + a_g + e_gt``, and where machines
    are known ``a_g = n_m + d_g``: between machines, and between devices of one. The device in the middle (whose
    median is nearest to the fleet's, among those with the most runs) shows what varies in time, as in the PRISM paper's
    N = 1000 runs of the p50 GPU.

    Parameters
    ----------
    fleet : Dataset of `read_fleet`
    confidence : float
    resamples, seed : int
        Of the bootstrap over blocks of the middle device's runs.

    Returns
    -------
    Dataset
        Per `signature` ``spatial_component`` and ``temporal_component`` (standard deviations, dimensionless), with
        intervals (`prism.base.stats.variance_components`), ``node_component`` between machines; ``outlier(signature,
        gpu)``: 1 slow, -1 fast by Tukey's fences (1.5 interquartile ranges beyond the quartiles of device medians), 0
        within, NaN where not measured; coordinate ``middle``, and of that device ``middle_cv`` with interval (block bootstrap),
        ``middle_spread`` (max - min) / median, ``middle_runs`` and ``autocorrelation(signature, lag)``. NaN where too few devices
        or runs are there.
    """
    rows = [_character(d, fleet, confidence, resamples, seed) for d in fleet["duration"].values]
    data: dict[str, tuple] = {}
    for name, shape in {
        "spatial_component": (), "spatial_component_interval": ("ci_bound",), "temporal_component": (),
        "temporal_component_interval": ("ci_bound",), "node_component": (), "node_component_interval": ("ci_bound",),
        "middle_cv": (), "middle_cv_interval": ("ci_bound",), "middle_spread": (), "middle_runs": (),
        "autocorrelation": ("lag",), "outlier": ("gpu",),
    }.items():  # fmt: skip
        data[name] = (("signature", *shape), np.array([r[name] for r in rows], float))
    return schema.dataset(
        data,
        coords={
            "signature": fleet["signature"].values,
            "gpu": fleet["gpu"].values,
            "lag": np.arange(1, LAGS + 1),
            "middle": ("signature", [r["middle"] for r in rows]),
            "ci_bound": ["lower", "upper"],
        },
        made_by="prism.measure.fleet.characterise",
        source=fleet.attrs["source"],
        seed=seed,
        provenance={**schema.provenance(fleet), "confidence": confidence},
    )


def _character(
    duration: np.ndarray, fleet: xr.Dataset, confidence: float, resamples: int, seed: int
) -> dict:
    runs = np.isfinite(duration).sum(axis=1)
    ran = runs > 0
    median = np.full(runs.size, np.nan)
    median[ran] = np.nanmedian(duration[ran], axis=1)
    relative = duration / np.nanmedian(median)
    both = _components(relative, confidence)
    nodes = _components(_by_node(median / np.nanmedian(median), fleet), confidence)
    low, high = np.nanquantile(median, [0.25, 0.75])
    fence = 1.5 * (high - low)
    outlier = np.where(median > high + fence, 1.0, np.where(median < low - fence, -1.0, 0.0))
    most = runs >= max(LEAST, np.quantile(runs[ran], 0.5))
    away = np.where(most if most.any() else ran, np.abs(median - np.nanmedian(median)), np.inf)
    middle = int(np.argmin(away))
    x = duration[middle][np.isfinite(duration[middle])]
    cv, cv_interval = _temporal(x, confidence, resamples, seed)
    return {
        "spatial_component": both.between,
        "spatial_component_interval": both.between_interval,
        "temporal_component": both.within,
        "temporal_component_interval": both.within_interval,
        "node_component": nodes.between,
        "node_component_interval": nodes.between_interval,
        "outlier": np.where(ran, outlier, np.nan),
        "middle": str(fleet["gpu"].values[middle]),
        "middle_cv": cv,
        "middle_cv_interval": cv_interval,
        "middle_spread": np.ptp(x) / np.median(x) if x.size > 1 else np.nan,
        "middle_runs": x.size,
        "autocorrelation": autocorrelation(x, LAGS),
    }


_NONE = Components(*[np.nan] * 4, *[(np.nan, np.nan)] * 3, np.nan, np.nan, 0, 0)


def _components(x: np.ndarray, confidence: float) -> Components:
    if (np.isfinite(x).sum(axis=1) >= 2).sum() < LEAST:
        return _NONE
    return variance_components(x, confidence=confidence)


def _by_node(median: np.ndarray, fleet: xr.Dataset) -> np.ndarray:
    """Device medians by machine, padded with NaN, (node, device)."""
    if "node" not in fleet.coords:
        return np.empty((0, 1))
    node = fleet["node"].values.astype(str)
    known = (node != "") & np.isfinite(median)
    groups = [median[known & (node == n)] for n in np.unique(node[known])]
    out = np.full((len(groups), max((g.size for g in groups), default=1)), np.nan)
    for row, values in zip(out, groups, strict=True):
        row[: values.size] = values
    return out


def autocorrelation(x: np.ndarray, lags: int) -> np.ndarray:
    """Sample autocorrelation of a series at lags 1 to `lags`; NaN where it is too short.

    Examples
    --------
    >>> autocorrelation(np.array([1.0, -1.0] * 20), 2).round(2).tolist()
    [-0.98, 0.95]
    """
    out = np.full(lags, np.nan)
    centred = x - x.mean() if x.size else x
    power = centred @ centred
    for lag in range(1, lags + 1):
        if x.size > 2 * lag + 1 and power > 0:
            out[lag - 1] = centred[:-lag] @ centred[lag:] / power
    return out


def _temporal(
    x: np.ndarray, confidence: float, resamples: int, seed: int
) -> tuple[float, tuple[float, float]]:
    """cv of one device's runs with a moving-block bootstrap interval (blocks of n^(1/3) runs)."""
    if x.size < LEAST:
        return np.nan, (np.nan, np.nan)
    block = max(1, round(x.size ** (1 / 3)))
    rng = np.random.default_rng(seed)
    begins = rng.integers(0, x.size - block + 1, (resamples, -(-x.size // block)))
    index = (begins[:, :, None] + np.arange(block)).reshape(resamples, -1)[:, : x.size]
    again = x[index].std(axis=1, ddof=1) / x[index].mean(axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(again, [tail, 1 - tail])
    return float(x.std(ddof=1) / x.mean()), (float(low), float(high))


def correlations(
    fleet: xr.Dataset, *, confidence: float = 0.95, resamples: int = 1000, seed: int = 0
) -> xr.Dataset:
    """Correlate kernels over devices, and durations with clock, power and temperature.

    That a device which is slow in one kernel is slow in another is not a fact but a question; this answers it.

    Parameters
    ----------
    fleet : Dataset of `read_fleet`; several of them by `prism.measure.fleet.merge_fleets`
    confidence, resamples, seed
        Of the intervals: Fisher's for ranks, with the variance of Bonett and Wright (2000); a bootstrap over devices for runs,
        since the runs of one device are not independent.

    Returns
    -------
    Dataset
        ``rank_correlation(signature, other)`` (Spearman, of device medians) with interval, and ``count``, the devices that
        ran both; ``run_correlation(signature, field)`` (Pearson, over runs of all devices) with interval; ``clock_explains``:
        the cv over devices of clock x duration, which is 0 where the clock explains all, beside ``spatial_cv``. NaN
        where nothing is known.
    """
    duration = fleet["duration"].values
    median = _medians(duration)
    pairs = [[_spearman(a, b, confidence) for b in median] for a in median]
    fields = [f for f in FIELDS if f in fleet]
    runs = [
        [_pearson(d, fleet[f].values[i], confidence, resamples, seed) for f in fields]
        for i, d in enumerate(duration)
    ]
    runs_array = np.array(runs, float).reshape(len(duration), len(fields), 3)
    pairs_array = np.array(pairs, float)
    clock = (
        _medians(fleet["clock_sm"].values) if "clock_sm" in fleet else np.full_like(median, np.nan)
    )
    names = fleet["signature"].values
    return schema.dataset(
        {
            "rank_correlation": (("signature", "other"), pairs_array[..., 0]),
            "rank_correlation_interval": (
                ("signature", "other", "ci_bound"),
                pairs_array[..., 1:3],
            ),
            "count": (("signature", "other"), pairs_array[..., 3]),
            "run_correlation": (("signature", "field"), runs_array[..., 0]),
            "run_correlation_interval": (("signature", "field", "ci_bound"), runs_array[..., 1:]),
            "clock_explains": ("signature", _cv(median * clock)),
            "spatial_cv": ("signature", _cv(median)),
        },
        coords={
            "signature": names,
            "other": names,
            "field": fields,
            "ci_bound": ["lower", "upper"],
        },
        made_by="prism.measure.fleet.correlations",
        source=fleet.attrs["source"],
        seed=seed,
        provenance={**schema.provenance(fleet), "confidence": confidence},
    )


def _medians(x: np.ndarray) -> np.ndarray:
    """Median over the last axis, NaN where nothing is there."""
    known = np.isfinite(x).any(axis=-1)
    out = np.full(x.shape[:-1], np.nan)
    out[known] = np.nanmedian(x[known], axis=-1)
    return out


def _cv(x: np.ndarray) -> np.ndarray:
    def one(row: np.ndarray) -> float:
        row = row[np.isfinite(row)]
        return row.std(ddof=1) / row.mean() if row.size >= LEAST else np.nan

    return np.array([one(row) for row in x])


def _spearman(a: np.ndarray, b: np.ndarray, confidence: float) -> tuple[float, float, float, int]:
    both = np.isfinite(a) & np.isfinite(b)
    n = int(both.sum())
    if n < 4 or np.ptp(a[both]) == 0 or np.ptp(b[both]) == 0:
        return np.nan, np.nan, np.nan, n
    r = float(stats.spearmanr(a[both], b[both]).statistic)
    # a perfect order of few devices comes about by chance
    inner = float(np.clip(r, -1 + 1 / n**2, 1 - 1 / n**2))
    half = stats.norm.ppf((1 + confidence) / 2) * np.sqrt((1 + r**2 / 2) / (n - 3))
    low, high = np.tanh(np.arctanh(inner) + np.array([-half, half]))
    return r, float(low), float(high), n


def _pearson(
    duration: np.ndarray, other: np.ndarray, confidence: float, resamples: int, seed: int
) -> tuple[float, float, float]:
    """Over all runs; interval over devices, from sums by device."""
    both = np.isfinite(duration) & np.isfinite(other)
    devices = np.flatnonzero(both.any(axis=1))
    if devices.size < LEAST or both.sum() < 4:
        return np.nan, np.nan, np.nan
    # about the mean, so that sums of squares lose no digits
    x = np.where(both, duration / duration[both].mean() - 1, 0.0)[devices]
    y = np.where(both, other / other[both].mean() - 1, 0.0)[devices]
    sums = np.stack(
        [both[devices].sum(1), x.sum(1), y.sum(1), (x * y).sum(1), (x * x).sum(1), (y * y).sum(1)]
    ).astype(float)

    def correlation(total: np.ndarray) -> np.ndarray:
        n, sx, sy, sxy, sxx, syy = total
        with np.errstate(invalid="ignore", divide="ignore"):
            return (n * sxy - sx * sy) / np.sqrt((n * sxx - sx**2) * (n * syy - sy**2))

    rng = np.random.default_rng(seed)
    again = correlation(
        sums[:, rng.integers(0, devices.size, (resamples, devices.size))].sum(axis=2)
    )
    tail = (1 - confidence) / 2
    low, high = (
        np.nanquantile(again, [tail, 1 - tail]) if np.isfinite(again).any() else (np.nan,) * 2
    )
    return float(correlation(sums.sum(axis=1))), float(low), float(high)
