"""The arrays that `lowering` writes and `kernels` read, by name.

Dimensions: *op* in topological order; *lane* is a replica of a template graph (one lane where the graph is
written out); *score* is one shared normal score; *event* is one kind of event; *level* has two columns, a
transient and a persistent one, for each of `prism.model.coupling.LEVELS`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Graph(NamedTuple):
    """Dependencies of the ops, and where each op keeps its finish time."""

    pred_ptr: np.ndarray  #: (op + 1,) row pointers into `pred`
    pred: np.ndarray  #: predecessors of every op, one after the other
    slot: np.ndarray  #: (op,) row of finish times that the op writes
    is_sink: np.ndarray  #: (op,) whether no op depends on it
    grouping: np.ndarray  #: (op,) row of `leaders`; 0 joins nothing
    leaders: np.ndarray  #: (grouping, lane) first replica of the group that each replica belongs to
    replica: np.ndarray  #: (op,) replica number of an op that is written out
    component: np.ndarray  #: (op,) index into `prism.model.signature.ROLES`


class Draw(NamedTuple):
    """Map of every op from random bits to its duration, ``shift + scale T``."""

    table_of_op: np.ndarray  #: (op,) index of the table that the op reads
    kind: np.ndarray  #: (op,) form of that table: `kernels.CONSTANT`, ..., `kernels.EVENT_STEP`
    table_ptr: np.ndarray  #: (table + 1,) row pointers into `table`
    table: np.ndarray  #: values of every table, one after the other, seconds
    scale: np.ndarray  #: (op,)
    shift: np.ndarray  #: (op,) seconds
    key: np.ndarray  #: (op,) uint64 key of the op's random bits
    own: np.ndarray  #: (op,) weight of the op's own normal score
    own_of: np.ndarray  #: (op,) row of `SharedScores.own_tables` that the own score is drawn from
    loading: np.ndarray  #: (op, level) weights of the shared scores
    row: np.ndarray  #: (op, level) which shared score each weight goes with
    event: np.ndarray  #: (op,) index of the event that strikes the op, -1 for none


class Override(NamedTuple):
    """Durations of single replicas, ``shift + scale T`` of the op's own duration T."""

    ptr: np.ndarray  #: (op + 1,) row pointers into the others
    replica: np.ndarray
    scale: np.ndarray
    shift: np.ndarray  #: seconds


class SharedScores(NamedTuple):
    """Normal scores that several ops share, and the events that strike many ops of one draw."""

    row_key: np.ndarray  #: (score,) uint64 keys
    row_lane: np.ndarray  #: (score, lane) number that tells the lanes of one score apart
    row_stays: np.ndarray  #: (score,) whether the score is drawn once a job
    event_key: np.ndarray  #: (event,) uint64 keys
    event_p: np.ndarray  #: (event,) probability of a strike in one draw
    event_own: (
        np.ndarray
    )  #: (event,) weight of the event's own normal score, 1 if it loads no other
    event_loading: np.ndarray  #: (event, class) weights of step scores
    event_row: np.ndarray  #: (event, class) which shared score each weight goes with
    draws_per_job: int  #: consecutive draws that share the scores that stay
    own_tables: np.ndarray  #: octave tables of the largest of 1, ... normal scores
    phi: np.ndarray  #: the normal distribution function on `kernels.score_grid`


class Arrays(NamedTuple):
    """A step model, ready for the engine: the arguments of `kernels.simulate` up to the range of draws."""

    graph: Graph
    draw: Draw
    override: Override
    shared: SharedScores


class Outputs(NamedTuple):
    """Results that the engine fills; an array without elements is not wanted."""

    step_time: np.ndarray  #: (draw,) seconds
    finish: np.ndarray  #: (chosen op, draw) seconds
    critical: np.ndarray  #: (op,) number of draws with the op on the longest path
    exposed: np.ndarray  #: (draw, component) seconds of the longest path
    busy: np.ndarray  #: (draw, component) seconds of all ops


class Scratch(NamedTuple):
    """Work space of one block of lanes, reused by all its ops."""

    bits: np.ndarray  #: (lane,) uint64
    node: np.ndarray  #: (lane,) int32
    weight: np.ndarray  #: (lane,)
    counter: np.ndarray  #: (lane,) uint64
