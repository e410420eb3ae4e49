"""The graph of one training step: ops, what they are, where they run, what they wait for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from prism import _engine, _graph
from prism.signature import PoolKey, Signature, stable_hash


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
        if self.lanes not in (1, self.replicas) or self.replicas >= 1 << _engine.REPLICA_BITS:
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
        return _graph.live_slots(self.pred_ptr, self.pred)

    @cached_property
    def _distinct_keys(self) -> tuple[tuple[PoolKey, ...], np.ndarray]:
        span = int(self.position.max(initial=0)) + 2
        code = (self.signature.astype(np.int64) * len(self.sites) + self.site) * span
        code += self.position + 1
        _, first, index = np.unique(code, return_index=True, return_inverse=True)
        return tuple(self.pool_key(i) for i in first), index

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

    @cached_property
    def is_inter_node(self) -> np.ndarray:
        """Ops whose participants sit on more than one node, in any replica, bool (op,)."""
        nodes = self.node_of_rank[self.member]
        lowest = self._over_groups(np.minimum, np.minimum.reduceat(nodes, self.member_ptr[:-1]))
        highest = self._over_groups(np.maximum, np.maximum.reduceat(nodes, self.member_ptr[:-1]))
        return (lowest != highest).any(axis=1)

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
            pred_ptr=_pointers([len(p) for p in preds]),
            pred=np.array([p for ps in preds for p in ps], np.int32),
            member_ptr=_pointers([m.size for m in members]),
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


@dataclass
class DagBuilder:
    """Collects ops and dependencies in any order; `build` sorts them and closes the graph.

    Parameters
    ----------
    replicas : int
        Replicas that the ops stand for (a template); 1: the graph is what it says.
    groups : mapping of name to ndarray (replica,)
        Ways of joining replicas: for each replica the lowest one of its group. ``all`` is there.

    Examples
    --------
    >>> b = DagBuilder()
    >>> first = b.add(Signature("forward"), ranks=(0,))
    >>> second = b.add(Signature("all_reduce", role="dp"), ranks=(0, 1), after=[first])
    >>> b.build(node_of_rank=[0, 1]).n_edges
    1
    """

    replicas: int = 1
    groups: Mapping[str, Sequence[int]] = field(default_factory=dict)
    _ops: list[tuple] = field(default_factory=list)
    _edges: list[tuple[int, int]] = field(default_factory=list)
    #: after `build`: the index in the graph of the op that `add` numbered i
    placed: np.ndarray | None = None

    def __post_init__(self) -> None:
        alone = np.arange(self.replicas)
        named = {"all": np.zeros(self.replicas, int)} | dict(self.groups)
        for name, leader in named.items():
            leader = np.asarray(leader)
            if (
                leader.shape != alone.shape
                or np.any(leader > alone)
                or np.any(leader[leader] != leader)
            ):
                raise ValueError(
                    f"group {name!r}: needs for each of {self.replicas} replicas the lowest of its group"
                )
        self._grouping = {None: 0} | {name: i for i, name in enumerate(named, start=1)}
        self._leaders = np.array([alone, *named.values()], np.int32)

    def add(
        self,
        signature: Signature,
        ranks: Sequence[int],
        *,
        site: str | None = None,
        stage: int = -1,
        microbatch: int = -1,
        position: int = -1,
        dp: int = 0,
        width: int = 1,
        joins: str | None = None,
        after: Iterable[int] = (),
    ) -> int:
        """Add an op and return its number (for `after`, and for `wait`).

        `site` defaults to the list of ranks; `joins` names the groups of replicas that meet in it;
        `width` is the number of alike ranks that the op stands for.
        """
        ranks = tuple(int(r) for r in ranks)
        if not ranks:
            raise ValueError(f"op {signature} needs at least one rank")
        if joins not in self._grouping:
            raise ValueError(
                f"op {signature} joins {joins!r}; groups are {list(self._grouping)[1:]}"
            )
        if width < 1:
            raise ValueError(f"op {signature} has width {width}; it must be at least 1")
        number = len(self._ops)
        where = site if site is not None else f"rank {','.join(map(str, ranks))}"
        grouping = self._grouping[joins] if self.replicas > 1 else 0
        self._ops.append(
            (signature, where, ranks, stage, microbatch, position, grouping, dp, width)
        )
        self._edges += [(a, number) for a in after]
        return number

    def wait(self, op: int, after: Iterable[int]) -> None:
        """Let `op` wait for the ops in `after` as well."""
        self._edges += [(a, op) for a in after]

    def build(self, node_of_rank: Sequence[int] | np.ndarray) -> WorkloadDAG:
        """Sort topologically and freeze.

        Parameters
        ----------
        node_of_rank : (rank,) or (rank, replica)
            The machine of each rank; of each replica of it in a template.

        Raises
        ------
        ValueError
            If there is no op, a rank has no node, or the dependencies form a cycle (the ops on it
            are named).
        """
        n = len(self._ops)
        if n == 0:
            raise ValueError("a step needs at least one op, none given")
        src, dst = self._unique_edges()
        order = self._sorted(n, src, dst)
        new = np.empty(n, np.int64)
        new[order] = np.arange(n)
        self.placed = new
        pred_ptr, pred = _csr(n, new[dst], new[src])
        ops = [self._ops[i] for i in order]
        signature, site, ranks, stage, microbatch, position, grouping, dp, width = zip(
            *ops, strict=True
        )
        signatures, signature_index = _codes(signature)
        sites, site_index = _codes(site)
        nodes = np.array(node_of_rank, np.int32).reshape(-1, self.replicas)
        highest = max(max(r) for r in ranks)
        if highest >= len(nodes):
            raise ValueError(f"rank {highest} has no node: {len(nodes)} ranks are placed")
        return WorkloadDAG(
            signatures=signatures,
            sites=sites,
            signature=signature_index,
            site=site_index,
            position=np.array(position, np.int32),
            stage=np.array(stage, np.int32),
            microbatch=np.array(microbatch, np.int32),
            rank=np.array([r[0] if len(r) == 1 else -1 for r in ranks], np.int32),
            key=_identities(signature, site, ranks, position),
            pred_ptr=pred_ptr,
            pred=pred.astype(np.int32),
            member_ptr=_pointers([len(r) for r in ranks]),
            member=np.array([r for rs in ranks for r in rs], np.int32),
            node_of_rank=nodes,
            leaders=self._leaders,
            grouping=np.array(grouping, np.int32),
            replica=np.zeros(n, np.int32),
            dp=np.array(dp, np.int32),
            width=np.array(width, np.int32),
            lanes=self.replicas,
        )

    def _unique_edges(self) -> tuple[np.ndarray, np.ndarray]:
        edges = np.array(sorted(set(self._edges)), np.int64).reshape(-1, 2)
        return edges[:, 0], edges[:, 1]

    def _sorted(self, n: int, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
        succ_ptr, succ = _csr(n, src, dst)
        order = _graph.topological_order(n, succ_ptr, succ)
        if order.size == n:
            return order
        cycle = _one_cycle(src, dst, np.setdiff1d(np.arange(n), order))
        names = [f"{self._ops[i][0]} @ {self._ops[i][1]} #{self._ops[i][5]}" for i in cycle]
        shown = names if len(names) <= 8 else [*names[:8], f"... {len(names) - 8} more"]
        raise ValueError(f"the step waits for itself: {' -> '.join(shown)} -> {names[0]}")


def _pointers(counts: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)


def _csr(n: int, owner: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.lexsort((value, owner))
    return _pointers(np.bincount(owner, minlength=n)), value[order]


def _codes(values: Sequence) -> tuple[tuple, np.ndarray]:
    """Distinct values in order of appearance, and the index of each value."""
    index: dict = {}
    codes = np.array([index.setdefault(v, len(index)) for v in values], np.int32)
    return tuple(index), codes


def _identities(*columns: Sequence) -> np.ndarray:
    """Stable 64-bit keys; ops that are equal in all columns are told apart by count."""
    seen: Counter = Counter()
    keys = np.empty(len(columns[0]), np.uint64)
    for i, identity in enumerate(zip(*columns, strict=True)):
        keys[i] = stable_hash(*identity, seen[identity])
        seen[identity] += 1
    return keys


def _one_cycle(src: np.ndarray, dst: np.ndarray, stuck: np.ndarray) -> list[int]:
    """A cycle among the ops that the topological sort could not place, in waiting order."""
    inside = set(stuck.tolist())
    waits_for = {
        int(b): int(a) for a, b in zip(src, dst, strict=True) if a in inside and b in inside
    }
    at = next(iter(waits_for))
    path: list[int] = []
    while at not in path:
        path.append(at)
        at = waits_for[at]
    return path[path.index(at) :][::-1]
