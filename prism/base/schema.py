"""The vocabulary of every Dataset: dimension words, variables with units, attributes.

One page decides what `step_time` means and in which unit it is; everything that PRISM
returns or stores passes through `dataset` or `check`. xarray keeps attributes through
arithmetic, so a ratio of seconds would still claim to be seconds: units are therefore
*set* here from the variable's name and never inherited.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

SCHEMA_VERSION = "1"

DIMS = frozenset(
    "job draw step trial time gpu node rank op signature quantile ci_bound scenario ablation policy"
    " component level kind place trace gaps size slowdown bandwidth latency jitter lag other reason overrun"
    # not observations but the arrays of a stored model
    " edge member site field pool base parameter sample_index replica grouping".split()
)

#: variable -> (units, long name)
VARIABLES: dict[str, tuple[str, str]] = {
    "start": ("s", "start of the op, from the start of the step"),
    "duration": ("s", "duration of the op without waiting for other ranks"),
    "gap": ("s", "idle time between the end of the last known dependency and the start"),
    "step_time": ("s", "time of one optimizer step"),
    "independent_time": ("s", "step time if every op is drawn by itself"),
    "measured_time": ("s", "measured step time"),
    "replay_error": ("1", "largest relative error of a replayed step"),
    "replayed": ("s", "step time from the graph with the step's own durations"),
    "finish_time": ("s", "time at which the op ends, from the start of the step"),
    "exposed_time": ("s", "time on the longest path"),
    "busy_time": ("s", "sum of durations over all ops and replicas"),
    "criticality": ("1", "share of draws whose longest path holds the op"),
    "variance_share": ("1", "share of the variance of normal scores"),
    "standard_error": ("1", "standard error of variance_share"),
    "tail_dependence": ("1", "P(second series in its upper tail | first is)"),
    "gaussian_tail_dependence": ("1", "tail_dependence of Gaussian scores of the same correlation"),
    "p_value": ("1", "of the difference"),
    "event_probability": ("1", "share of steps that the joint event strikes"),
    "event_probability_interval": ("1", "binomial interval of event_probability"),
    "quantile_value": ("s", "quantile of step time under a refit"),
    "estimate_value": ("s", "quantile of step time"),
    "jct": ("s", "job completion time, finish minus submission"),
    "submit": ("s", "time of submission"),
    "finish": ("s", "time of completion"),
    "estimate": ("s", "run time that the policy plans with"),
    "run_time": ("s", "run time of the job without interruptions"),
    "gpu_seconds": ("s", "GPU-seconds"),
    "share": ("1", "share of submitted jobs that finished"),
    "delay": ("s", "first start minus submission"),
    "delay_mean": ("s", "mean of first start minus submission, jobs that started"),
    "preemptions": ("1", "times that the job was stopped"),
    "kills": ("1", "times that the job was stopped at its limit"),
    "failures": ("1", "failures of nodes of the job"),
    "preempted": ("1", "jobs stopped, times counted"),
    "killed": ("1", "jobs stopped at their limits, times counted"),
    "failed": ("1", "failures of nodes of running jobs"),
    "makespan": ("s", "last end"),
    "ratio": ("1", "mean completion time with one estimator over that with another"),
    "ratio_interval": ("1", "interval of ratio over seeds"),
    "goodput": ("1", "useful GPU-seconds / allocated GPU-seconds"),
    "clock_sm": ("MHz", "SM clock"),
    "clock_mem": ("MHz", "memory clock"),
    "power": ("W", "power draw"),
    "temperature": ("degC", "temperature"),
    "started_at": ("s", "start of the run, seconds since the epoch"),
    "gpus": ("1", "number of GPUs"),
    "runs": ("1", "number of runs"),
    "median": ("s", "median over devices of the per-device median"),
    "spatial_component": ("1", "standard deviation between devices, relative to the median"),
    "spatial_component_interval": ("1", "interval of spatial_component"),
    "temporal_component": (
        "1",
        "standard deviation over the runs of a device, relative to the median",
    ),
    "temporal_component_interval": ("1", "interval of temporal_component"),
    "node_component": ("1", "standard deviation between machines, relative to the median"),
    "node_component_interval": ("1", "interval of node_component"),
    "middle_cv": ("1", "std / mean over the runs of the device in the middle"),
    "middle_cv_interval": ("1", "interval of middle_cv"),
    "middle_spread": ("1", "(max - min) / median over the runs of the device in the middle"),
    "middle_runs": ("1", "runs of the device in the middle"),
    "autocorrelation": ("1", "of the runs of the device in the middle"),
    "outlier": ("1", "1 slow, -1 fast, 0 within Tukey's fences"),
    "rank_correlation": ("1", "Spearman, of device medians of two kernels"),
    "rank_correlation_interval": ("1", "interval of rank_correlation"),
    "run_correlation": ("1", "Pearson, of duration and another reading over runs"),
    "run_correlation_interval": ("1", "interval of run_correlation"),
    "clock_explains": ("1", "std / mean over devices of clock x duration"),
    "throttle": ("1", "clock-event reasons, NVML bits"),
    "skew": ("s", "arrival of the last rank after the first"),
    "earliest": ("s", "duration on the rank that was done first"),
    "utilisation": ("1", "share of time in which kernels ran"),
    "reason_share": ("1", "share of samples with the clock-event reason"),
    "transfer_quantile": ("s", "quantile of the transfer time"),
    "transfer_quantile_interval": ("s", "order-statistic interval of transfer_quantile"),
    "tail_ratio": ("1", "p99 / p50 of the transfer time"),
    "spatial_spread": ("1", "(max - min) / median over devices"),
    "spatial_p95_p5": ("1", "(p95 - p5) / median over devices"),
    "spatial_whisker_spread": ("1", "spread between Tukey whiskers / median over devices"),
    "spatial_cv": ("1", "std / mean over devices"),
    "spatial_cv_interval": ("1", "interval of spatial_cv"),
    "temporal_cv": ("1", "std / mean over the runs of one device"),
    "temporal_cv_median": ("1", "median over devices of temporal_cv"),
    "temporal_cv_median_interval": ("1", "interval of temporal_cv_median"),
    "temporal_cv_p95": ("1", "p95 over devices of temporal_cv"),
    "step_time_quantile": ("s", "quantile of step time over steps"),
    "busy_quantile": ("s", "quantile over ranks and steps of the sum of durations without waiting"),
    "waiting_quantile": ("s", "quantile over ranks and steps of the wait for other members"),
    "exposed_quantile": (
        "s",
        "quantile over ranks and steps of the time without compute beside it",
    ),
    "rank_cv": ("1", "std / mean over ranks of the mean compute time"),
    "step_cv": ("1", "std / mean over steps of compute time, mean over ranks"),
    "extra_share": ("1", "share of run time lost if every step meets the p95 of everything"),
    "std_ratio": ("1", "standard deviation after / before"),
    "median_ratio": ("1", "median duration after / before"),
    "moved": ("1", "whether the difference is significant"),
    "cv": ("1", "coefficient of variation, std / mean"),
    "count": ("1", "number of values"),
    "borrowed": ("1", "0: a pool of its own, 1: one of any position, 2: one of any site"),
    "samples_used": ("1", "samples of the pool that is drawn from"),
    "aic": ("1", "Akaike's information criterion"),
    "ks_pvalue": ("1", "p-value of the KS distance, parameters estimated"),
    "ad_statistic": ("1", "Anderson-Darling statistic"),
    "ad_pvalue": ("1", "p-value of the Anderson-Darling statistic, parameters estimated"),
    "ks_distance": ("1", "Kolmogorov-Smirnov distance, sup of ECDF differences"),
    "ks_distance_interval": ("1", "interval of the KS distance"),
    "ks_noise_floor": ("1", "KS distance expected between two samples of this size"),
    "anderson_darling": ("1", "two-sample Anderson-Darling statistic"),
    "measured": ("s", "measured step time at the quantile"),
    "predicted": ("s", "predicted step time at the quantile"),
    "band": ("s", "pointwise interval of the measured quantile if the prediction is right"),
    "relative_error": ("1", "predicted / measured - 1"),
    "relative_error_mean": ("1", "mean predicted / mean measured - 1"),
    "relative_error_interval": ("1", "block bootstrap interval of relative_error"),
    "relative_error_mean_interval": ("1", "block bootstrap interval of relative_error_mean"),
    "coverage": ("1", "share of measured steps inside what was predicted"),
    "ks_in_sample": ("1", "KS distance to the steps that were fitted"),
    "ks_critical": ("1", "KS distance that a perfect model passes in one case of twenty"),
    "pinball": ("s", "pinball loss of the predicted p95"),
    "above_p95": ("1", "share of steps above the predicted p95"),
    "fold_error_mean": ("1", "mean over folds of |predicted / measured mean - 1|"),
    "crps": ("s", "continuous ranked probability score"),
    "std_error": ("1", "predicted / measured standard deviation - 1"),
    "std_error_interval": ("1", "block bootstrap interval of std_error"),
    "coverage_interval": ("1", "interval of the coverage"),
    "value": ("1", "statistic of step time when only the ablation's components vary"),
    "value_interval": ("1", "interval of value"),
    "shapley": ("1", "mean addition of a component over all orders"),
    "shapley_interval": ("1", "interval of shapley"),
    "alone": ("1", "statistic with only this component varying, less that without variability"),
    "alone_interval": ("1", "interval of alone"),
    "last": ("1", "statistic with everything varying, less that with all but this component"),
    "last_interval": ("1", "interval of last"),
    "saved": ("s", "p95 of step time saved if the ops never varied"),
    "saved_interval": ("s", "paired interval of saved"),
    "std_between": ("s", "standard deviation between jobs, or ranks, of their means"),
    "std_between_interval": ("s", "jackknife interval of std_between"),
    "std_within": ("s", "standard deviation from step to step of one job, or rank"),
    "std_within_interval": ("s", "jackknife interval of std_within"),
    "persistent_share": ("1", "share of the variance that stays from step to step"),
    "persistent_share_interval": ("1", "jackknife interval of persistent_share"),
    "bandwidth_needed": ("B/s", "least bandwidth at which p95 rises by no more"),
    "bandwidth_needed_interval": (
        "B/s",
        "bandwidth_needed at the ends of the interval of the increase",
    ),
    "pool_mean": ("s", "mean of the pool"),
    "analytic_mean": ("s", "mean from peak rates and links"),
    "reach": ("1", "size over the nearest measured one; 1 where it lies between measured ones"),
    "path_share": ("1", "share of the longest path's time"),
    "elasticity": ("1", "relative change of p95 over that of the ops' durations"),
    "elasticity_interval": ("1", "paired bootstrap interval of elasticity"),
    "elasticity_spread": (
        "1",
        "relative change of p95 over that of the ops' distance from their mean",
    ),
    "elasticity_spread_interval": ("1", "paired bootstrap interval of elasticity_spread"),
    "on_path": ("1", "ops of the group on the longest path of a draw, on average"),
    "largest_factor": ("1", "largest factor on the spread that was looked at"),
    "spread_factor": ("1", "factor on the spread about the mean"),
    "p95": ("s", "p95 of step time"),
    "p95_interval": ("s", "binomial interval of p95"),
    "node_of_position": ("1", "node that stands at a position"),
    "step_quantile": ("s", "quantile of step time"),
    "step_quantile_interval": ("s", "binomial interval of step_quantile"),
    "step_mean": ("s", "mean step time"),
    "step_std": ("s", "standard deviation of step time"),
    "step_std_interval": ("s", "bootstrap interval of step_std"),
    "exceeds": ("1", "share of steps over (1 + slowdown) x the step without variability"),
    "exceeds_interval": ("1", "binomial interval of exceeds"),
    "increase": ("1", "relative increase over the reference scenario"),
    "increase_interval": ("1", "paired bootstrap interval of the increase"),
    "slowdown": ("1", "factor on a duration or on step time"),
    "slowdown_interval": ("1", "interval of slowdown"),
    "slowdown_all": ("1", "factor on step time of all ops together"),
}

#: arrays of a stored model (`prism.modelfile`): indices, counts and texts, and seconds where said
VARIABLES |= {
    f"op_{field}": ("1", f"{field} of the op")
    for field in (
        "signature",
        "site",
        "position",
        "stage",
        "microbatch",
        "rank",
        "key",
        "grouping",
        "replica",
        "dp",
        "width",
    )
}
VARIABLES |= {
    "signature_text": ("1", "fields of a signature"),
    "site_text": ("1", "name of a site"),
    "edges_of_op": ("1", "number of ops that the op waits for"),
    "edge_from": ("1", "op that is waited for"),
    "edge_to": ("1", "op that waits"),
    "members_of_op": ("1", "number of participating ranks"),
    "member_rank": ("1", "participating rank"),
    "leaders": ("1", "lowest replica of each one's group"),
    "lanes": ("1", "replicas that an op of the graph stands for"),
    "node_of_rank": ("1", "machine of the rank"),
    "pool_signature": ("1", "signature of the pool's key"),
    "pool_site": ("1", "site of the pool's key, -1 for any"),
    "pool_position": ("1", "position of the pool's key, -1 for any"),
    "pool_base": ("1", "base distribution of the pool"),
    "pool_scale": ("1", "factor on the base"),
    "pool_shift": ("s", "added to the scaled base"),
    "pool_largest_of": ("1", "number of draws of the base whose largest is taken"),
    "base_family": ("1", "family of the base"),
    "base_parameter": ("1", "parameters of the family"),
    "samples_of_base": ("1", "number of samples of an empirical base"),
    "sample": ("1", "samples of the empirical bases"),
}

SOURCES = ("measured", "simulated", "synthetic")


class SchemaError(ValueError):
    """A Dataset that does not keep to the vocabulary."""


def dataset(
    data_vars: Mapping[str, tuple[tuple[str, ...] | str, Any]],
    *,
    coords: Mapping[str, Any] | None = None,
    made_by: str,
    source: str,
    seed: int | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> xr.Dataset:
    """Build a Dataset in the vocabulary, with units, long names and attributes set.

    Parameters
    ----------
    data_vars : mapping of a name in `VARIABLES` to ``(dims, values)`` or a DataArray
    coords : mapping, optional
    made_by : str
        The public function that made it.
    source : {"measured", "simulated", "synthetic"}
        Where the numbers come from; whatever was generated says ``synthetic``.
    seed : int, optional
    provenance : mapping, optional
        Stored as one JSON string (netCDF attributes hold no mappings). No time stamps and no
        absolute paths, so that equal inputs give equal bytes.

    Raises
    ------
    SchemaError
        If a name, a dimension or the source is not in the vocabulary.

    Examples
    --------
    >>> ds = dataset({"step_time": ("draw", [1.0, 1.1])}, made_by="doc", source="synthetic")
    >>> ds.step_time.units
    's'
    """
    attrs: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "prism_version": _version(),
        "made_by": made_by,
        "source": source,
    }
    if seed is not None:
        attrs["seed"] = int(seed)
    if provenance is not None:
        attrs["provenance"] = json.dumps(provenance, sort_keys=True)
    ds = xr.Dataset(dict(data_vars), coords=coords, attrs=attrs)
    for name in ds.data_vars:
        if name in VARIABLES:
            units, long_name = VARIABLES[name]
            ds[name].attrs = {"units": units, "long_name": long_name}
    return check(ds)


def check(ds: xr.Dataset) -> xr.Dataset:
    """Return `ds` unchanged, or raise `SchemaError` naming everything that is off.

    Examples
    --------
    >>> check(xr.Dataset({"latency": ("iteration", [1.0])}))
    Traceback (most recent call last):
        ...
    prism.base.schema.SchemaError: unknown dimension: iteration; unknown variable: latency; \
