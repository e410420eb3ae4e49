"""The step model: a graph and the duration pools of its ops, lowered once for the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

import numpy as np

from prism import pools as _pools
from prism.dag import WorkloadDAG
from prism.pools import DurationPool, Fixed
from prism.signature import PoolKey


@dataclass(frozen=True, eq=False)
class StepModel:
    """A training step whose op durations are random.

    Each op takes the pool of its finest key that is present: (signature, site, position), then
    any position, then any site. Ops are drawn independently.

    Parameters
    ----------
    dag : WorkloadDAG
    pools : mapping of PoolKey to DurationPool
    overrides : mapping of op number to DurationPool
        What a scenario changes: these ops take this pool and no other.
    source : {"measured", "synthetic"}
        Where the pools come from; passed on to every result.

    Raises
    ------
    ValueError
        If ops are left without a pool; all missing signatures are named at once.
    """

    dag: WorkloadDAG
    pools: Mapping[PoolKey, DurationPool]
    overrides: Mapping[int, DurationPool] = field(default_factory=dict)
    source: str = "synthetic"

    def __post_init__(self) -> None:
        object.__setattr__(self, "pools", MappingProxyType(dict(self.pools)))
        object.__setattr__(self, "overrides", MappingProxyType(dict(self.overrides)))
        missing = sorted(
            {
                str(key)
                for op, key in enumerate(self.dag.pool_keys)
                if op not in self.overrides and self._resolve(key) is None
            }
        )
        if missing:
            shown = "; ".join(missing[:10]) + (
                f"; and {len(missing) - 10} more" * (len(missing) > 10)
            )
            raise ValueError(f"{len(missing)} ops have no duration pool: {shown}; add one for each")

    def _resolve(self, key: PoolKey) -> DurationPool | None:
        for k in (key, *key.parents()):
            if k in self.pools:
                return self.pools[k]
        return None

    @cached_property
    def op_pools(self) -> tuple[DurationPool, ...]:
        """The pool of each op."""
        return tuple(
            self.overrides[op] if op in self.overrides else self._resolve(key)
            for op, key in enumerate(self.dag.pool_keys)
        )

    def fleet_pool(self, op: int) -> DurationPool:
        """The fleet-wide pool of the signature of `op`: wherever and whenever it runs.

        Raises
        ------
        ValueError
            If the model holds only finer pools for it.
        """
        key = self.dag.pool_keys[op].fleet
        if key not in self.pools:
            raise ValueError(
                f"no fleet-wide pool for {key}; add pools[PoolKey(signature)] with the durations of "
                "all devices"
            )
        return self.pools[key]

    def override(
        self, select: np.ndarray, change: Callable[[int, DurationPool], DurationPool]
    ) -> StepModel:
        """A model in which every op with ``select[op]`` takes ``change(op, its pool)``."""
        changed = {int(op): change(int(op), self.op_pools[op]) for op in np.flatnonzero(select)}
        return replace(self, overrides={**self.overrides, **changed})

    @cached_property
    def lowered(self) -> tuple[np.ndarray, ...]:
        """``pool, kind, table_ptr, table, scale, shift`` as the engine wants them."""
        distinct = {id(p): p for p in self.op_pools}  # by identity: hashing samples is slow
        by_id = {i: _pools.lower(p) for i, p in distinct.items()}
        low = [by_id[id(p)] for p in self.op_pools]
        base_ids = {id(x.base): x.base for x in by_id.values() if x.scale != 0.0}
        row = {i: n for n, i in enumerate(base_ids)}
        pool = np.array([row.get(id(x.base), 0) for x in low], np.int32)
        bases = list(base_ids.values()) or [Fixed(0.0)]
        kinds, rows = zip(*(_pools.table(base) for base in bases), strict=True)
        return (
            pool,
            np.array(kinds, np.uint8),
            np.concatenate([[0], np.cumsum([r.size for r in rows])]).astype(np.int64),
            np.concatenate(rows),
            np.array([x.scale for x in low]),
            np.array([x.shift for x in low]),
        )

    @property
    def at_mean(self) -> StepModel:
        """The same step with every op at its mean: what a deterministic simulator assumes."""
        return self.override(np.ones(self.dag.n_ops, bool), lambda _, pool: Fixed(pool.mean))
