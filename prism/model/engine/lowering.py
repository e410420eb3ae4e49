"""A step model as the plain arrays that the engine reads."""

from __future__ import annotations

import hashlib
import math

import numpy as np
from scipy.stats import norm

from prism.model.coupling import LEVELS, Coupling, Loading
from prism.model.dag import WorkloadDAG
from prism.model.engine import kernels
from prism.model.engine.arrays import Arrays, Draw, Graph, Override, SharedScores
from prism.model.pools import DurationPool, Empirical, Lowered, MaxOf, lower
from prism.model.signature import ROLES, stable_hash
from prism.model.step_model import StepModel

PHI = norm.cdf(kernels.score_grid())


def _largest_of(width: int) -> np.ndarray:
    """Octave table of the largest of `width` normal scores: ``Phi^-1(u^(1/k))``."""
    v = kernels.octave_tails()
    # 1 - (1 - v)^(1/k) without cancellation
    upper = -np.expm1(np.log1p(-v) / width)
    return np.concatenate([norm.ppf(v ** (1 / width)), norm.isf(upper)])


def lower_model(model: StepModel, *, seed: int, draws_per_job: int, keep: bool) -> Arrays:
    """Arrays of a model. With `keep`, every op has a row of finish times of its own."""
    dag = model.dag
    rows = _Scores(dag, model.coupling, seed)
    draw = _draw_arrays(model, rows, seed)
    own_slots = np.arange(dag.n_ops, dtype=np.int32)
    slot, _, is_sink = dag.slots
    alone = dag.lanes == 1
    graph = Graph(
        dag.pred_ptr,
        dag.pred,
        own_slots if keep else slot,
        is_sink,
        _constant(np.zeros(dag.n_ops, np.int32)) if alone else dag.grouping,
        _constant(np.zeros((1, 1), np.int32)) if alone else dag.leaders,
        dag.replica,
        component_of_op(dag),
    )
    return Arrays(graph, draw, _override_arrays(model), rows.arrays(draws_per_job))


def fingerprint(model: StepModel, *, seed: int) -> str:
    """A hash of all that draws depend on: models with equal ones have equal draws."""
    arrays = lower_model(model, seed=seed, draws_per_job=1, keep=False)
    draw = arrays.draw
    # tables by what they hold: equal models may number them in another order
    held = [
        hashlib.blake2b(t.tobytes(), digest_size=8).digest()
        for t in np.split(draw.table, draw.table_ptr[1:-1])
    ]
    tables = np.array([int.from_bytes(h, "little") for h in held], np.uint64)[draw.table_of_op]
    others = draw._replace(table_of_op=tables, table_ptr=np.empty(0), table=np.empty(0))
    digest = hashlib.blake2b(digest_size=16)
    for part in (*arrays.graph, *others, *arrays.override, *arrays.shared):
        array = np.ascontiguousarray(part)
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _constant(array: np.ndarray) -> np.ndarray:
    """Read-only like the arrays of a graph: numba compiles for either kind separately."""
    array.setflags(write=False)
    return array


def component_of_op(dag: WorkloadDAG) -> np.ndarray:
    """Index into `ROLES` of each op, int32 (op,)."""
    roles = np.array([ROLES.index(s.role) for s in dag.signatures], np.int32)
    return roles[dag.signature]


