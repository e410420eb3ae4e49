"""Propagate duration pools through the graph of a step."""

from __future__ import annotations

import numpy as np
import xarray as xr

from prism import _engine, schema
from prism.model import StepModel
from prism.signature import stable_hash


def simulate(model: StepModel, draws: int = 1000, *, seed: int = 0) -> xr.Dataset:
    """Draw step times: every op from its pool, the graph by its longest path.

    ``finish_i = max_j finish_j + T_i`` over the predecessors j of op i, with ``T_i`` drawn from
    the pool of i; the step time is the latest finish. Draws are independent steps. A duration is
    a pure function of (seed, draw, op), so results depend on neither threads nor the number of
    draws asked for, and two models that share an op share its random numbers.

    Parameters
    ----------
    model : StepModel
    draws : int
        Number of simulated steps, at least 1.
    seed : int

    Returns
    -------
    Dataset
        ``step_time(draw)``, seconds; ``source`` is ``simulated`` for pools from measurements and
        ``synthetic`` for others.

    Raises
    ------
    ValueError
        If `draws` is less than 1.

    Examples
    --------
    >>> from prism.dag import DagBuilder
    >>> from prism.pools import Fixed
    >>> from prism.signature import PoolKey, Signature
    >>> b = DagBuilder()
    >>> op = b.add(Signature("forward"), ranks=(0,))
    >>> model = StepModel(b.build([0]), {PoolKey(Signature("forward")): Fixed(0.25)})
    >>> simulate(model, draws=2).step_time.values.tolist()
    [0.25, 0.25]
    """
    if draws < 1:
        raise ValueError(f"draws must be at least 1, got {draws}")
    dag = model.dag
    slot, n_slots, is_sink = dag.slots
    step_time = _engine.simulate(
        dag.pred_ptr, dag.pred, slot, n_slots, is_sink, *model.lowered, keys(model, seed), 0, draws
    )
    return schema.dataset(
        {"step_time": ("draw", step_time)},
        made_by="prism.simulate",
        source="synthetic" if model.source == "synthetic" else "simulated",
        seed=seed,
        provenance={"draws": draws, "ops": dag.n_ops, "coupling": "independent"},
    )


def sample_durations(model: StepModel, draws: int, *, seed: int = 0) -> np.ndarray:
    """The op durations behind `simulate`, seconds, (op, draw): the same random numbers.

    Needs memory for ops x draws; for looking inside a small step.
    """
    out = np.empty((model.dag.n_ops, draws))
    _engine.sample_durations(*model.lowered, keys(model, seed), 0, out)
    return out


def propagate(model_or_dag, duration: np.ndarray, gap: np.ndarray | None = None):
    """Forward pass with given durations: ``finish = max(finish of predecessors) + gap + duration``.

    Parameters
    ----------
    model_or_dag : StepModel or WorkloadDAG
    duration, gap : ndarray (op, column), seconds

    Returns
    -------
    ready, finish : ndarray (op, column), seconds
        When the last predecessor ended; when the op ended.
    """
    dag = getattr(model_or_dag, "dag", model_or_dag)
    duration = np.ascontiguousarray(duration, dtype=np.float64)
    gap = np.zeros_like(duration) if gap is None else np.ascontiguousarray(gap, dtype=np.float64)
    ready, finish = np.empty_like(duration), np.empty_like(duration)
    _engine.propagate(dag.pred_ptr, dag.pred, gap, duration, ready, finish)
    return ready, finish


def keys(model: StepModel, seed: int) -> np.ndarray:
    """The random identity of each op under `seed`, uint64 (op,)."""
    return model.dag.key ^ np.uint64(stable_hash("seed", int(seed)))
