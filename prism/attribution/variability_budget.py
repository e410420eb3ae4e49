"""The reverse question: how much may a component vary so that p95 stays under a target?"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import xarray as xr

from prism.attribution.ablation import check
from prism.base import schema, stats
from prism.model.engine.montecarlo import simulate
from prism.model.pools import (
    DurationPool,
    Fixed,
    Gamma,
    LogNormal,
    MaxOf,
    Normal,
    Scaled,
    Shifted,
    lower,
)
from prism.model.step_model import StepModel

#: factors that are tried before the first one that is too large is narrowed down
GRID = 12
#: spread of a LogNormal's logarithm beyond which its p95 falls when it is spread further at the same mean
LARGEST_SIGMA = 1.645


def budget(
    model: StepModel,
    component: str,
    target: float,
    *,
    draws: int = 2000,
    seed: int = 0,
    most: float = 10.0,
    steps: int = 20,
) -> xr.Dataset:
    """Find the largest variability of a component that keeps p95 under a target.

    The component's durations are stretched about their mean. LogNormal, Normal and Gamma pools take f times their cv and
    stay what they are; others become ``mean + f (T - mean)``. The first f on a grid at which p95 passes the target is
    narrowed down by bisection, with the same random numbers throughout.

    Parameters
    ----------
    model : StepModel
    component : str
        Name of one of the components of `partition`.
    target : float
        Seconds of p95.
    draws, seed : int
    most : float
        Largest factor looked at. It is less where a duration would become negative, or a LogNormal so wide that its own
        p95 falls.
    steps : int
        Of the bisection.

    Returns
    -------
    Dataset
        ``spread_factor``: f (0: it must not vary at all), ``p95``, seconds, there, and ``largest_factor``: if f equals
        it, no spread that was looked at is too much.

    Raises
    ------
    ValueError
        Unknown components; a target that is not a positive number, or is passed even if the component never
        varies.

    Examples
    --------
    >>> from prism.model import DagBuilder
    >>> from prism.model import PoolKey, Signature
    >>> b = DagBuilder()
    >>> op = b.add(Signature("forward"), ranks=(0,))
    >>> model = StepModel(b.build([0]), {PoolKey(Signature("forward")): LogNormal.from_moments(1.0, 0.1)})
    >>> round(float(budget(model, "compute", target=1.09)["spread_factor"]), 1)
    0.5
    """
    check(model, [component], "p95")
    if not (0 < target < np.inf and 0 < most < np.inf):
        raise ValueError(f"target and most must be positive and finite, got {target} and {most}")

    def p95(f: float) -> float:
        changed = stretched(model, component, f)
        return float(stats.p95(simulate(changed, draws, seed=seed)["step_time"].values))

    least = p95(0.0)
    if least > target:
        raise ValueError(
            f"p95 is {least:.6g} s even if {component} never varies, over {target:.6g} s: it is not {component} that "
            "has to be steadied"
        )
    largest = _largest(model, component, most)
    low, high = 0.0, None
    for f in np.linspace(0, largest, GRID + 1)[1:]:
        if p95(f) > target:
            high = float(f)
            break
        low = float(f)
    if high is not None:
        for _ in range(steps):
            middle = (low + high) / 2
            low, high = (middle, high) if p95(middle) <= target else (low, middle)
    return schema.dataset(
        {
            "spread_factor": ((), low),
            "p95": ((), p95(low)),
            "largest_factor": ((), largest),
        },
        made_by="prism.attribution.budget",
        source=schema.derived_source(model.source),
        seed=seed,
        provenance={"component": component, "target_s": target},
    )


def stretched(model: StepModel, component: str, f: float) -> StepModel:
    """The model with f times a component's spread, under its scenarios."""
    dag = model.dag
    named = dag.component == component
    # replicas of an op must go on sharing its distribution
    bases: dict[int, tuple[DurationPool, DurationPool]] = {}

    def change(pool: DurationPool) -> DurationPool:
        return _stretched_pool(pool, f, bases)

    pools = {
        key: change(pool) if key.signature.component == component else pool
        for key, pool in model.pools.items()
    }
    overrides = {
        (op, lane): change(pool) if named[op] else pool
        for (op, lane), pool in model.overrides.items()
    }
    return model.replace(pools=pools, overrides=overrides)


def _stretched_pool(pool: DurationPool, f: float, bases: dict) -> DurationPool:
    """The pool with f times the spread about the same mean.

    Raises
    ------
    ValueError
        If durations would become negative.
    """
    if f == 0 or pool.std == 0:
        return Fixed(pool.mean)
    inner = lower(pool)
    if inner.largest_of == 1 and isinstance(inner.base, LogNormal | Normal | Gamma):
        if id(inner.base) not in bases:
            # the old one is kept, so that its identity stays taken
            bases[id(inner.base)] = inner.base, _wider(inner.base, f)
        out: DurationPool = Scaled(bases[id(inner.base)][1], inner.scale)
        return Shifted(out, inner.shift) if inner.shift else out
    whole = MaxOf(inner.base, inner.largest_of) if inner.largest_of > 1 else inner.base
    mean = pool.mean
    return Shifted(Scaled(whole, inner.scale * f), f * (inner.shift - mean) + mean)


def _wider(base: DurationPool, f: float) -> DurationPool:
    match base:
        case LogNormal():
            return LogNormal.from_moments(base.mean, base.cv * f)
        case Normal():
            return replace(base, sigma=base.sigma * f)
        case _:
            shape = base.shape / f**2
            return replace(base, shape=shape, scale=base.mean / shape)


def _largest(model: StepModel, component: str, most: float) -> float:
    """Factor up to which every pool can be stretched."""
    pools = [p for k, p in model.pools.items() if k.signature.component == component]
    named = model.dag.component == component
    pools += [p for (op, _), p in model.overrides.items() if named[op]]

    def possible(f: float) -> bool:
        try:
            changed = [_stretched_pool(p, f, {}) for p in pools]
        except ValueError:
            return False
        return all(_tame(p) for p in changed)

    if possible(most):
        return most
    low, high = (1.0, most) if most > 1 and possible(1.0) else (0.0, most)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if possible(middle) else (low, middle)
    # a hair inside, where rounding does not matter
    return low * (1 - 1e-9)


def _tame(pool: DurationPool) -> bool:
    base = lower(pool).base
    return not isinstance(base, LogNormal) or base.sigma <= LARGEST_SIGMA