attribute source must be one of measured, simulated, synthetic
    """
    faults = [f"unknown dimension: {d}" for d in sorted(set(ds.dims) - DIMS, key=str)]
    faults += [f"unknown variable: {v}" for v in ds.data_vars if v not in VARIABLES]
    if ds.attrs.get("source") not in SOURCES:
        faults.append(f"attribute source must be one of {', '.join(SOURCES)}")
    faults += [
        f"{name} must have units {VARIABLES[name][0]!r}"
        for name, v in ds.data_vars.items()
        if name in VARIABLES and v.attrs.get("units") != VARIABLES[name][0]
    ]
    if faults:
        raise SchemaError("; ".join(faults))
    return ds


def derived_source(*inputs: str) -> str:
    """Source of a result that is computed from inputs with these sources.

    The rule: what rests on anything that nobody measured (a generated fleet, a made-up factor, an assumed
    link) is ``synthetic``; what is simulated from measurements alone is ``simulated``.

    Examples
    --------
    >>> derived_source("measured"), derived_source("measured", "synthetic")
    ('simulated', 'synthetic')
    """
    return "synthetic" if "synthetic" in inputs else "simulated"


def provenance(ds: xr.Dataset) -> dict[str, Any]:
    """The provenance of a Dataset as a mapping (empty if it has none)."""
    return json.loads(ds.attrs.get("provenance", "{}"))


def finite_durations(values: Any, what: str, *, positive: bool = False) -> np.ndarray:
    """`values` as float64, refused in one line if any is NaN, infinite or negative.

    Every door at which durations enter uses this one, so that no NaN reaches a maximum
    (where it would vanish or spread without a sign).

    Raises
    ------
    ValueError
        With the number of offending values and the place of the first.

    Examples
    --------
    >>> finite_durations([0.1, -0.2], "forward")
    Traceback (most recent call last):
        ...
    ValueError: forward: 1 of 2 durations is negative, NaN or infinite (first: -0.2 at index 1); \
remove or repair it
    """
    x = np.asarray(values, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        bad = ~np.isfinite(x) | (x <= 0 if positive else x < 0)
    n = int(bad.sum())
    if n:
        at = int(np.flatnonzero(bad.ravel())[0])
        fault = "zero, negative" if positive else "negative"
        verb, it = ("is", "it") if n == 1 else ("are", "them")
        raise ValueError(
            f"{what}: {n} of {x.size} durations {verb} {fault}, NaN or infinite "
            f"(first: {x.ravel()[at]} at index {at}); remove or repair {it}"
        )
    return x


def _version() -> str:
    from importlib.metadata import version

    return version("prism-runtime")
