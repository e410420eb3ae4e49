"""Synthetic recordings of a step model, for tests and examples: never evidence."""

from __future__ import annotations

import numpy as np
import xarray as xr

from prism.base import schema
from prism.model.engine.montecarlo import propagate, sample_durations
from prism.model.pools import LogNormal
from prism.model.signature import stable_hash
from prism.model.step_model import StepModel


def synthetic_steps(
    model: StepModel, steps: int, *, step_cv: float = 0.02, seed: int = 0
) -> xr.Dataset:
    """A made-up recording of a model: what `prism.traces.observe` would give, source ``synthetic``.

    Each step's compute ops share one LogNormal factor with mean 1 and cv `step_cv`, a dependence
    that real steps show and that independent draws of the ops cannot: so a comparison against this
    recording can fail, and should.

    Returns
    -------
    Dataset
        ``duration(step, op)``, ``gap(step, op)`` (zero), ``step_time(step)``, seconds, where `op` runs
        over ``model.dag.unroll()``.
    """
    dag = model.dag.unroll()
    # a stream of its own: with that of `simulate`, a prediction would know the recording
    stream = stable_hash("recording", int(seed)) >> 1
    duration = sample_durations(model.replace(dag=dag), steps, seed=stream)
    if step_cv > 0:
        factor = LogNormal.from_moments(1.0, step_cv)
        shared = factor.quantile(np.random.default_rng(stream).random(steps))
        compute = np.array([s.role == "compute" for s in dag.signatures])
        duration[compute[dag.signature]] *= shared
    _, finish = propagate(dag, duration)
    return schema.dataset(
        {
            "duration": (("step", "op"), duration.T),
            "gap": (("step", "op"), np.zeros_like(duration.T)),
            "step_time": ("step", finish.max(axis=0)),
        },
        coords={"step": np.arange(steps)},
        made_by="prism.traces.synthetic_steps",
        source="synthetic",
        seed=seed,
        provenance={"step_cv": step_cv},
    )
