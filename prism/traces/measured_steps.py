"""Measured steps: durations and idle gaps of the ops of a graph, and their replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import xarray as xr

from prism.base import schema
from prism.model.dag import WorkloadDAG
from prism.model.engine.montecarlo import propagate
from prism.traces.gap_ops import EFFECTIVE, WHOLE, effective_gaps, gap_places, insert_gaps
from prism.traces.graph import ROUNDING, TraceGraph, build_graph


@dataclass(frozen=True, eq=False)
class MeasuredSteps:
    """The graph of a step and what every measured step says about its ops, checked to belong together.

    Attributes
    ----------
    dag : WorkloadDAG
        Every replica written out.
    steps : Dataset
        ``duration(step, op)`` without waiting, ``gap(step, op)`` and ``step_time(step)``, seconds, where `op`
        runs over the ops of `dag`; with source and provenance.

    Raises
    ------
    ValueError
        If the numbers of ops differ, the graph is a template of several replicas, or a duration or gap is
        negative or not finite.

    Examples
    --------
    >>> import numpy as np
    >>> from prism.model.dag_builder import DagBuilder
    >>> from prism.model.signature import Signature
    >>> b = DagBuilder()
    >>> first = b.add(Signature("forward"), [0])
    >>> _ = b.add(Signature("backward"), [0], after=[first])
    >>> measured = MeasuredSteps.from_arrays(b.build([0]), np.array([[1.0, 1.5], [2.0, 2.0]]))
    >>> measured.step_time.values.tolist()
    [3.0, 3.5]
    >>> measured.select([1]).step_time.values.tolist()
    [3.5]
    """

    dag: WorkloadDAG
    steps: xr.Dataset

    def __post_init__(self) -> None:
        if self.dag.lanes > 1 or self.steps.sizes["op"] != self.dag.n_ops:
            raise ValueError(
                f"the recording has {self.steps.sizes['op']} ops, the graph {self.dag.n_ops} x "
                f"{self.dag.lanes} replicas; unroll the graph, or use that of the recording"
            )
        for name in ("duration", "gap"):
            schema.finite_durations(self.steps[name].values, f"the recording's {name}")

    @classmethod
    def from_arrays(
        cls,
        dag: WorkloadDAG,
        duration: np.ndarray,
        gap: np.ndarray | None = None,
        *,
        step_time: np.ndarray | None = None,
        step: np.ndarray | None = None,
        source: str = "synthetic",
        **attributes,
    ) -> MeasuredSteps:
        """Make a recording from durations and gaps.

        Parameters
        ----------
        dag : WorkloadDAG
        duration, gap : ndarray (op, step), seconds
            No gaps by default.
        step_time : ndarray (step,), seconds, optional
            Computed from the graph by default.
        step : ndarray (step,), optional
            Numbers of the steps, 0 to n - 1 by default.
        source : str
            Where the durations come from, a word of `prism.base.schema`.
        **attributes
            Passed on to `prism.base.schema.dataset`.
        """
        gap = np.zeros_like(duration) if gap is None else gap
        if step_time is None:
            step_time = propagate(dag, duration, gap)[1].max(axis=0)
        variables = {
            "duration": (("step", "op"), duration.T),
            "gap": (("step", "op"), gap.T),
            "step_time": ("step", step_time),
        }
        step = np.arange(duration.shape[1]) if step is None else step
        attributes = {"made_by": "prism.traces.MeasuredSteps"} | attributes
        return cls(
            dag, schema.dataset(variables, coords={"step": step}, source=source, **attributes)
        )

    @property
    def n_steps(self) -> int:
        """Number of measured steps."""
        return self.steps.sizes["step"]

    @property
    def duration(self) -> xr.DataArray:
        """Durations without waiting, seconds (step, op)."""
        return self.steps["duration"]

    @property
    def gap(self) -> xr.DataArray:
        """Idle gaps before the ops, seconds (step, op)."""
        return self.steps["gap"]

    @property
    def step_time(self) -> xr.DataArray:
        """Step times, seconds (step,)."""
        return self.steps["step_time"]

    @property
    def source(self) -> str:
        """Source of the durations, a word of `prism.base.schema`."""
        return self.steps.attrs["source"]

    @property
    def provenance(self) -> dict:
        """Provenance of the recording."""
        return schema.provenance(self.steps)

    @cached_property
    def effective_gaps(self) -> np.ndarray:
        """Part of each idle gap that delays its step, seconds (step, op)."""
        return effective_gaps(self.dag, self.duration.values.T, self.gap.values.T).T

    def select(self, index) -> MeasuredSteps:
        """Keep some of the steps, by position: indices (which may repeat), a slice or a mask."""
        return MeasuredSteps(self.dag, self.steps.isel(step=index))

    def with_gaps(self, kinds: Mapping[str, str]) -> MeasuredSteps:
        """Turn the idle gaps of some kinds of op into ops of class gap.

        Parameters
        ----------
        kinds : mapping of op kind to ``effective`` or ``whole``
            Kinds that keep their gaps, and how much of them. Ops whose gap is zero in every step get none.

        Returns
        -------
        MeasuredSteps
            The same steps in the wider graph; ``gap`` is zero in it. Unchanged if there are no kinds.

        Raises
        ------
        ValueError
            Kinds that the graph does not have, other words than these two.
        """
        if not kinds:
            return self
        unknown = set(kinds) - {s.op for s in self.dag.signatures}
        wrong = set(kinds.values()) - {EFFECTIVE, WHOLE}
        if unknown or wrong:
            raise ValueError(
                f"gaps of {', '.join(sorted(unknown)) or ', '.join(sorted(wrong))}: give kinds of op of the "
                f"graph, {EFFECTIVE} or {WHOLE}"
            )
        kind = self.dag.kind
        whole = np.isin(kind, [k for k, how in kinds.items() if how == WHOLE])
        kept = np.where(whole, self.gap.values, self.effective_gaps)
        chosen = np.flatnonzero(np.isin(kind, list(kinds)) & (kept > 0).any(axis=0))
        wide, new = insert_gaps(self.dag, chosen), gap_places(self.dag.n_ops, chosen)
        duration = np.zeros((wide.n_ops, self.n_steps))
        duration[new] = self.duration.values.T
        duration[new[chosen] - 1] = kept[:, chosen].T
        return MeasuredSteps.from_arrays(
            wide,
            duration,
            step_time=self.step_time.values,
            step=self.steps["step"].values,
            source=self.source,
            provenance={**self.provenance, "gaps_kept": dict(kinds)},
        )


def measure_steps(trace: xr.Dataset, *, gpus_per_node: int = 8) -> MeasuredSteps:
    """Build the graph of a trace's step and observe every measured step in it.

    Parameters
    ----------
    trace : Dataset of `read_trace`
    gpus_per_node : int
        Passed on to `build_graph`.

    Returns
    -------
    MeasuredSteps
    """
    return observe(trace, build_graph(trace, gpus_per_node=gpus_per_node))


def observe(trace: xr.Dataset, graph: TraceGraph) -> MeasuredSteps:
    """Durations without waiting, idle gaps and step times of every measured step.

    For an op with members m: ``duration = max end_m - max start_m``, the time from the arrival of
    the last member (for a compute op simply its duration); a raw collective also holds the wait for
    the others. ``gap = max(0, max start_m - max end of predecessors)``: launch overhead, or a wait on
    something that the graph does not have. The step time is the end of the last op.

    Returns
    -------
    MeasuredSteps
        Its provenance states how far apart members' ends lie, the check of the join: ``end_spread_p50`` and
        ``end_spread_max``, seconds.
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
    return MeasuredSteps.from_arrays(
        dag,
        end - start,
        np.maximum(0.0, start - ready),
        step_time=end.max(axis=0),
        step=trace["step"].values,
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


def replay(measured: MeasuredSteps, *, gaps: bool = True) -> xr.Dataset:
    """Step times from the graph with each step's own durations: is the graph right?

    Two questions. With gaps: is there a dependency that the measured step did not obey? It would push
    ops later; a dependency that is *missing* cannot show, since its wait is in the gap. Without gaps:
    do the known dependencies explain when ops start? What is missing makes the replay early.

    Parameters
    ----------
    measured : MeasuredSteps
    gaps : bool
        Whether the idle gaps are replayed too.

    Returns
    -------
    Dataset
        ``replayed(step)`` and ``step_time(step)`` (measured), seconds, and ``relative_error(step)``.
    """
    duration = measured.duration.values.T
    gap = measured.gap.values.T if gaps else None
    _, finish = propagate(measured.dag, duration, gap)
    replayed, step_time = finish.max(axis=0), measured.step_time.values
    return schema.dataset(
        {
            "replayed": ("step", replayed),
            "step_time": ("step", step_time),
            "relative_error": ("step", replayed / step_time - 1),
        },
        coords={"step": measured.steps["step"].values},
        made_by="prism.traces.replay",
        source=measured.source,
        provenance={**measured.provenance, "gaps": gaps},
    )
