"""What each measured step says about the ops of the graph, and the check that it adds up."""

from __future__ import annotations

import numpy as np
import xarray as xr

from prism.base import schema
from prism.model.dag import WorkloadDAG
from prism.model.engine.montecarlo import propagate
from prism.traces.graph import ROUNDING, TraceGraph


def observe(trace: xr.Dataset, graph: TraceGraph) -> xr.Dataset:
    """Durations without waiting, idle gaps and step times of every measured step.

    For an op with members m: ``duration = max end_m - max start_m``, the time from the arrival of
    the last member (for a compute op simply its duration); a raw collective also holds the wait for
    the others. ``gap = max(0, max start_m - max end of predecessors)``: launch overhead, or a wait on
    something that the graph does not have. The step time is the end of the last op.

    Returns
    -------
    Dataset
        ``duration(step, op)``, ``gap(step, op)``, ``step_time(step)``, seconds, where `op` runs over
        the ops of ``graph.dag``. The provenance states how far apart members' ends lie, the check of
        the join: ``end_spread_p50`` and ``end_spread_max``, seconds.
    """
    dag = graph.dag
    shape = (dag.n_ops, trace.sizes["step"])
    start, end = np.full(shape, -np.inf), np.full(shape, -np.inf)
    first_end = np.full(shape, np.inf)
    raw_start = trace["start"].values.T
    raw_end = raw_start + trace["duration"].values.T
    np.maximum.at(start, graph.op_of_record, raw_start)
    np.maximum.at(end, graph.op_of_record, raw_end)
    np.minimum.at(first_end, graph.op_of_record, raw_end)
    joined = np.diff(dag.member_ptr) > 1
    ready = _last_end(dag, end)
    # an overlap that small is rounding, or a launch that runs ahead: the op begins when it could
    start = np.where((start < ready) & (start >= ready - ROUNDING), np.minimum(ready, end), start)
    spread = (end - first_end)[joined]
    return schema.dataset(
        {
            "duration": (("step", "op"), (end - start).T),
            "gap": (("step", "op"), np.maximum(0.0, start - ready).T),
            "step_time": ("step", end.max(axis=0)),
        },
        coords={"step": trace["step"].values},
        made_by="prism.traces.observe",
        source=trace.attrs["source"],
        provenance={
            **schema.provenance(trace),
            "end_spread_p50": float(np.median(spread)) if spread.size else 0.0,
            "end_spread_max": float(spread.max()) if spread.size else 0.0,
        },
    )


def _last_end(dag: WorkloadDAG, end: np.ndarray) -> np.ndarray:
    """Latest end among the predecessors of each op, 0 where it has none."""
    out = np.zeros_like(end)
    owner = np.repeat(np.arange(dag.n_ops), np.diff(dag.pred_ptr))
    np.maximum.at(out, owner, end[dag.pred])
    return out


def check_ops(observed: xr.Dataset, dag: WorkloadDAG) -> None:
    """Refuse a recording of other ops than those of the graph.

    Raises
    ------
    ValueError
        If the numbers of ops differ, or the graph is a template of several replicas.
    """
    if dag.lanes > 1 or observed.sizes["op"] != dag.n_ops:
        raise ValueError(
            f"the recording has {observed.sizes['op']} ops, the graph {dag.n_ops} x {dag.lanes} "
            "replicas; unroll the graph, or use that of the recording"
        )
    for name in ("duration", "gap"):
        schema.finite_durations(observed[name].values, f"the recording's {name}")


def replay(observed: xr.Dataset, dag: WorkloadDAG, *, gaps: bool = True) -> xr.Dataset:
    """Step times from the graph with each step's own durations: is the graph right?

    Two questions. With gaps: is there a dependency that the measured step did not obey? It would push
    ops later; a dependency that is *missing* cannot show, since its wait is in the gap. Without gaps:
    do the known dependencies explain when ops start? What is missing makes the replay early.

    Parameters
    ----------
    observed : Dataset of `observe`
    dag : WorkloadDAG
    gaps : bool
        Whether the idle gaps are replayed too.

    Returns
    -------
    Dataset
        ``replayed(step)`` and ``step_time(step)`` (measured), seconds, and ``relative_error(step)``.
    """
    check_ops(observed, dag)
    duration = observed["duration"].values.T
    gap = observed["gap"].values.T if gaps else None
    _, finish = propagate(dag, duration, gap)
    replayed, measured = finish.max(axis=0), observed["step_time"].values
    return schema.dataset(
        {
            "replayed": ("step", replayed),
            "step_time": ("step", measured),
            "relative_error": ("step", replayed / measured - 1),
        },
        coords={"step": observed["step"].values},
        made_by="prism.traces.replay",
        source=observed.attrs["source"],
        provenance={**schema.provenance(observed), "gaps": gaps},
    )
