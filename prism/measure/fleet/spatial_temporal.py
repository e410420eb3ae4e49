"""Spatial and temporal variability of a fleet: between devices, and of each device in time."""

from __future__ import annotations

import warnings

import numpy as np
import xarray as xr
from scipy import stats

from prism.base import schema
from prism.model.pools import Empirical

#: each device enters a fleet-wide pool with this many quantiles of its runs
QUANTILES_PER_GPU = 32


def variability(
    fleet: xr.Dataset, *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> xr.Dataset:
    """Spatial and temporal variability of a fleet, per kernel.

    A device's value is the median of its runs. ``spatial_spread = (max - min) / median`` over
    devices is the literature's figure (Sinha et al., SC 2022) and rests on two devices; the p95 - p5
    and Tukey-whisker spreads are its robust forms and ``spatial_cv`` (std with n - 1, over mean) the
    one that can carry a bootstrap interval (over devices, BCa; a bootstrap of a maximum is not valid).
    With fewer than about 30 devices that interval is too narrow: it covered 79 % instead of 95 % at 8.
    ``temporal_cv`` is std / mean over the runs of each device with at least 3 runs.

    Returns
    -------
    Dataset
        Per `signature`: the above, dimensionless; ``median`` in seconds; intervals along `ci_bound`.
    """
    rows = [_kernel_variability(d, confidence, resamples, seed) for d in fleet["duration"].values]
    bound = ("spatial_cv_interval", "temporal_cv_median_interval")
    data = {
        name: (
            ("signature", "ci_bound") if name in bound
            else ("signature", "gpu") if name == "temporal_cv" else ("signature",),
            np.array([r[name] for r in rows]),
        )
        for name in rows[0]
    }  # fmt: skip
    return schema.dataset(
        data,
        coords={
            "signature": fleet["signature"].values,
            "gpu": fleet["gpu"].values,
            "ci_bound": ["lower", "upper"],
        },
        made_by="prism.variability",
        source=fleet.attrs["source"],
        seed=seed,
        provenance={**schema.provenance(fleet), "confidence": confidence},
    )


def _kernel_variability(duration: np.ndarray, confidence: float, resamples: int, seed: int) -> dict:
    """Measures of one kernel; `duration` (gpu, trial) padded with NaN."""
    runs = np.sum(np.isfinite(duration), axis=1)
    device = np.nanmedian(duration[runs > 0], axis=1)
    median = float(np.median(device))
    p5, q1, q3, p95 = np.quantile(device, [0.05, 0.25, 0.75, 0.95])
    inside = device[(device >= q1 - 1.5 * (q3 - q1)) & (device <= q3 + 1.5 * (q3 - q1))]
    temporal = np.full(runs.size, np.nan)
    enough = runs >= 3
    if enough.any():
        x = duration[enough]
        temporal[enough] = np.nanstd(x, axis=1, ddof=1) / np.nanmean(x, axis=1)
    known = temporal[enough]

    def interval(values: np.ndarray, statistic) -> np.ndarray:
        # a bootstrap of two values, or of equal ones, says nothing
        if values.size < 3 or np.ptp(values) == 0:
            return np.full(2, np.nan)
        # devices that are nearly all alike give no acceleration: the interval is NaN then
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", stats.DegenerateDataWarning)
            result = stats.bootstrap(
                (values,), statistic, confidence_level=confidence, n_resamples=resamples,
                method="BCa" if statistic is _cv else "percentile", rng=np.random.default_rng(seed),
            )  # fmt: skip
        return np.array(result.confidence_interval)

    return {
        "gpus": device.size,
        "runs": int(runs.sum()),
        "median": median,
        "spatial_spread": np.ptp(device) / median,
        "spatial_p95_p5": (p95 - p5) / median,
        "spatial_whisker_spread": np.ptp(inside) / median,
        "spatial_cv": _cv(device, axis=-1) if device.size > 1 else np.nan,
        "spatial_cv_interval": interval(device, _cv),
        "temporal_cv": temporal,
        "temporal_cv_median": float(np.median(known)) if known.size else np.nan,
        "temporal_cv_median_interval": interval(known, np.median),
        "temporal_cv_p95": float(np.quantile(known, 0.95)) if known.size else np.nan,
    }


def _cv(x: np.ndarray, axis: int = -1) -> np.ndarray:
    return np.std(x, axis=axis, ddof=1) / np.mean(x, axis=axis)


def device_medians(fleet: xr.Dataset, kernel: str | None = None) -> np.ndarray:
    """Median duration of each device that ran `kernel` (the first if not given), seconds, (gpu,).

    One value a device: devices are independent of each other, the runs of one device are not.
    Raises `ValueError` if there is no such kernel.
    """
    return np.nanmedian(_of_kernel(fleet, kernel), axis=1)


def relative_pool(fleet: xr.Dataset, kernel: str | None = None) -> Empirical:
    """Fleet-wide pool of one kernel, relative to its mean: the shape to put on an analytic mean.

    Every device weighs the same, however often it was run: it enters with `QUANTILES_PER_GPU` quantiles
    of its runs, (k + 1/2) / n each. What lies beyond them within a device is cut: for Normal runs 3 % of
    their standard deviation is lost. The tail over devices is whole.

    Parameters
    ----------
    fleet : Dataset of `read_fleet`
    kernel : str, optional
        A `signature` of the fleet; the first if not given.

    Returns
    -------
    Empirical
        Dimensionless, mean 1.

    Raises
    ------
    ValueError
        If there is no such kernel.
    """
    duration = _of_kernel(fleet, kernel)
    levels = (np.arange(QUANTILES_PER_GPU) + 0.5) / QUANTILES_PER_GPU
    values = np.nanquantile(duration, levels, axis=1)
    return Empirical(tuple((values / values.mean()).ravel()))


def _of_kernel(fleet: xr.Dataset, kernel: str | None) -> np.ndarray:
    """Durations (gpu, trial) of one kernel, devices that ran it."""
    names = [str(s) for s in fleet["signature"].values]
    if kernel is not None and kernel not in names:
        raise ValueError(f"the fleet has no kernel {kernel!r}; it has {', '.join(names)}")
    duration = fleet["duration"].values[names.index(kernel) if kernel else 0]
    return duration[np.isfinite(duration).any(axis=1)]
