"""The reverse question: how much may a component vary so that p95 stays under a target?"""

from __future__ import annotations

import numpy as np
import xarray as xr

from prism import schema, stats
from prism.attribution.ablation import check, component_of
from prism.model import StepModel
from prism.montecarlo import simulate
from prism.pools import DurationPool, Fixed, LogNormal, Scaled, Shifted


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
    """How much a component may vary so that p95 stays under a target.

    The component's durations are stretched about their mean, ``mean + f (T - mean)`` (a LogNormal takes f times its
    cv instead and stays positive); f is found by bisection with
    the same random numbers, to ``most / 2 ** steps``.

    Parameters
    ----------
    model : StepModel
    component : str
        Of `partition`.
    target : float
        Seconds of p95.
    draws, seed : int
    most : float
        Largest factor looked at; pools whose stretched durations would be negative cannot be stretched that far.
    steps : int

    Returns
    -------
    Dataset
        ``spread_factor``: f (0: it must not vary at all; `most`: any spread that was looked at will do), and
        ``p95``, seconds, there.

    Raises
    ------
    ValueError
        Unknown components; a target that is passed even if the component never varies.
    """
    check(model, [component], "p95")

    def p95(f: float) -> float:
        changed = _stretched(model, component, f)
        return float(stats.p95(simulate(changed, draws, seed=seed)["step_time"].values))

    least = p95(0.0)
    if least > target:
        raise ValueError(
            f"p95 is {least:.6g} s even if {component} never varies, over {target:.6g} s: it is not {component} that "
            "has to be steadied"
        )
    low, high = 0.0, _largest_stretch(model, component, most)
    if p95(high) > target:
        for _ in range(steps):
            middle = (low + high) / 2
            low, high = (middle, high) if p95(middle) <= target else (low, middle)
    else:
        low = high
    return schema.dataset(
        {"spread_factor": ((), low), "p95": ((), p95(low))},
        made_by="prism.attribution.budget",
        source="synthetic" if model.source == "synthetic" else "simulated",
        seed=seed,
        provenance={"component": component, "target_s": target, "largest_factor": float(high)},
    )


def _of_component(model: StepModel, component: str) -> list:
    return [k for k in model.pools if component_of(k.signature) == component]


def _largest_stretch(model: StepModel, component: str, most: float) -> float:
    """Factor up to which no duration becomes negative."""
    bound = most
    for key in _of_component(model, component):
        pool = model.pools[key]
        if not isinstance(_base(pool), LogNormal):
            least = float(pool.quantile(0.0))
            if np.isfinite(least) and pool.mean > least:
                bound = min(bound, pool.mean / (pool.mean - least))
    return bound


def _base(pool: DurationPool) -> DurationPool:
    return _base(pool.pool) if isinstance(pool, Scaled) else pool


def _stretched(model: StepModel, component: str, f: float) -> StepModel:
    pools = dict(model.pools)
    for key in _of_component(model, component):
        pools[key] = _stretched_pool(pools[key], f)
    return model.replace(pools=pools)


def _stretched_pool(pool: DurationPool, f: float) -> DurationPool:
    """The pool with f times the spread about the same mean; a LogNormal stays one."""
    if f == 0 or pool.std == 0:
        return Fixed(pool.mean)
    if isinstance(pool, LogNormal):
        return LogNormal.from_moments(pool.mean, pool.cv * f)
    if isinstance(pool, Scaled):
        return Scaled(_stretched_pool(pool.pool, f), pool.factor)
    return Shifted(Scaled(pool, f), pool.mean * (1 - f))
