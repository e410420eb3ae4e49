"""Job logs: read from a table, or made up from a few stated parameters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr
from pydantic import Field, PositiveFloat, PositiveInt

from prism import schema
from prism.specs import Spec, read_spec
from prism.tables import TableError, labels, numbers, read_table, require_columns

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
        ``.csv`` with a job a row and columns ``job_id, submit_s, gpus, duration_s`` (others are
        ignored), or ``.yaml`` of a `ReferenceJobs`: the synthetic log that it describes.

    Returns
    -------
    Dataset
        ``submit(job)``, ``gpus(job)``, ``estimate(job)`` (the logged duration, which the scheduler takes
        as its point estimate), seconds, in order of submission, first submission at 0.

    Raises
    ------
    JobsError, prism.specs.SpecError
        Missing file or columns, no rows, or a row with values that no job can have.
    """
    path = Path(path)
    if path.suffix in (".yaml", ".yml"):
        return synthetic_jobs(read_spec(ReferenceJobs, path))
    try:
        table = read_table(path, ("job_id",))
        require_columns(table, REQUIRED, path)
        job = labels(table, "job_id", path)
        submit = numbers(table, "submit_s", path)
        gpus = numbers(table, "gpus", path, least=1, whole=True)
        duration = numbers(table, "duration_s", path)
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
    return _jobs_dataset(job, submit, gpus, duration, "measured", {"file": path.name})


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


def _jobs_dataset(job, submit, gpus, duration, source: str, provenance: dict) -> xr.Dataset:
    order = np.argsort(submit, kind="stable")
    return schema.dataset(
        {
            "submit": ("job", (submit - submit.min())[order]),
            "gpus": ("job", gpus[order].astype(np.int64)),
            "estimate": ("job", duration[order]),
        },
        coords={"job": job[order].astype("U")},
        made_by="prism.read_jobs",
        source=source,
        provenance=provenance,
    )
