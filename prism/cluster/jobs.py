"""Job logs: read from a table, or made up from a few stated parameters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr
from pydantic import Field, PositiveFloat, PositiveInt

from prism.base import schema
from prism.base.specs import Spec, read_spec
from prism.base.tables import TableError, labels, numbers, read_table, require_columns
from prism.cluster import published
from prism.cluster.runtimes import LARGEST_CV

REQUIRED = ("job_id", "submit_s", "gpus", "duration_s")
LONGEST_LOG = 1e12


class JobsError(ValueError):
    """A job log that cannot be used; the message names file and row."""


class ReferenceJobs(Spec):
    """Parameters of a synthetic job log (`synthetic_jobs`)."""

    kind: str = Field(pattern="^synthetic jobs$")
    jobs: PositiveInt
    mean_interarrival_s: PositiveFloat
    median_duration_s: PositiveFloat
    duration_log_sigma: float = Field(gt=0, le=5)
    gpus: dict[PositiveInt, PositiveFloat] = Field(min_length=1)
    seed: int


def read_jobs(path: str | Path) -> xr.Dataset:
    """Read a job log.

    Parameters
    ----------
    path : path
        ``.csv`` or ``.parquet`` with a job a row and columns ``job_id, submit_s, gpus, duration_s`` (and ``gpu_type``, where jobs
        need one); the logs that others publish (`prism.cluster.published`): Philly's JSON, Helios, Alibaba PAI, Sia's, Muri's,
        ElasticFlow's, Tiresias', Blox'; or ``.yaml`` of a `ReferenceJobs`, the synthetic log that it describes.

    Returns
    -------
    Dataset
        ``submit(job)``, ``gpus(job)``, ``estimate(job)`` (the logged duration, which the scheduler takes
        as its point estimate), seconds, in order of submission, first submission at 0. The provenance counts jobs that were
        left out because they asked for no GPU or never ran.

    Raises
    ------
    JobsError, prism.base.specs.SpecError
        Missing file or columns, no rows, or a row with values that no job can have.
    """
    path = Path(path)
    if path.suffix in (".yaml", ".yml"):
        return synthetic_jobs(read_spec(ReferenceJobs, path))
    try:
        table, left_out = published.read(path)
        require_columns(table, REQUIRED, path)
        job = labels(table, "job_id", path)
        submit = numbers(table, "submit_s", path)
        gpus = numbers(table, "gpus", path, least=1, whole=True)
        duration = numbers(table, "duration_s", path)
        kind = labels(table, "gpu_type", path) if "gpu_type" in table else None
    except TableError as fault:
        raise JobsError(str(fault)) from fault
    for name, bad in (
        ("duration_s must be a number > 0", ~(duration > 0)),
        ("submit_s must lie within 1e12 s of each other", np.abs(submit - submit[0]) > LONGEST_LOG),
        ("job_id must not repeat", pd.Series(job).duplicated().to_numpy()),
    ):
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise JobsError(
                f"{path}: {name} ({int(bad.sum())} rows are off, first data row {row + 1})"
            )
    provenance = {"file": path.name, **left_out}
    return _jobs_dataset(job, submit, gpus, duration, "measured", provenance, kind)


def select_jobs(
    jobs: xr.Dataset,
    *,
    start: float = 0.0,
    compress: float = 1.0,
    least: float = 0.0,
    most_gpu_seconds: float = np.inf,
    more_gpus: int = 1,
) -> xr.Dataset:
    """Part of a log, with its arrivals closer together: so that there is a queue to schedule.

    Parameters
    ----------
    jobs : Dataset of `read_jobs`
    start : float
        Seconds of the log that are left out before its begin.
    compress : float
        Times between arrivals are divided by it.
    least, most_gpu_seconds : float
        Shortest job, s, and largest, GPU-seconds.
    more_gpus : int
        Factor on the GPUs of each job.

    Raises
    ------
    ValueError
        If no job is left, or factors are not positive.
    """
    if not (compress > 0 and more_gpus >= 1 and more_gpus == int(more_gpus)):
        raise ValueError(
            f"compress must be positive, more_gpus whole and at least 1, got {compress} and {more_gpus}"
        )
    size = jobs["estimate"] * jobs["gpus"]
    kept = (jobs["submit"] >= start) & (jobs["estimate"] >= least) & (size < most_gpu_seconds)
    if not bool(kept.any()):
        raise ValueError("no job of the log is left")
    out = jobs.isel(job=np.flatnonzero(kept.values))
    out = out.assign(
        submit=((out["submit"] - float(out["submit"].min())) / compress).assign_attrs(units="s"),
        gpus=(out["gpus"] * more_gpus).assign_attrs(units="1"),
    )
    told = {"start": start, "compress": compress, "least": least, "more_gpus": more_gpus}
    told |= {} if np.isinf(most_gpu_seconds) else {"most_gpu_seconds": most_gpu_seconds}
    provenance = {**schema.provenance(jobs), **told}
    return schema.dataset(
        dict(out.data_vars),
        coords=dict(out.coords),
        made_by="prism.cluster.select_jobs",
        source=jobs.attrs["source"],
        provenance=provenance,
    )


def with_cv(jobs: xr.Dataset, values: object, *, seed: int = 0) -> xr.Dataset:
    """A log whose jobs have a cv of their own, drawn from given values.

    Parameters
    ----------
    jobs : Dataset of `read_jobs`
    values : sequence of float, or path
        Coefficients of variation, each as likely; or a table with a column ``cv`` or ``cov_p50``.
    seed : int

    Raises
    ------
    ValueError
        Values outside [0, `prism.cluster.runtimes.LARGEST_CV`] are cut to it; none, or no numbers, are refused.
    """
    if isinstance(values, str | Path):
        table = read_table(Path(values))
        column = next((c for c in ("cv", "cov_p50") if c in table), None)
        if column is None:
            raise JobsError(f"{values}: needs a column cv or cov_p50")
        values = numbers(table, column, Path(values), least=0)
    from_ = np.asarray(values, float)
    if from_.size == 0 or not (np.isfinite(from_) & (from_ >= 0)).all():
        raise ValueError("coefficients of variation must be numbers that are not negative")
    drawn = np.random.default_rng(seed).choice(np.minimum(from_, LARGEST_CV), jobs.sizes["job"])
    return schema.dataset(
        {**dict(jobs.data_vars), "cv": ("job", drawn)},
        coords=dict(jobs.coords),
        made_by="prism.cluster.with_cv",
        source=jobs.attrs["source"],
        provenance={
            **schema.provenance(jobs),
            "cv": "a job's own",
            "cut_to": LARGEST_CV,
            "cv_seed": seed,
        },
    )


def synthetic_jobs(spec: ReferenceJobs) -> xr.Dataset:
    """A synthetic log: Poisson arrivals, LogNormal durations, GPU counts by weight."""
    rng = np.random.default_rng(spec.seed)
    weights = np.array(list(spec.gpus.values()))
    submit = np.cumsum(rng.exponential(spec.mean_interarrival_s, spec.jobs))
    gpus = rng.choice(list(spec.gpus), spec.jobs, p=weights / weights.sum())
    duration = spec.median_duration_s * rng.lognormal(0.0, spec.duration_log_sigma, spec.jobs)
    names = np.array([f"job-{i:05d}" for i in range(spec.jobs)])
    parameters = {"parameters": spec.model_dump(mode="json")}
    return _jobs_dataset(names, submit, gpus, duration, "synthetic", parameters)


def _jobs_dataset(
    job, submit, gpus, duration, source: str, provenance: dict, kind=None
) -> xr.Dataset:
    order = np.argsort(submit, kind="stable")
    return schema.dataset(
        {
            "submit": ("job", (submit - submit.min())[order]),
            "gpus": ("job", gpus[order].astype(np.int64)),
            "estimate": ("job", duration[order]),
        },
        coords={"job": job[order].astype("U")}
        | ({} if kind is None else {"gpu_type": ("job", kind[order].astype("U"))}),
        made_by="prism.read_jobs",
        source=source,
        provenance=provenance,
    )
