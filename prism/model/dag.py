"""The graph of one training step: ops, what they are, where they run, what they wait for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from prism.model import _graph_loops
from prism.model.engine import kernels
from prism.model.signature import Category, PoolKey, Signature


@dataclass(frozen=True, eq=False)
class WorkloadDAG:
    """Immutable graph of one step, ops in topological order.

    A collective is *one* op: it starts when its last participant arrives and releases all of them
    when the transfer is done. Data-parallel replicas need not be written out: a *template* holds the
    ops of one replica, and ops that join replicas say which of them meet. `unroll` writes it out.

    Attributes
    ----------
    signatures, sites : tuple
        Distinct signatures; distinct sites (a rank, a process group, a link).
    signature, site : ndarray (op,), int32
        Index into `signatures` and `sites`.
    position, stage, microbatch, rank : ndarray (op,), int32
        Slot within the step for the pool's key, pipeline stage, microbatch, rank; -1 where the op
        has none (a collective has no single rank).
    key : ndarray (op,), uint64
        Random identity: depends on what and where the op is, not on its index.
    pred_ptr : ndarray (op + 1,), int64
    pred : ndarray (edge,), int32
        Predecessors of op i are ``pred[pred_ptr[i]:pred_ptr[i + 1]]``, all with a lower index.
    member_ptr, member : ndarray
        Participating ranks, in the same form.
    node_of_rank : ndarray (rank, replica), int32
        The machine of each rank of each replica.
    leaders : ndarray (grouping, replica), int32
        For each way of joining replicas, the lowest replica of each one's group. Row 0 joins none.
    grouping : ndarray (op,), int32
        Row of `leaders` by which the op joins replicas; 0 for an op within a replica.
    replica : ndarray (op,), int32
        0 in a template; after `unroll`, the replica (of a joining op, the leader of its group).
    width : ndarray (op,), int32
        Ranks that the op folds into one: its own noise is drawn as the maximum of so many. Exact only
        where the op stands alone between two points at which these ranks meet, and no score is shared
        at the level of ranks; otherwise write the ranks out.
    dp : ndarray (op,), int32
        Data-parallel index, which tells microbatches of one number apart: as `replica`, except in a
        graph that was written out from the start, where replicas need not be alike.
    lanes : int
        Replicas that each op of the graph stands for: all of them in a template, else 1.

    Raises
    ------
    ValueError
        If an op waits for itself or for a later one, or arrays disagree in length.
    """

    signatures: tuple[Signature, ...]
    sites: tuple[str, ...]
    signature: np.ndarray
    site: np.ndarray
    position: np.ndarray
    stage: np.ndarray
    microbatch: np.ndarray
    rank: np.ndarray
    key: np.ndarray
    pred_ptr: np.ndarray
    pred: np.ndarray
    member_ptr: np.ndarray
    member: np.ndarray
    node_of_rank: np.ndarray
    leaders: np.ndarray
    grouping: np.ndarray
    replica: np.ndarray
    dp: np.ndarray
    width: np.ndarray
    lanes: int

    def __post_init__(self) -> None:
        n = self.signature.size
        per_op = [getattr(self, name) for name in PER_OP]
        if any(a.size != n for a in per_op) or self.pred_ptr.size != n + 1:
            raise ValueError(f"arrays of a WorkloadDAG of {n} ops disagree in length")
        degree = np.diff(self.pred_ptr)
        if self.pred.size and (
            np.any(self.pred >= np.repeat(np.arange(n), degree)) or self.pred.min() < 0
        ):
            raise ValueError("ops of a WorkloadDAG must come after those that they wait for")
        if self.lanes not in (1, self.replicas) or self.replicas >= 1 << kernels.REPLICA_BITS:
            raise ValueError(f"{self.lanes} lanes do not fit {self.replicas} replicas")
        for array in (*per_op, self.pred_ptr, self.pred, self.member_ptr, self.member,
                      self.node_of_rank, self.leaders):  # fmt: skip
            array.setflags(write=False)

    @property
    def n_ops(self) -> int:
        """Number of ops in the graph (of one replica, in a template)."""
        return self.signature.size

    @property
    def n_edges(self) -> int:
        """Number of dependencies."""
        return self.pred.size

    @property
    def replicas(self) -> int:
        """Number of data-parallel replicas."""
        return self.leaders.shape[1]

    @cached_property
    def slots(self) -> tuple[np.ndarray, int, np.ndarray]:
        """Rows for finish times that are reused (see `_graph.live_slots`)."""
        return _graph_loops.live_slots(self.pred_ptr, self.pred)

    @cached_property
    def _distinct_keys(self) -> tuple[tuple[PoolKey, ...], np.ndarray]:
        span = int(self.position.max(initial=0)) + 2
        code = (self.signature.astype(np.int64) * len(self.sites) + self.site) * span
        code += self.position + 1
        _, first, index = np.unique(code, return_index=True, return_inverse=True)
        return tuple(self.pool_key(i) for i in first), index

    @cached_property
    def kind(self) -> np.ndarray:
        """Name of each op, str (op,)."""
        return np.array([s.op for s in self.signatures])[self.signature]

    @cached_property
    def component(self) -> np.ndarray:
        """Component of each op (`Signature.component`), str (op,)."""
        return np.array([s.component for s in self.signatures])[self.signature]

    @cached_property
    def category(self) -> np.ndarray:
        """`Category` of each op, int (op,)."""
        return np.array([s.category for s in self.signatures])[self.signature]

    @property
    def is_compute(self) -> np.ndarray:
        """Whether each op is work of a device or host, bool (op,)."""
        return self.category == Category.COMPUTE

    @property
    def pool_keys(self) -> tuple[PoolKey, ...]:
        """Distinct pool keys, at the finest grain."""
        return self._distinct_keys[0]

    @property
    def pool_key_of_op(self) -> np.ndarray:
        """Index into `pool_keys`, (op,)."""
        return self._distinct_keys[1]

    def pool_key(self, op: int) -> PoolKey:
        """Finest pool key of one op."""
        return PoolKey(
            self.signatures[self.signature[op]], self.sites[self.site[op]], int(self.position[op])
        )

    def __getstate__(self) -> dict:
        # what is worked out on demand is not sent to other processes
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def is_inter_node(self) -> np.ndarray:
        """Ops whose participants sit on more than one node, in any replica, bool (op,)."""
        return self.crosses_nodes.any(axis=1)

    @cached_property
    def crosses_nodes(self) -> np.ndarray:
        """Whether participants of an op sit on more than one node, bool (op, lane)."""
        nodes = self.node_of_rank[self.member]
        lowest = self._over_groups(np.minimum, np.minimum.reduceat(nodes, self.member_ptr[:-1]))
        highest = self._over_groups(np.maximum, np.maximum.reduceat(nodes, self.member_ptr[:-1]))
        return lowest != highest

    def on_node(self, node: int) -> np.ndarray:
        """Ops in which a rank of machine `node` takes part, bool (op, lane).

        Raises
        ------
        ValueError
            If there is no such node.
        """
        if not np.any(self.node_of_rank == node):
            last = int(self.node_of_rank.max())
            raise ValueError(f"node {node} does not exist: the job has nodes 0 to {last}")
        here = np.maximum.reduceat(self.node_of_rank[self.member] == node, self.member_ptr[:-1])
        return self._over_groups(np.maximum, here)

    def _over_groups(self, reduce: np.ufunc, values: np.ndarray) -> np.ndarray:
        """Reduce (op, replica) over the replicas that an op joins; result (op, lane)."""
        for g in range(1, self.leaders.shape[0]):
            ops = np.flatnonzero(self.grouping == g)
            for leader in np.unique(self.leaders[g]):
                group = self.leaders[g] == leader
                values[np.ix_(ops, group)] = reduce.reduce(values[np.ix_(ops, group)], axis=1)[
                    :, None
                ]
        if self.lanes == self.replicas:
            return values
        return np.take_along_axis(values, self.replica[:, None], axis=1)

    def unroll(self) -> WorkloadDAG:
        """The same step with every replica written out: what a template stands for.

        Draws of the unrolled graph equal those of the template bit by bit. Its size is ops x
        replicas: for small cases and for checks.
        """
        if self.lanes == 1:
            return self
        copies = [
            (op, r)
            for op in range(self.n_ops)
            for r in range(self.replicas)
            if self.leaders[self.grouping[op], r] == r
        ]
        at = {copy: i for i, copy in enumerate(copies)}
        op = np.array([c[0] for c in copies])
        columns = {name: getattr(self, name)[op] for name in PER_OP}
        columns["replica"] = columns["dp"] = np.array([c[1] for c in copies], np.int32)
        preds = [self._preds_of_copy(o, r, at) for o, r in copies]
        members = [self.member[self.member_ptr[o] : self.member_ptr[o + 1]] for o in op]
        return replace(
            self,
            **columns,
            pred_ptr=pointers([len(p) for p in preds]),
            pred=np.array([p for ps in preds for p in ps], np.int32),
            member_ptr=pointers([m.size for m in members]),
            member=np.concatenate(members),
            lanes=1,
        )

    def _preds_of_copy(self, op: int, replica: int, at: dict) -> list[int]:
        joined = np.flatnonzero(self.leaders[self.grouping[op]] == replica)
        found = {
            at[int(p), int(self.leaders[self.grouping[p], r])]
            for p in self.pred[self.pred_ptr[op] : self.pred_ptr[op + 1]]
            for r in joined
        }
        return sorted(found)

    def describe(self, op: int) -> str:
        """One op in words, for messages."""
        return str(self.pool_key(op))


#: attributes with one value an op
PER_OP = (
    "signature", "site", "position", "stage", "microbatch", "rank", "key", "grouping", "replica", "dp", "width",
)  # fmt: skip


def pointers(counts: Sequence[int]) -> np.ndarray:
    """Return CSR row pointers from row lengths."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
