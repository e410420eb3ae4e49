"""Build the graph of a step op by op."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from prism.model import _graph_loops
from prism.model.dag import WorkloadDAG, pointers
from prism.model.signature import Signature, stable_hash


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
            member_ptr=pointers([len(r) for r in ranks]),
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
        order = _graph_loops.topological_order(n, succ_ptr, succ)
        if order.size == n:
            return order
        cycle = _one_cycle(src, dst, np.setdiff1d(np.arange(n), order))
        names = [f"{self._ops[i][0]} @ {self._ops[i][1]} #{self._ops[i][5]}" for i in cycle]
        shown = names if len(names) <= 8 else [*names[:8], f"... {len(names) - 8} more"]
        raise ValueError(f"the step waits for itself: {' -> '.join(shown)} -> {names[0]}")


def _csr(n: int, owner: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.lexsort((value, owner))
    return pointers(np.bincount(owner, minlength=n)), value[order]


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