def _draw_arrays(model: StepModel, rows: _Scores, seed: int) -> Draw:
    dag = model.dag
    pools, pool_of_op = model.distinct_pools
    lowered = [lower(p) for p in pools]
    # ops of one pool may read it in different forms: with shared scores or without, with an event
    form = pool_of_op * 4 + rows.is_coupled * 2 + (rows.event >= 0)
    distinct, form_of_op = np.unique(form, return_inverse=True)
    tables = _Tables()
    table_of_form = [tables.add(lowered[f // 4], bool(f & 2), bool(f & 1)) for f in distinct]
    index = np.array(table_of_form, np.int32)[form_of_op]
    kind, table_ptr, table = tables.arrays()
    return Draw(
        index,
        kind[index],
        table_ptr,
        table,
        np.array([x.scale for x in lowered])[pool_of_op],
        np.array([x.shift for x in lowered])[pool_of_op],
        dag.key ^ np.uint64(stable_hash("seed", int(seed))),
        rows.own,
        rows.own_of,
        rows.loading,
        rows.row,
        rows.event,
    )


class _Tables:
    """Distinct tables of pools, each in the form that its ops read."""

    def __init__(self) -> None:
        self._index: dict[tuple[int, int, int], int] = {}
        self._kinds: list[int] = []
        self._rows: list[np.ndarray] = []
        self._alive: list[DurationPool] = []  # identities stay taken while the table is built

    def add(self, pool: Lowered, coupled: bool, event: bool) -> int:
        kind = self._kind(pool, coupled, event)
        key = (0 if kind == kernels.CONSTANT else id(pool.base), kind, pool.largest_of)
        if key not in self._index:
            self._index[key] = len(self._rows)
            self._kinds.append(kind)
            base = pool.base if pool.largest_of == 1 else MaxOf(pool.base, pool.largest_of)
            self._rows.append(_table(base, kind))
            self._alive.append(pool.base)
        return self._index[key]

    @staticmethod
    def _kind(pool: Lowered, coupled: bool, event: bool) -> int:
        samples = isinstance(pool.base, Empirical) and pool.largest_of == 1
        if pool.scale == 0.0:
            return kernels.CONSTANT
        if event:
            return kernels.EVENT_STEP if samples else kernels.EVENT
        if coupled:
            return kernels.SCORE_STEP if samples else kernels.SCORE
        return kernels.STEP if samples else kernels.OCTAVE

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        sizes = [r.size for r in self._rows]
        ptr = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        return np.array(self._kinds, np.int64), ptr, np.concatenate(self._rows)


def _table(base: DurationPool, kind: int) -> np.ndarray:
    if kind == kernels.CONSTANT:
        return np.zeros(1)
    if kind in (kernels.STEP, kernels.SCORE_STEP, kernels.EVENT_STEP):
        return np.asarray(base.samples)
    if kind == kernels.SCORE:
        z = kernels.score_grid()
        values = np.where(z < 0, base.quantile(norm.cdf(z)), base.upper_quantile(norm.sf(z)))
    else:
        v = kernels.octave_tails()
        values = np.concatenate([base.quantile(v), base.upper_quantile(v)])
    return np.maximum(values, 0.0)


def _override_arrays(model: StepModel) -> Override:
    """Overrides of single replicas, by op: replica, and the map of the op's own duration."""
    per_op: dict[int, list[tuple[int, float, float]]] = {}
    for (op, lane), pool in sorted(model.overrides.items(), key=lambda item: item[0]):
        if lane != -1:
            new, old = lower(pool), lower(model.op_pools[op])
            scale = new.scale / old.scale if old.scale else 0.0
            per_op.setdefault(op, []).append((lane, scale, new.shift - scale * old.shift))
    counts = np.zeros(model.dag.n_ops, np.int64)
    for op, entries in per_op.items():
        counts[op] = len(entries)
    flat = [e for _, entries in sorted(per_op.items()) for e in entries]
    return Override(
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        np.array([e[0] for e in flat], np.int32),
        np.array([e[1] for e in flat], np.float64),
        np.array([e[2] for e in flat], np.float64),
    )


class _Scores:
    """Shared scores of a model: the distinct ones, and which of them each op loads how much."""

    def __init__(self, dag: WorkloadDAG, coupling: Coupling, seed: int) -> None:
        self.seed, self.dag = seed, dag
        self._keys: dict[tuple, int] = {}
        self._lanes: list[np.ndarray] = []
        self._stays: list[bool] = []
        n = dag.n_ops
        kinds = [s.op for s in dag.signatures]
        self.event_names = [k for k in coupling.events if k in kinds]
        self.event_p = np.array([coupling.events[k] for k in self.event_names])
        struck = np.array(
            [self.event_names.index(k) if k in self.event_names else -1 for k in kinds]
        )
        self.event = struck[dag.signature].astype(np.int64)
        self._events_with_scores(coupling)
        width = 0 if coupling.is_independent else 2 * len(LEVELS)
        self.loading, self.row = np.zeros((n, width)), np.zeros((n, width), np.int32)
        for index, signature in enumerate(dag.signatures):
            levels = coupling.loadings.get(signature.op, {})
            if levels:
                ops = np.flatnonzero(dag.signature == index)
                for i, (level, loading) in enumerate(levels.items()):
                    self._load(ops, signature.coupling_class, level, loading, 2 * i)
        share = np.sum(self.loading**2, axis=1)
        self.own = np.sqrt(np.maximum(0.0, 1.0 - share))
        # widths: the own score is the maximum of so many, an op of width 1 the plain normal
        self.widths, self.own_of = np.unique(np.append(1, dag.width), return_inverse=True)
        self.own_of = self.own_of[1:]
        self.is_coupled = (share > 0) | (dag.width > 1)
        folded = {kinds[s] for s in np.unique(dag.signature[dag.width > 1])}
        for kind in folded & set(coupling.loadings):
            if coupling.loadings[kind].get("rank", Loading()).share > 0:
                raise ValueError(
                    f"{kind} folds several ranks into one op, but its ranks have scores of their own; "
                    "write the ranks out, or drop the loading of level rank"
                )

    def _events_with_scores(self, coupling: Coupling) -> None:
        """Step scores that events go with: (event, class) loadings and rows, and what is left of its own.

        An event that goes with the step score of its own ops would move their marginals: they are drawn from
        the tail that is struck with a score that is not uniform there any more."""
        for kind, classes in coupling.event_scores.items():
            own = {s.coupling_class for s in self.dag.signatures if s.op == kind} & set(classes)
            if own:
                raise ValueError(
                    f"the event of {kind} goes with the step score of {own.pop()}, which is its own class: that "
                    "would move its pools; let it go with other classes only"
                )
        scores = [coupling.event_scores.get(k, {}) for k in self.event_names]
        classes = sorted({c for s in scores for c in s})
        self.event_loading = np.array(
            [[s.get(c, 0.0) for c in classes] for s in scores], float
        ).reshape(len(scores), len(classes))
        # the row that ops of the class load, whether or not any of them does
        nobody = np.zeros(self.dag.lanes, np.int32)
        rows = [self._row((c, "step", False), nobody, False) for c in classes]
        self.event_row = np.tile(np.array(rows, np.int64), (len(scores), 1))
        self.event_own = np.sqrt(np.maximum(0.0, 1.0 - np.sum(self.event_loading**2, axis=1)))

    def _load(self, ops: np.ndarray, name: str, level: str, loading: Loading, column: int) -> None:
        """Let ops of a class load the scores of a level, in two columns."""
        ops, identity, lanes = self._identities(ops, level)
        for j, (value, stays) in enumerate(
            ((loading.transient, False), (loading.persistent, True))
        ):
            if value == 0.0 or ops.size == 0:
                continue
            _, first, which = np.unique(
                np.column_stack([identity, lanes]), axis=0, return_index=True, return_inverse=True
            )
            rows = [
                self._row((name, level, *map(int, identity[f]), stays), lanes[f], stays)
                for f in first
            ]
            self.loading[ops, column + j] = value
            self.row[ops, column + j] = np.array(rows, np.int32)[which.reshape(-1)]

    def _identities(self, ops: np.ndarray, level: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The ops that have a level, what names the score that each shares (op, 0 or 1), and the number
        of that score in each lane (op, lane)."""
        dag = self.dag
        nothing = np.zeros((ops.size, 0), np.int64)
        if level == "step":
            return ops, nothing, np.zeros((ops.size, dag.lanes), np.int32)
        # a collective is of several ranks, perhaps of several replicas; a transfer has a microbatch
        ops = ops[dag.grouping[ops] == 0]
        ops = ops[(dag.microbatch if level == "microbatch" else dag.rank)[ops] >= 0]
        every = np.broadcast_to(np.arange(dag.lanes), (ops.size, dag.lanes))
        replica = every if dag.lanes > 1 else dag.replica[ops, None]
        rank = dag.rank[ops, None]
        if level == "rank":
            return ops, rank, replica
        if level == "node":
            return ops, nothing[: ops.size], dag.node_of_rank[rank, replica]
        return ops, dag.microbatch[ops, None], every if dag.lanes > 1 else dag.dp[ops, None]

    def _row(self, key: tuple, lanes: np.ndarray, stays: bool) -> int:
        # rows of one key may differ in their lanes (nodes of different ranks, unrolled replicas)
        distinct = (*key, lanes.tobytes())
        if distinct not in self._keys:
            self._keys[distinct] = len(self._lanes)
            self._lanes.append(np.asarray(lanes, np.int32))
            self._stays.append(stays)
        return self._keys[distinct]

    def arrays(self, draws_per_job: int) -> SharedScores:
        keys = [stable_hash("score", self.seed, *k[:-1]) for k in self._keys]
        events = [stable_hash("event", self.seed, name) for name in self.event_names]
        return SharedScores(
            np.array(keys, np.uint64),
            np.array(self._lanes, np.int32).reshape(-1, self.dag.lanes),
            np.array(self._stays, bool),
            np.array(events, np.uint64),
            self.event_p,
            self.event_own,
            self.event_loading,
            self.event_row,
            draws_per_job,
            np.array([_largest_of(int(w)) for w in self.widths]),
            PHI,
        )


def lanes_per_block(dag: WorkloadDAG, *, keep: bool, rows: int) -> int:
    """Draws in a block: enough lanes to pay for a call, few enough for the caches and for memory."""
    per_draw = dag.lanes * 8 * (dag.n_ops if keep else dag.slots[1] + rows)
    by_memory = max(1, MEMORY_PER_BLOCK // per_draw)
    return int(max(1, min(math.ceil(kernels.LANES / dag.lanes), by_memory)))


MEMORY_PER_BLOCK = 64 << 20
