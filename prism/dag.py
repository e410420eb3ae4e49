"""The graph of one training step: ops, what they are, where they run, what they wait for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from prism import _engine
from prism.signature import PoolKey, Signature, stable_hash


@dataclass(frozen=True, eq=False)
class WorkloadDAG:
    """Immutable graph of one step, ops in topological order.

    A collective is *one* op: it starts when its last participant arrives and releases all of them
    when the transfer is done.

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
    node_of_rank : ndarray (rank,), int32
        The machine of each rank.

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

    def __post_init__(self) -> None:
        n = self.signature.size
        per_op = (self.site, self.position, self.stage, self.microbatch, self.rank, self.key)
        if any(a.size != n for a in per_op) or self.pred_ptr.size != n + 1:
            raise ValueError(f"arrays of a WorkloadDAG of {n} ops disagree in length")
        owner = np.repeat(np.arange(n), np.diff(self.pred_ptr))
        if self.pred.size and (np.any(self.pred >= owner) or self.pred.min() < 0):
            raise ValueError("ops of a WorkloadDAG must come after those that they wait for")
        for array in (*per_op, self.signature, self.pred_ptr, self.pred, self.member_ptr,
                      self.member, self.node_of_rank):  # fmt: skip
            array.setflags(write=False)

    @property
    def n_ops(self) -> int:
        """Number of ops."""
        return self.signature.size

    @property
    def n_edges(self) -> int:
        """Number of dependencies."""
        return self.pred.size

    @cached_property
    def slots(self) -> tuple[np.ndarray, int, np.ndarray]:
        """Rows for finish times that are reused (see `_engine.live_slots`)."""
        return _engine.live_slots(self.pred_ptr, self.pred)

    @cached_property
    def pool_keys(self) -> tuple[PoolKey, ...]:
        """Finest pool key of each op."""
        return tuple(
            PoolKey(self.signatures[s], self.sites[where], int(p))
            for s, where, p in zip(self.signature, self.site, self.position, strict=True)
        )

    @cached_property
    def is_inter_node(self) -> np.ndarray:
        """Ops whose participants sit on more than one node, bool (op,)."""
        nodes = self.node_of_rank[self.member]
        out = np.zeros(self.n_ops, bool)
        owner = np.repeat(np.arange(self.n_ops), np.diff(self.member_ptr))
        first = nodes[self.member_ptr[owner]]
        np.logical_or.at(out, owner, nodes != first)
        return out

    def on_node(self, node: int) -> np.ndarray:
        """Ops in which a rank of machine `node` takes part, bool (op,).

        Raises
        ------
        ValueError
            If there is no such node.
        """
        n_nodes = int(self.node_of_rank.max()) + 1
        if not 0 <= node < n_nodes:
            raise ValueError(f"node {node} does not exist: the job has nodes 0 to {n_nodes - 1}")
        out = np.zeros(self.n_ops, bool)
        owner = np.repeat(np.arange(self.n_ops), np.diff(self.member_ptr))
        out[owner[self.node_of_rank[self.member] == node]] = True
        return out

    def describe(self, op: int) -> str:
        """One op in words, for messages."""
        return str(self.pool_keys[op])


@dataclass
class DagBuilder:
    """Collects ops and dependencies in any order; `build` sorts them and closes the graph.

    Examples
    --------
    >>> b = DagBuilder()
    >>> first = b.add(Signature("forward"), ranks=(0,))
    >>> second = b.add(Signature("all_reduce", role="dp"), ranks=(0, 1), after=[first])
    >>> b.build(node_of_rank=[0, 1]).n_edges
    1
    """

    _ops: list[tuple] = field(default_factory=list)
    _edges: list[tuple[int, int]] = field(default_factory=list)
    #: after `build`: the index in the graph of the op that `add` numbered i
    placed: np.ndarray | None = None

    def add(
        self,
        signature: Signature,
        ranks: Sequence[int],
        *,
        site: str | None = None,
        stage: int = -1,
        microbatch: int = -1,
        position: int = -1,
        after: Iterable[int] = (),
    ) -> int:
        """Add an op and return its number (for `after`, and for `wait`).

        `site` defaults to the list of ranks.
        """
        ranks = tuple(int(r) for r in ranks)
        if not ranks:
            raise ValueError(f"op {signature} needs at least one rank")
        number = len(self._ops)
        where = site if site is not None else f"rank {','.join(map(str, ranks))}"
        self._ops.append((signature, where, ranks, stage, microbatch, position))
        self._edges += [(a, number) for a in after]
        return number

    def wait(self, op: int, after: Iterable[int]) -> None:
        """Let `op` wait for the ops in `after` as well."""
        self._edges += [(a, op) for a in after]

    def build(self, node_of_rank: Sequence[int]) -> WorkloadDAG:
        """Sort topologically and freeze.

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
        signature, site, ranks, stage, microbatch, position = zip(*ops, strict=True)
        signatures, signature_index = _codes(signature)
        sites, site_index = _codes(site)
        highest = max(max(r) for r in ranks)
        if highest >= len(node_of_rank):
            raise ValueError(f"rank {highest} has no node: {len(node_of_rank)} ranks are placed")
        return WorkloadDAG(
            signatures=signatures,
            sites=sites,
            signature=signature_index,
            site=site_index,
            position=np.array(position, np.int32),
            stage=np.array(stage, np.int32),
            microbatch=np.array(microbatch, np.int32),
            rank=np.array([r[0] if len(r) == 1 else -1 for r in ranks], np.int32),
            key=_identities(signature, site, position),
            pred_ptr=pred_ptr,
            pred=pred.astype(np.int32),
            member_ptr=np.concatenate([[0], np.cumsum([len(r) for r in ranks])]),
            member=np.array([r for rs in ranks for r in rs], np.int32),
            node_of_rank=np.array(node_of_rank, np.int32),
        )

    def _unique_edges(self) -> tuple[np.ndarray, np.ndarray]:
        edges = np.array(sorted(set(self._edges)), np.int64).reshape(-1, 2)
        return edges[:, 0], edges[:, 1]

    def _sorted(self, n: int, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
        succ_ptr, succ = _csr(n, src, dst)
        order = _engine.topological_order(n, succ_ptr, succ)
        if order.size == n:
            return order
        cycle = _one_cycle(src, dst, np.setdiff1d(np.arange(n), order))
        names = [f"{self._ops[i][0]} @ {self._ops[i][1]} #{self._ops[i][5]}" for i in cycle]
        shown = names if len(names) <= 8 else [*names[:8], f"... {len(names) - 8} more"]
        raise ValueError(f"the step waits for itself: {' -> '.join(shown)} -> {names[0]}")


def _csr(n: int, owner: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.lexsort((value, owner))
    ptr = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=n))]).astype(np.int64)
    return ptr, value[order]


def _codes(values: Sequence) -> tuple[tuple, np.ndarray]:
    """Distinct values in order of appearance, and the index of each value."""
    index: dict = {}
    codes = np.array([index.setdefault(v, len(index)) for v in values], np.int32)
    return tuple(index), codes


def _identities(
    signature: Sequence[Signature], site: Sequence[str], position: Sequence[int]
) -> np.ndarray:
    """Stable 64-bit keys; equal ops (same signature, site, position) are told apart by count."""
    seen: Counter = Counter()
    keys = np.empty(len(signature), np.uint64)
    for i, identity in enumerate(zip(signature, site, position, strict=True)):
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
