"""Synthetic recordings of a step model, for tests and examples: never evidence."""

from __future__ import annotations

import numpy as np

from prism.model.engine.montecarlo import sample_durations
from prism.model.pools import LogNormal
from prism.model.signature import stable_hash
from prism.model.step_model import StepModel
from prism.traces.measured_steps import MeasuredSteps


def synthetic_steps(
    model: StepModel, steps: int, *, step_cv: float = 0.02, seed: int = 0
) -> MeasuredSteps:
    """A made-up recording of a model: what `prism.traces.observe` would give, source ``synthetic``.

    Each step's compute ops share one LogNormal factor with mean 1 and cv `step_cv`, a dependence
    that real steps show and that independent draws of the ops cannot: so a comparison against this
    recording can fail, and should.

    Returns
    -------
    MeasuredSteps
        In the graph ``model.dag.unroll()``, without gaps.
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
    return MeasuredSteps.from_arrays(
        dag,
        duration,
        made_by="prism.traces.synthetic_steps",
        seed=seed,
        provenance={"step_cv": step_cv},
    )
