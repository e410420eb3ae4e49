"""Predicted against measured step times, with what chance alone would show beside it."""

from __future__ import annotations

import numpy as np
import xarray as xr
from scipy import stats as _scipy

from prism import schema, stats
from prism.dag import WorkloadDAG
from prism.model import StepModel
from prism.montecarlo import simulate
from prism.traces import fit_pools

QUANTILES = (0.05, 0.5, 0.95)


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
    seed: int = 0,
) -> xr.Dataset:
    """How far a predicted distribution of step time is from the measured one.

    Parameters
    ----------
    predicted : DataArray or array (draw,), seconds
    measured : DataArray or array (step,), seconds, in order of time
    mean_only : float, optional
        Step time of the same graph with every op at its mean, seconds: the baseline of a
        deterministic simulator, compared in the same way.
    q : float
        Quantile whose coverage is reported: the share of measured steps at or below the predicted
        quantile, q if the prediction is right. An honest share needs steps that were not used for
        fitting.
    confidence : float
        Of the intervals: bootstrap for the KS distance, Clopper-Pearson for the coverage.
    block : int
        Length of blocks of measured steps that the bootstrap keeps together.

    Returns
    -------
    Dataset
        Per `scenario` (``predicted``, and ``mean only`` where given): ``ks_distance`` and its
        interval, ``relative_error(quantile)`` of p5, p50 and p95 (predicted / measured - 1) and
        ``relative_error_mean`` likewise, ``coverage`` and its interval. ``ks_noise_floor``: median KS distance that a perfect model would show.
    """
    y = stats.independent(measured)
    rows = {"predicted": stats.independent(predicted)}
    if mean_only is not None:
        rows["mean only"] = np.array([float(mean_only)])
    low_high = [_coverage_interval(y, np.quantile(x, q), confidence) for x in rows.values()]
    return schema.dataset(
        {
            "ks_distance": ("scenario", [stats.ks_distance(x, y) for x in rows.values()]),
            "ks_distance_interval": (
                ("scenario", "ci_bound"),
                [
                    stats.ks_interval(x, y, confidence=confidence, block=block, seed=seed)
                    for x in rows.values()
                ],
            ),
            "ks_noise_floor": ((), stats.ks_noise_floor(rows["predicted"].size, y.size)),
            "relative_error": (
                ("scenario", "quantile"),
                [np.quantile(x, QUANTILES) / np.quantile(y, QUANTILES) - 1 for x in rows.values()],
            ),
            "relative_error_mean": ("scenario", [x.mean() / y.mean() - 1 for x in rows.values()]),
            "coverage": (
                "scenario",
                [float(np.mean(y <= np.quantile(x, q))) for x in rows.values()],
            ),
            "coverage_interval": (("scenario", "ci_bound"), low_high),
        },
        coords={
            "scenario": list(rows),
            "quantile": list(QUANTILES),
            "ci_bound": ["lower", "upper"],
        },
        made_by="prism.compare",
        source=getattr(predicted, "attrs", {}).get("source", "simulated"),
        seed=seed,
        provenance={"q": q, "confidence": confidence, "block": block, "steps": y.size},
    )


def validate_steps(
    dag: WorkloadDAG,
    observed: xr.Dataset,
    *,
    draws: int = 1000,
    block: int = 1,
    seed: int = 0,
) -> xr.Dataset:
    """Fit pools to measured steps, simulate, and compare: in sample and on held-out steps.

    ``in sample`` fits and compares on all steps, as the PRISM paper does; ``held out`` fits on every
    second step and compares with the others, which is the honest figure. Machine speed drifts, so
    alternating steps still flatter: a later period would be harder.

    Parameters
    ----------
    dag : WorkloadDAG
    observed : Dataset of `prism.traces.observe`, at least 4 steps
    draws, block, seed
        As in `simulate` and `compare`.

    Returns
    -------
    Dataset
        As `compare`, scenarios ``in sample``, ``held out`` and each with ``, means only``;
        ``step_time(draw)`` of the in-sample model beside it, seconds.

    Raises
    ------
    ValueError
        With fewer than 4 steps.
    """
    n = observed.sizes["step"]
    if n < 4:
        raise ValueError(f"validation needs at least 4 measured steps, got {n}")
    every, even, odd = slice(None), slice(0, None, 2), slice(1, None, 2)
    rows, floors, step_time = [], [], None
    for label, fit, test in (("in sample", every, every), ("held out", even, odd)):
        model = StepModel(
            dag, fit_pools(dag, observed.isel(step=fit)), source=observed.attrs["source"]
        )
        predicted = simulate(model, draws, seed=seed)
        step_time = predicted["step_time"] if step_time is None else step_time
        mean_only = float(simulate(model.at_mean, 1)["step_time"][0])
        row = compare(
            predicted["step_time"],
            observed["step_time"].isel(step=test),
            mean_only=mean_only,
            block=block,
            seed=seed,
        )
        floors += [float(row["ks_noise_floor"])] * 2
        names = [label, f"{label}, means only"]
        rows.append(row.drop_vars("ks_noise_floor").assign_coords(scenario=names))
    both = xr.concat(rows, dim="scenario")
    return schema.dataset(
        {
            **{name: both[name] for name in both.data_vars},
            "ks_noise_floor": ("scenario", floors),
            "step_time": ("draw", step_time.values),
        },
        made_by="prism.validation.validate_steps",
        source="synthetic" if observed.attrs["source"] == "synthetic" else "simulated",
        seed=seed,
        provenance={**schema.provenance(observed), "draws": draws, "block": block},
    )


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


def _coverage_interval(y: np.ndarray, bound: float, confidence: float) -> tuple[float, float]:
    test = _scipy.binomtest(int(np.sum(y <= bound)), y.size)
    interval = test.proportion_ci(confidence, method="exact")
    return float(interval.low), float(interval.high)
