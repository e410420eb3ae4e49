"""Transfer of a fitted model to replicas, microbatches and stages that were not measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from prism.model.coupling import Coupling
from prism.model.dag import WorkloadDAG
from prism.model.pools import Fixed
from prism.model.signature import PoolKey, Signature
from prism.model.step_model import StepModel
from prism.traces import MIN_STEPS, choose_gaps, fit_coupling, fit_pools
from prism.traces.gap_ops import BEFORE, insert_gaps
from prism.traces.measured_steps import MeasuredSteps


def apply_to(model: StepModel, dag: WorkloadDAG) -> StepModel:
    """The step of another graph with the pools, gaps and coupling of a fitted model.

    An op of the new graph takes the pool of its finest key that the model holds: one that was measured on its
    rank and at its place in the step, else at any place, else anywhere. What ops cost is carried, not
    what a group's size costs: a collective takes the pool of its signature, over however many ranks it goes;
    of an operation that was measured within a node only, that pool serves between nodes too. Fit to whole
    groups: a trace of some of a collective's members holds their wait for the others.

    Parameters
    ----------
    model : StepModel
        Result of `prism.traces.fit_model`.
    dag : WorkloadDAG
        Graph of `prism.traces.build_graph` with the same names of ops.

    Returns
    -------
    StepModel

    Raises
    ------
    ValueError
        If the graph has operations that the model never saw, all of them named.
    """
    kinds = {s.op.removeprefix(BEFORE) for s in model.dag.signatures if s.role == "gap"}
    names = dag.kind
    chosen = np.flatnonzero(np.isin(names, sorted(kinds)))
    wide = insert_gaps(dag, chosen) if chosen.size else dag
    known = {key.signature for key in model.pools}
    pools = dict(model.pools)
    for signature in wide.signatures:
        if signature in known:
            continue
        if signature.role == "gap":  # the kind keeps its gaps, but none was seen here
            pools[PoolKey(signature)] = Fixed(0.0)
        elif like := _other_scope(signature, known):
            pools[PoolKey(signature)] = model.pools[PoolKey(like)]
    return StepModel(wide, pools, model.coupling, source=model.source)


def _other_scope(signature: Signature, known: set[Signature]) -> Signature | None:
    """The same operation where its group spans other machines, or as many."""
    return next((s for s in sorted(known) if replace(s, scope=signature.scope) == signature), None)


def predict_stage(measured: MeasuredSteps, stage: int, *, like: int) -> StepModel:
    """The model of a step of which one pipeline stage was not measured: its ops take a sibling's pools.

    Nothing of the stage's own measured ops goes into pools and coupling. Transfers between stages, and
    collectives of several, stay; so do the kinds of op that keep idle gaps, which only the replay of whole
    steps can tell.

    Parameters
    ----------
    measured : MeasuredSteps
    stage : int
        Whose measured durations are left out.
    like : int
        The stage whose pools serve instead.

    Returns
    -------
    StepModel

    Raises
    ------
    ValueError
        If the graph lacks one of the stages, or they have different operations.
    """
    _check_present("stage", measured.dag.stage, stage, like)
    return _without(measured, lambda g: _siblings(g, g.stage, {stage: like}, by=g.dp))


def predict_replicas(measured: MeasuredSteps, keep: Sequence[int]) -> StepModel:
    """The model of a step of which only some data-parallel replicas were measured: ops of the others take the
    pools of those, in turn.

    Collectives of all replicas stay, since what their transfer takes shows on every member; so do the kinds of
    op that keep idle gaps, which only the replay of whole steps can tell.

    Parameters
    ----------
    measured : MeasuredSteps
    keep : sequence of int
        Replicas whose measured durations are used.

    Returns
    -------
    StepModel

    Raises
    ------
    ValueError
        If the graph lacks one of the replicas, or they have different operations.
    """
    if not len(keep):
        raise ValueError("no replica is kept; name at least one")
    dag = measured.dag
    _check_present("replica", dag.dp, *keep)
    kept = sorted(set(keep))
    lost = [d for d in sorted(set(dag.dp.tolist())) if d not in kept]
    like = {d: kept[i % len(kept)] for i, d in enumerate(lost)}
    return _without(measured, lambda g: _siblings(g, _own_replica(g), like, by=g.stage))


def _own_replica(dag: WorkloadDAG) -> np.ndarray:
    """Replica of ops within one, -1 for collectives of several, (op,)."""
    shared = np.isin([s.role for s in dag.signatures], ["dp", "world"])[dag.signature]
    return np.where(shared, -1, dag.dp)


def _check_present(what: str, have: np.ndarray, *wanted: int) -> None:
    present = sorted({int(v) for v in have if v >= 0})
    for v in wanted:
        if v not in present:
            raise ValueError(
                f"there is no {what} {v}; the graph has {', '.join(map(str, present))}"
            )
    if what == "stage" and len(set(wanted)) < len(wanted):
        raise ValueError(f"stage {wanted[0]} cannot stand in for itself")


def _without(measured: MeasuredSteps, find: Callable[[WorkloadDAG], np.ndarray]) -> StepModel:
    """Fit blind to the ops that have a sibling, which then serves for them."""
    # what delays a step only shows in the replay of that whole step
    steps = measured.with_gaps(choose_gaps(measured))
    wide = steps.dag
    sibling = find(wide)
    seen = sibling == ALONE
    pools = fit_pools(steps, ops=seen)
    enough = steps.n_steps >= MIN_STEPS
    coupling = fit_coupling(steps, pools, ops=seen).coupling if enough else Coupling.independent()
    pools |= {PoolKey(s): Fixed(0.0) for s in wide.signatures if PoolKey(s) not in pools}
    model = StepModel(wide, pools, coupling, source=steps.source)
    return model.override(
        ~seen, lambda op, _: model.op_pools[s] if (s := sibling[op]) >= 0 else Fixed(0.0)
    )


#: an op that keeps its own pool; one that has no sibling
ALONE, MISSING = -1, -2


def _siblings(
    dag: WorkloadDAG, place: np.ndarray, like: Mapping[int, int], *, by: np.ndarray
) -> np.ndarray:
    """For each op of a place in `like` the op that does the same at the other place, else -1, (op,).

    Gaps that only one of the two places has are `MISSING`; other ops are refused.
    """
    names = [dag.signatures[i].op for i in dag.signature]
    # the shape names the stage in traces without shapes
    shapes = [dag.signatures[i].shape if by is dag.stage else "" for i in dag.signature]
    seen: Counter = Counter()
    number: dict[tuple, int] = {}
    what: list[tuple] = []
    for op in range(dag.n_ops):
        key = (
            names[op],
            shapes[op],
            int(by[op]),
            int(dag.microbatch[op]),
            int(dag.position[op]),
        )
        what.append((*key, seen[int(place[op]), key]))
        seen[int(place[op]), key] += 1
        number[int(place[op]), what[-1]] = op
    out = np.full(dag.n_ops, ALONE)
    for op in np.flatnonzero(np.isin(place, list(like))):
        other = like[int(place[op])]
        found = number.get((other, what[op]), MISSING)
        if found == MISSING and not names[op].startswith(BEFORE):
            raise ValueError(
                f"{dag.describe(op)} has no sibling at {other}, which does other things"
            )
        out[op] = found
    return out
