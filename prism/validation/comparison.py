"""Predicted against measured step times, with what chance alone would show beside it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr
from scipy.stats import beta

from prism.base import schema, stats
from prism.base.tables import TableError, numbers, read_table

QUANTILES = (0.05, 0.5, 0.95, 0.99)
#: column of a table of step times -> seconds of its unit
UNITS = {"step_time": 1.0, "step_time_s": 1.0, "step_time_ms": 1e-3, "step_time_us": 1e-6}


class ValidationError(AssertionError):
    """A prediction that does not meet the stated limits."""


def compare(
    predicted,
    measured,
    *,
    mean_only: float | None = None,
    q: float = 0.95,
    confidence: float = 0.95,
    block: int = 1,
    resamples: int = 2000,
    seed: int = 0,
    source: str = "simulated",
) -> xr.Dataset:
    """Compare a predicted distribution of step time with the measured one.

    Parameters
    ----------
    predicted : DataArray or array (draw,), seconds
    measured : DataArray or array (step,), seconds, in order of time; or a path
        Of a table, as `read_step_times` takes it.
    mean_only : float, optional
        Step time of the same graph with every op at its mean, seconds: the baseline of a
        deterministic simulator, compared in the same way.
    q : float
        Quantile whose coverage is reported: the share of measured steps at or below the predicted
        quantile, q if the prediction is right. An honest share needs steps that were not used for
        fitting.
    confidence : float
        Confidence of all intervals.
    block : int
        Measured steps are serially correlated: lags below `block` count in the intervals.
    resamples, seed : int
        Number of resamples of the block bootstrap behind the intervals of errors.
    source : {"simulated", "synthetic"}
        Synthetic if either side was made up.

    Returns
    -------
    Dataset
        Per `scenario` (``predicted``, and ``mean only`` where given), each with its interval:
        ``ks_distance`` (`prism.base.stats.ks_interval`), ``anderson_darling`` (`prism.base.stats.anderson_darling`, no
        interval; NaN for a constant), ``relative_error(quantile)`` of p5, p50, p95 and p99
        (predicted / measured - 1) and ``relative_error_mean`` (block bootstrap of the measured steps),
        ``coverage`` (Clopper-Pearson on the effective number of steps). ``ks_noise_floor``: the median
        KS distance that a perfect model would show; NaN for a constant.
    """
    y = stats.independent(
        read_step_times(measured) if isinstance(measured, str | Path) else measured
    )
    rows = {"predicted": stats.independent(predicted)}
    if mean_only is not None:
        rows["mean only"] = np.array([float(mean_only)])
    found = [_compare_one(x, y, q, confidence, block, resamples, seed) for x in rows.values()]
    dims = {
        "relative_error": ("scenario", "quantile"),
        "relative_error_interval": ("scenario", "quantile", "ci_bound"),
    }
    return schema.dataset(
        {
            name: (
                dims.get(
                    name, ("scenario", "ci_bound") if name.endswith("interval") else ("scenario",)
                ),
                np.array([f[name] for f in found]),
            )
            for name in found[0]
        },
        coords={
            "scenario": list(rows),
            "quantile": list(QUANTILES),
            "ci_bound": ["lower", "upper"],
        },
        made_by="prism.compare",
        source=source,
        seed=seed,
        provenance={"q": q, "confidence": confidence, "block": block, "steps": y.size},
    )


def read_step_times(path: str | Path) -> np.ndarray:
    """Measured step times from a table, in its order.

    Parameters
    ----------
    path : path
        CSV or parquet with a column ``step_time_s`` (or ``step_time``, ``step_time_ms``,
        ``step_time_us``), other columns left aside; or a CSV of one column of seconds, with or without a header.

    Returns
    -------
    ndarray (step,), seconds

    Raises
    ------
    TableError
        No such column or several, cells that are no positive times.
    """
    path = Path(path)
    table = read_table(path)
    named = [c for c in table.columns if str(c).strip().lower() in UNITS]
    if len(table.columns) == 1 and not named:
        (only,) = table.columns
        table = table.rename(columns={only: "step_time"})
        first = pd.to_numeric(pd.Series([only]), errors="coerce")
        if first.isna().all() and re.search(
            r"(^|[^a-z])(ms|us|ns|min|h)([^a-z]|$)", str(only).lower()
        ):
            raise TableError(
                f"{path}: column {only!r} says another unit than seconds: call it step_time_ms or step_time_us"
            )
        if first.notna().all():  # no header: its first line was a step
            table = pd.concat([pd.DataFrame({"step_time": first}), table], ignore_index=True)
        named = ["step_time"]
    if len(named) != 1:
        raise TableError(
            f"{path}: needs one column of step times ({', '.join(UNITS)}), has {', '.join(map(str, table.columns))}"
        )
    times = numbers(table, named[0], path, least=0.0) * UNITS[str(named[0]).strip().lower()]
    if not (times > 0).all():
        raise TableError(f"{path}: a step of 0 s is no step (data row {int(np.argmin(times)) + 1})")
    return times


def quantile_quantile(predicted, measured, *, confidence: float = 0.95) -> xr.Dataset:
    """Measured quantiles beside the predicted ones, and where they would lie if the prediction were right.

    The i-th smallest of n independent values with distribution F has ``F(y) ~ Beta(i, n - i + 1)``; the band
    is the predicted quantile at the ends of that law's central interval. It holds for each point by
    itself; steps that follow each other alike stray further.

    Parameters
    ----------
    predicted : DataArray or array (draw,), seconds
    measured : DataArray or array (step,), seconds
    confidence : float

    Returns
    -------
    Dataset
        ``measured(quantile)``, ``predicted(quantile)`` and ``band(quantile, ci_bound)``, seconds, at the
        quantiles ``(i - 1/2) / n``.
    """
    x, y = stats.independent(predicted), np.sort(stats.independent(measured))
    n = y.size
    i = np.arange(1, n + 1)
    level = (i - 0.5) / n
    tail = (1 - confidence) / 2
    band = [np.quantile(x, beta.ppf(p, i, n - i + 1)) for p in (tail, 1 - tail)]
    return schema.dataset(
        {
            "measured": ("quantile", y),
            "predicted": ("quantile", np.quantile(x, level)),
            "band": (("quantile", "ci_bound"), np.transpose(band)),
        },
        coords={"quantile": level, "ci_bound": ["lower", "upper"]},
        made_by="prism.validation.quantile_quantile",
        source="simulated",
        provenance={"confidence": confidence, "steps": n},
    )


def _compare_one(
    x: np.ndarray, y: np.ndarray, q: float, confidence: float, block: int, resamples: int, seed: int
) -> dict[str, object]:
    # quantiles of few measured and of many drawn values by one definition, without interpolation: between two
    # values far apart it would make a sample differ from the same sample repeated
    own = np.append(np.quantile(x, QUANTILES, method="inverted_cdf"), x.mean())

    def errors(sample: np.ndarray) -> np.ndarray:
        """Relative errors of the quantiles and of the mean."""
        theirs = np.quantile(sample, QUANTILES, method="inverted_cdf")
        return own / np.append(theirs, sample.mean()) - 1

    rng = np.random.default_rng(seed)
    resampled = [errors(y[stats.block_indices(rng, y.size, block)]) for _ in range(resamples)]
    tail = (1 - confidence) / 2
    intervals = np.quantile(resampled, [tail, 1 - tail], axis=0).T
    error = errors(y)
    return {
        "ks_distance": stats.ks_distance(x, y),
        "ks_distance_interval": stats.ks_interval(x, y, confidence=confidence, block=block),
        "ks_noise_floor": stats.ks_noise_floor(x.size, y.size) if x.size > 1 else np.nan,
        "anderson_darling": stats.anderson_darling(x, y) if x.size > 1 else np.nan,
        "relative_error": error[:-1],
        "relative_error_interval": intervals[:-1],
        "relative_error_mean": error[-1],
        "relative_error_mean_interval": intervals[-1],
        "coverage": float(np.mean(y <= np.quantile(x, q))),
        "coverage_interval": stats.share_interval(y <= np.quantile(x, q), confidence, block),
    }


def require(
    comparison: xr.Dataset,
    *,
    ks: float | None = None,
    p95_error: float | None = None,
    scenario: str = "predicted",
) -> None:
    """Fail unless a comparison meets limits.

    Parameters
    ----------
    comparison : Dataset of `compare`
    ks : float, optional
        Largest KS distance allowed.
    p95_error : float, optional
        Largest absolute relative error of p95 allowed.

    Raises
    ------
    ValidationError
        Naming every limit that is passed and by how much.
    """
    row = comparison.sel(scenario=scenario)
    faults = []
    distance = float(row["ks_distance"])
    error = abs(float(row["relative_error"].sel(quantile=0.95)))
    if ks is not None and not distance <= ks:
        faults.append(f"KS distance {distance:.3f} is over {ks:.3f}")
    if p95_error is not None and not error <= p95_error:
        faults.append(f"p95 error {error:.1%} is over {p95_error:.1%}")
    if faults:
        raise ValidationError(f"{scenario}: " + "; ".join(faults))
