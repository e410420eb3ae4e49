"""The step model: a graph, the duration pools of its ops, and how they vary together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from prism.model.coupling import Coupling
from prism.model.dag import WorkloadDAG
from prism.model.pools import DurationPool, Fixed, lower
from prism.model.signature import PoolKey


@dataclass(frozen=True, eq=False)
class StepModel:
    """A training step whose op durations are random.

    Each op takes the pool of its finest key that is present: (signature, site, position), then
    any position, then any site.

    Parameters
    ----------
    dag : WorkloadDAG
    pools : mapping of PoolKey to DurationPool
    coupling : Coupling
        How ops vary together; independent by default, which real steps are not.
    overrides : mapping of (op, lane) to DurationPool
        What a scenario changes. Lane -1 stands for every replica.
    source : {"measured", "synthetic"}
        Where the pools come from; passed on to every result.

    Raises
    ------
    ValueError
        If ops are left without a pool; all missing signatures are named at once.
    """

    dag: WorkloadDAG
    pools: Mapping[PoolKey, DurationPool]
    coupling: Coupling = field(default_factory=Coupling)
    overrides: Mapping[tuple[int, int], DurationPool] = field(default_factory=dict)
    source: str = "synthetic"

    def __post_init__(self) -> None:
        object.__setattr__(self, "pools", MappingProxyType(dict(self.pools)))
        object.__setattr__(self, "overrides", MappingProxyType(dict(self.overrides)))
        found = [self._resolve(key) for key in self.dag.pool_keys]
        lacking = {i for i, pool in enumerate(found) if pool is None}
        if lacking:
            self._refuse_missing(lacking)
        object.__setattr__(self, "_pool_of_key", found)
        for (op, lane), pool in self.overrides.items():
            self._check_override(op, lane, pool)

    def __reduce__(self):
        # read-only views of mappings cannot be sent to another process
        state = (self.dag, dict(self.pools), self.coupling, dict(self.overrides), self.source)
        return StepModel, state

    def _refuse_missing(self, lacking: set[int]) -> None:
        whole = {op for op, lane in self.overrides if lane == -1}
        ops = [
            op
            for op, key in enumerate(self.dag.pool_key_of_op)
            if key in lacking and op not in whole
        ]
        if not ops:
            return
        names = sorted({str(self.dag.pool_key(op)) for op in ops})
        shown = "; ".join(names[:10]) + (f"; and {len(names) - 10} more" if len(names) > 10 else "")
        raise ValueError(f"{len(ops)} ops have no duration pool: {shown}; add one for each")

    def _resolve(self, key: PoolKey) -> DurationPool | None:
        for k in (key, *key.parents()):
            if k in self.pools:
                return self.pools[k]
        return None

    def replace(self, **changes: Any) -> StepModel:
        """A model with some parts changed, for instance ``coupling=Coupling.independent()``."""
        return dataclasses.replace(self, **changes)

    @cached_property
    def distinct_pools(self) -> tuple[list[DurationPool], np.ndarray]:
        """Pools, and the index of each op's among them, (op,), under overrides of every replica."""
        pools = list(self._pool_of_key)
        index = self.dag.pool_key_of_op.copy()
        for (op, lane), pool in self.overrides.items():
            if lane == -1:
                index[op] = len(pools)
                pools.append(pool)
        # a key whose ops are all overridden may have no pool
        return [p if p is not None else Fixed(0.0) for p in pools], index

    @cached_property
    def op_pools(self) -> tuple[DurationPool, ...]:
        """The pool of each op, under overrides of every replica."""
        pools, index = self.distinct_pools
        return tuple(pools[i] for i in index)

    def pool(self, op: int, lane: int = -1) -> DurationPool:
        """The pool of an op in one replica (in a joining op: of its group), under overrides."""
        if lane >= 0:
            lane = int(self.dag.leaders[self.dag.grouping[op]][lane])
        return self.overrides.get((op, lane), self.op_pools[op])

    def fleet_pool(self, op: int) -> DurationPool:
        """The fleet-wide pool of the signature of `op`: wherever and whenever it runs.

        Raises
        ------
        ValueError
            If the model holds only finer pools for it.
        """
        key = self.dag.pool_key(op).fleet
        if key not in self.pools:
            raise ValueError(
                f"no fleet-wide pool for {key}; add pools[PoolKey(signature)] with the durations of "
                "all devices"
            )
        return self.pools[key]

    def override(
        self, select: np.ndarray, change: Callable[[int, DurationPool], DurationPool]
    ) -> StepModel:
        """A model in which the selected ops take ``change(op, their pool)``.

        Parameters
        ----------
        select : bool ndarray (op,) or (op, lane)
            With lanes, an op may change in some replicas only (in a joining op, name any replica of
            the group); it can then be scaled, shifted or fixed, but not take another family.
        change : callable

        Raises
        ------
        ValueError
            If some replicas of an op would take another family.
        """
        select = np.asarray(select, bool)
        lanes = select if select.ndim == 2 else np.repeat(select[:, None], self.dag.lanes, axis=1)
        changed = dict(self.overrides)
        for op in map(int, np.flatnonzero(lanes.any(axis=1))):
            leader = (
                self.dag.leaders[self.dag.grouping[op]] if self.dag.lanes > 1 else np.zeros(1, int)
            )
            groups, chosen = np.unique(leader), np.unique(leader[lanes[op]])
            earlier = [int(g) for g in groups if (op, int(g)) in self.overrides]
            whole = chosen.size == groups.size
            if whole:
                changed[op, -1] = change(op, self.op_pools[op])
            for lane in map(int, earlier if whole else chosen):
                pool = change(op, self.pool(op, lane))
                if whole and pool == changed[op, -1]:
                    del changed[op, lane]
                else:
                    changed[op, lane] = pool
        return self.replace(overrides=changed)

    def _check_override(self, op: int, lane: int, pool: DurationPool) -> None:
        if not (0 <= op < self.dag.n_ops and -1 <= lane < self.dag.lanes):
            raise ValueError(
                f"override of op {op}, lane {lane}: there are {self.dag.n_ops} ops and {self.dag.lanes} lanes"
            )
        if lane == -1:
            return
        if self.dag.lanes > 1 and self.dag.leaders[self.dag.grouping[op]][lane] != lane:
            raise ValueError(
                f"{self.dag.describe(op)} joins replicas: override the lowest of the group, not {lane}"
            )
        new, old = lower(pool), lower(self.op_pools[op])
        same = new.base is old.base and new.largest_of == old.largest_of
        if new.scale != 0.0 and (not same or old.scale == 0.0):
            raise ValueError(
                f"{self.dag.describe(op)}: some replicas of an op can be scaled, shifted or fixed, but "
                "not take another distribution"
            )

    @property
    def at_mean(self) -> StepModel:
        """The same step with every op at its mean: what a deterministic simulator assumes."""
        means = {op_lane: Fixed(pool.mean) for op_lane, pool in self.overrides.items()}
        frozen = {key: Fixed(pool.mean) for key, pool in self.pools.items()}
        return self.replace(pools=frozen, overrides=means, coupling=Coupling.independent())
