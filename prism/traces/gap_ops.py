"""Graphs in which idle gaps are ops: a gap stands before its op, and waits for what the op waited for."""

from __future__ import annotations

import dataclasses

import numpy as np

from prism.model import _graph_loops
from prism.model.dag import PER_OP, WorkloadDAG, pointers
from prism.model.engine.montecarlo import propagate
from prism.model.signature import Signature, stable_hash

BEFORE = "gap before "
EFFECTIVE, WHOLE = "effective", "whole"


def effective_gaps(dag: WorkloadDAG, duration: np.ndarray, gap: np.ndarray) -> np.ndarray:
    """Compute the part of each idle gap that delays its step, seconds (op, step).

    ``effective_i = max(0, gap_i - slack_i)``, with the slack of the step's own replay with all its gaps.

    Parameters
    ----------
    dag : WorkloadDAG
    duration, gap : ndarray (op, step), seconds
    """
    _, finish = propagate(dag, duration, gap)
    latest = np.broadcast_to(finish.max(axis=0), finish.shape).copy()
    _graph_loops.latest_finish(dag.pred_ptr, dag.pred, np.ascontiguousarray(gap),
                         np.ascontiguousarray(duration), latest)  # fmt: skip
    return np.maximum(0.0, gap - (latest - finish))


def remove_gaps(dag: WorkloadDAG) -> WorkloadDAG:
    """The graph that `MeasuredSteps.with_gaps` started from: ops wait again for what their gaps wait for."""
    is_gap = np.array([s.op.startswith(BEFORE) and s.role == "gap" for s in dag.signatures])
    is_gap = is_gap[dag.signature]
    if not is_gap.any():
        return dag
    kept = np.flatnonzero(~is_gap)
    new = np.full(dag.n_ops, -1)
    new[kept] = np.arange(kept.size)
    preds = []
    for op in kept:
        own = dag.pred[dag.pred_ptr[op] : dag.pred_ptr[op + 1]]
        through = [
            dag.pred[dag.pred_ptr[p] : dag.pred_ptr[p + 1]] if is_gap[p] else [p] for p in own
        ]
        preds.append(np.unique(new[np.concatenate(through).astype(int)]) if through else own)
    used = np.unique(dag.signature[kept])
    signature = np.searchsorted(used, dag.signature[kept]).astype(np.int32)
    names = tuple(dag.signatures[i] for i in used)
    return _with_ops(dag, kept, preds, names, signature=signature)


def _with_ops(
    dag: WorkloadDAG,
    source: np.ndarray,
    preds: list[np.ndarray],
    signatures: tuple[Signature, ...],
    **changed: np.ndarray,
) -> WorkloadDAG:
    """A graph whose ops are those of `source`, but for the columns that changed, and wait for `preds`."""
    members = [dag.member[dag.member_ptr[op] : dag.member_ptr[op + 1]] for op in source]
    return dataclasses.replace(
        dag,
        **({f: getattr(dag, f)[source] for f in PER_OP} | changed),
        signatures=signatures,
        pred_ptr=pointers([p.size for p in preds]),
        pred=np.concatenate(preds).astype(np.int32),
        member_ptr=pointers([m.size for m in members]),
        member=np.concatenate(members).astype(np.int32),
    )


def gap_places(n_ops: int, chosen: np.ndarray) -> np.ndarray:
    """Index of each op once a gap stands before the chosen ones; a gap's is one less than its op's."""
    before = np.zeros(n_ops, np.int64)
    before[chosen] = 1
    return np.arange(n_ops) + np.cumsum(before)


def insert_gaps(dag: WorkloadDAG, chosen: np.ndarray) -> WorkloadDAG:
    """The graph with an op of class gap before each chosen op, which waits for it alone."""
    new = gap_places(dag.n_ops, chosen)
    n = dag.n_ops + chosen.size
    source = np.empty(n, np.int64)  # the op that each new one is, or stands before
    source[new], source[new[chosen] - 1] = np.arange(dag.n_ops), chosen
    is_gap = np.zeros(n, bool)
    is_gap[new[chosen] - 1] = True
    signatures, signature = _signatures(dag, source, is_gap)
    key = np.where(is_gap, dag.key[source] ^ np.uint64(stable_hash("gap")), dag.key[source])
    preds = []
    for i, op in enumerate(source):
        follows = i > 0 and is_gap[i - 1] and source[i - 1] == op
        own = dag.pred[dag.pred_ptr[op] : dag.pred_ptr[op + 1]]
        preds.append(np.array([i - 1]) if follows else new[own])
    return _with_ops(dag, source, preds, signatures, signature=signature, key=key)


def _signatures(dag: WorkloadDAG, source: np.ndarray, is_gap: np.ndarray):
    """Signatures with those of gaps appended, and the index of each op among them."""
    index = dag.signature[source].astype(np.int32)
    before = np.unique(index[is_gap])
    extra = [
        Signature(f"{BEFORE}{dag.signatures[i].op}", dag.signatures[i].shape, role="gap")
        for i in before
    ]
    distinct = list(dict.fromkeys(extra))
    place = {i: len(dag.signatures) + distinct.index(s) for i, s in zip(before, extra, strict=True)}
    index[is_gap] = [place[i] for i in index[is_gap]]
    return (*dag.signatures, *distinct), index
