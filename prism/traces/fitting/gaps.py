"""Idle gaps: which of them delay the step, and which are only waiting.

Before an op starts there may be idle time that no known dependency explains. Some of it is work that the
graph does not have (launches, the host), some is waiting for something that the graph does not have, in
the shadow of what the step waits for anyway. Drawing the second kind anew counts a wait twice.

Only the *effective* gap counts: what is left of it when the op's slack is used up,

    effective_i = max(0, gap_i - slack_i),

with the slack from the replay of its own step, with all its gaps. Replacing every gap by its effective part
leaves each measured step time as it was: ops of the longest path have no slack, and keep theirs. A kind of op
keeps its gaps if leaving them out moves the mean replay by more than `LEAST_SHIFT`; they become ops of class
``gap`` before it, with pools and loadings of their own.

Idle time that is always there, and waits for nothing, has to be drawn whole: its effective part is small only
where something else was late. Both ways replay each step alike, so replay cannot tell them apart; the steps'
distribution can (`prism.traces.choose_gaps`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
import xarray as xr

from prism.base import schema
from prism.model import _graph_loops
from prism.model.dag import PER_OP, WorkloadDAG, pointers
from prism.model.engine.montecarlo import propagate
from prism.model.signature import Signature, stable_hash
from prism.traces.measured_steps import check_ops

#: a kind of op whose gaps move the mean replay by less than this keeps none
LEAST_SHIFT = 0.001
#: and all that keep none together move it by so many times that at most
GIVEN_UP = 5
BEFORE = "gap before "
EFFECTIVE, WHOLE = "effective", "whole"


def effective_gaps(dag: WorkloadDAG, observed: xr.Dataset) -> np.ndarray:
    """The part of each idle gap that delays its step, seconds (step, op).

    Parameters
    ----------
    dag : WorkloadDAG
    observed : Dataset of `observe`
    """
    check_ops(observed, dag)
    duration, gap = observed["duration"].values.T, observed["gap"].values.T
    _, finish = propagate(dag, duration, gap)
    latest = np.broadcast_to(finish.max(axis=0), finish.shape).copy()
    _graph_loops.latest_finish(dag.pred_ptr, dag.pred, np.ascontiguousarray(gap),
                         np.ascontiguousarray(duration), latest)  # fmt: skip
    return np.maximum(0.0, gap - (latest - finish)).T


def gap_shifts(dag: WorkloadDAG, observed: xr.Dataset) -> dict[str, float]:
    """How much earlier the mean replay is without the effective gaps of each kind of op, relative.

    Returns
    -------
    dict of op kind to float >= 0
    """
    shift, kinds = _replays(dag, observed)
    return {kind: shift([k for k in kinds if k != kind]) for kind in kinds}


def kept_kinds(dag: WorkloadDAG, observed: xr.Dataset) -> dict[str, float]:
    """Kinds of op that keep their gaps, chosen on the steps that are given: never on those of a test.

    Kinds are given up one after the other, the one that moves the replay least first, if giving it up moves
    the mean replay by no more than `LEAST_SHIFT`, and all that were given up by no more than `GIVEN_UP` times
    that: gaps of several kinds at once may hide each other, and none of them moves it alone.

    Returns
    -------
    dict of op kind to float
        The kinds that are kept, the one that moves the mean replay most by itself first, and how much.
    """
    shift, kinds = _replays(dag, observed)
    alone = gap_shifts(dag, observed)
    kept, now = kinds, 0.0
    for kind in sorted(kinds, key=lambda k: alone[k]):
        fewer = [k for k in kept if k != kind]
        without = shift(fewer)
        if without - now <= LEAST_SHIFT and without <= GIVEN_UP * LEAST_SHIFT:
            kept, now = fewer, without
    return {k: alone[k] for k in sorted(kept, key=lambda k: -alone[k])}


def _replays(
    dag: WorkloadDAG, observed: xr.Dataset
) -> tuple[Callable[[list[str]], float], list[str]]:
    """How much earlier the mean replay is if only some kinds keep their effective gaps, and all kinds."""
    gaps, duration = effective_gaps(dag, observed).T, observed["duration"].values.T
    kind = dag.kind

    def mean(gap: np.ndarray) -> float:
        return float(propagate(dag, duration, gap)[1].max(axis=0).mean())

    whole = mean(gaps)

    def shift(kept: list[str]) -> float:
        return 1 - mean(np.where(np.isin(kind, kept)[:, None], gaps, 0.0)) / whole if whole else 0.0

    return shift, list(dict.fromkeys(kind.tolist()))


def add_gaps(
    dag: WorkloadDAG, observed: xr.Dataset, kinds: Mapping[str, str]
) -> tuple[WorkloadDAG, xr.Dataset]:
    """A graph with an op of class gap before each op of some kinds, and the steps observed in it.

    Parameters
    ----------
    dag : WorkloadDAG without lanes
    observed : Dataset of `observe`
    kinds : mapping of op kind to ``effective`` or ``whole``
        Which kinds keep their gaps, and how much of them. Ops whose gap is zero in every step get none.

    Returns
    -------
    dag, observed
        The same step with gaps as ops; ``gap`` is zero in it. Unchanged if there are no kinds.
    """
    if not kinds:
        return dag, observed
    unknown = set(kinds) - {s.op for s in dag.signatures}
    wrong = set(kinds.values()) - {EFFECTIVE, WHOLE}
    if unknown or wrong:
        raise ValueError(
            f"gaps of {', '.join(sorted(unknown)) or ', '.join(sorted(wrong))}: give kinds of op of the graph, "
            f"{EFFECTIVE} or {WHOLE}"
        )
    kind = dag.kind
    whole = np.isin(kind, [k for k, how in kinds.items() if how == WHOLE])
    kept = np.where(whole, observed["gap"].values, effective_gaps(dag, observed))
    chosen = np.flatnonzero(np.isin(kind, list(kinds)) & (kept > 0).any(axis=0))
    wide = insert_gaps(dag, chosen)
    new = gap_places(dag.n_ops, chosen)
    duration = np.zeros((observed.sizes["step"], wide.n_ops))
    duration[:, new] = observed["duration"].values
    duration[:, new[chosen] - 1] = kept[:, chosen]
    return wide, schema.dataset(
        {
            "duration": (("step", "op"), duration),
            "gap": (("step", "op"), np.zeros_like(duration)),
            "step_time": ("step", observed["step_time"].values),
        },
        coords={"step": observed["step"].values},
        made_by="prism.traces.add_gaps",
        source=observed.attrs["source"],
        provenance={**schema.provenance(observed), "gaps_kept": dict(kinds)},
    )


def remove_gaps(dag: WorkloadDAG) -> WorkloadDAG:
    """The graph that `add_gaps` started from: ops wait again for what their gaps wait for."""
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
