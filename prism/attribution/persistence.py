"""Persistent against transient: what stays with a job, and what changes from step to step."""

from __future__ import annotations

import numpy as np
import xarray as xr

from prism.attribution.ablation import only, partition
from prism.base import schema
from prism.base.stats.random_effects import variance_components
from prism.model.engine.montecarlo import simulate
from prism.model.step_model import StepModel

#: variables of a Dataset, and the fields of variance components that they hold
NAMES = {"std_between": "between", "std_within": "within", "persistent_share": "share"}


def persistent_share(
    model: StepModel,
    *,
    jobs: int = 100,
    draws: int = 50,
    confidence: float = 0.95,
    seed: int = 0,
) -> xr.Dataset:
    """Compute the share of step-time variance that stays with a job, by component.

    Persistent variation (which GPUs a job got) makes some jobs slow in every step: placement and replacement help.
    Transient variation makes some steps slow in every job: steadier kernels help. Each component varies alone, the
    others are at their mean; `all` is the model itself.

    Parameters
    ----------
    model : StepModel
        What is persistent in it is said by its coupling (`prism.Loading.persistent`).
    jobs, draws : int
        Jobs, and steps of each.
    confidence : float
    seed : int

    Returns
    -------
    Dataset
        Per `component` ``std_between`` (of jobs' mean step times) and ``std_within`` (of a job's steps), s;
        ``persistent_share`` of the variance; with intervals.

    Raises
    ------
    ValueError
        With fewer than 3 jobs or 2 steps.
    """
    if jobs < 3 or draws < 2:
        raise ValueError(f"needs at least 3 jobs of 2 steps, got {jobs} of {draws}")
    names = ["all", *partition(model)]
    rows = []
    for name in names:
        change = None if name == "all" else only(model, (name,))
        varied = model if change is None else change(model)
        step = simulate(varied, draws, jobs=jobs, seed=seed)["step_time"].values
        rows.append(variance_components(step, confidence=confidence))
    data: dict[str, tuple] = {}
    for name, part in NAMES.items():
        data[name] = ("component", np.array([getattr(r, part) for r in rows]))
        data[f"{name}_interval"] = (
            ("component", "ci_bound"),
            np.array([getattr(r, f"{part}_interval") for r in rows]),
        )
    return schema.dataset(
        data,
        coords={"component": names, "ci_bound": ["lower", "upper"]},
        made_by="prism.attribution.persistent_share",
        source=schema.derived_source(model.source),
        seed=seed,
        provenance={"jobs": jobs, "draws": draws, "confidence": confidence},
    )
