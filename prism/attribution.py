"""Where variability comes from: which component, which kernel, which rank, and what steadying it would save."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, combinations
from math import factorial

import numpy as np
import xarray as xr

from prism import schema, stats
from prism.model import StepModel
from prism.montecarlo import simulate
from prism.pools import DurationPool, Fixed, LogNormal, Scaled, Shifted
from prism.scenarios import Frozen
from prism.signature import Category
from prism.sweeping import Executor, sweep

#: what an ablation may be about: a number for the step times of one ablation, (draw,) along the last axis
STATISTICS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "p95": lambda x: np.quantile(x, 0.95, axis=-1),
    "mean": lambda x: x.mean(axis=-1),
    "std": lambda x: x.std(axis=-1),
    "variance": lambda x: x.var(axis=-1),
    "cv": lambda x: x.std(axis=-1) / x.mean(axis=-1),
}
#: components beyond which all combinations are too many
MOST_COMPONENTS = 8


def partition(model: StepModel) -> list[str]:
    """Components that every op belongs to exactly one of: compute, gap, and the roles of process groups."""
    return sorted({_component(s) for s in model.dag.signatures})


def _component(signature) -> str:
    match signature.category:
        case Category.COMPUTE:
            return "compute"
        case Category.GAP:
            return "gap"
        case _:
            return signature.role


def ablate(
    model: StepModel,
    *,
    components: Sequence[str] | None = None,
    statistic: str = "p95",
    draws: int = 2000,
    resamples: int = 500,
    confidence: float = 0.95,
    seed: int = 0,
    executor: Executor | None = None,
    progress: bool = False,
) -> xr.Dataset:
    """What each component adds to a statistic of step time, alone, last, and on average over all orders.

    ``v(S)`` is the statistic when only the components in S vary and the others are at their mean; all subsets are
    simulated with the same random numbers. The Shapley share of a component is its mean addition over all orders,

        phi_c = sum over S without c of |S|! (n - |S| - 1)! / n! (v(S and c) - v(S)),

    so that shares add up to ``v(all) - v(none)`` (Shapley 1953; for variances Owen 2014).

    Parameters
    ----------
    model : StepModel
    components : sequence of str, optional
        Each with ops of the model; those of `partition` by default. Ops of components that are not named stay at
        their mean.
    statistic : {"p95", "mean", "std", "variance", "cv"}
    draws, seed : int
    resamples, confidence
        Of the bootstrap over draws, the same ones in every subset.
    executor, progress
        As in `prism.sweep`.

    Returns
    -------
    Dataset
        ``value(ablation)`` by subset (``compute+dp``, ``none``), with interval; per `component` ``shapley``,
        ``alone`` (v of it alone minus v of none) and ``last`` (v of all minus v without it), with intervals. In seconds
        (but for `cv` and `variance`).

    Raises
    ------
    ValueError
        Unknown statistics or components, one component twice, more than 8.
    """
    names = list(partition(model) if components is None else components)
    _check(model, names, statistic)
    subsets = list(chain.from_iterable(combinations(names, n) for n in range(len(names) + 1)))
    label = {s: "+".join(s) or "none" for s in subsets}
    frozen = {label[s]: _only(model, s) for s in subsets}
    runs = sweep(model, frozen, draws=draws, seed=seed, executor=executor, progress=progress)
    times = runs["step_time"].values
    value = STATISTICS[statistic]
    row = {s: i for i, s in enumerate(subsets)}
    weights = _weights(names, subsets, row)
    rng = np.random.default_rng(seed)
    whole = value(times)
    again = np.array([value(times[:, rng.integers(0, draws, draws)]) for _ in range(resamples)])
    return _ablation_dataset(
        names, list(label.values()), whole, again, weights, confidence, runs, statistic
    )


def _check(model: StepModel, names: list[str], statistic: str) -> None:
    if statistic not in STATISTICS:
        raise ValueError(f"statistic {statistic!r} is not one of {', '.join(STATISTICS)}")
    have = partition(model)
    absent = [n for n in names if n not in have]
    if absent or len(set(names)) < len(names) or not names:
        raise ValueError(
            f"components {', '.join(absent or names) or 'none'}: the model has {', '.join(have)}, each to be "
            "named once"
        )
    if len(names) > MOST_COMPONENTS:
        raise ValueError(
            f"{len(names)} components have {2 ** len(names)} subsets; name at most {MOST_COMPONENTS}"
        )


def _only(model: StepModel, varying: Sequence[str]):
    """Scenario in which only some components vary."""
    rest = tuple(c for c in partition(model) if c not in varying)
    return Frozen(rest) if rest else None


def _weights(names: list[str], subsets: list, row: dict) -> dict[str, np.ndarray]:
    """Matrices (component, subset) that turn values of subsets into shares."""
    n = len(names)
    out = {k: np.zeros((n, len(subsets))) for k in ("shapley", "alone", "last")}
    for i, c in enumerate(names):
        for s in subsets:
            if c in s:
                continue
            with_c = tuple(x for x in names if x in s or x == c)
            w = factorial(len(s)) * factorial(n - len(s) - 1) / factorial(n)
            out["shapley"][i, row[with_c]] += w
            out["shapley"][i, row[s]] -= w
        rest = tuple(x for x in names if x != c)
        out["alone"][i, [row[(c,)], row[()]]] = 1.0, -1.0
        out["last"][i, row[tuple(names)]] += 1.0
        out["last"][i, row[rest]] -= 1.0
    return out


def _ablation_dataset(names, labels, whole, again, weights, confidence, runs, statistic):
    tail = (1 - confidence) / 2

    def interval(x: np.ndarray) -> np.ndarray:
        return np.quantile(x, [tail, 1 - tail], axis=0).T

    data = {
        "value": ("ablation", whole),
        "value_interval": (("ablation", "ci_bound"), interval(again)),
    }
    for name, w in weights.items():
        data[name] = ("component", w @ whole)
        data[f"{name}_interval"] = (("component", "ci_bound"), interval(again @ w.T))
    return schema.dataset(
        data,
        coords={"ablation": labels, "component": names, "ci_bound": ["lower", "upper"]},
        made_by="prism.ablate",
        source=runs.attrs["source"],
        seed=runs.attrs["seed"],
        provenance={**schema.provenance(runs), "statistic": statistic, "confidence": confidence},
    )


def steadying(
    model: StepModel,
    *,
    by: str = "kind",
    draws: int = 2000,
    seed: int = 0,
    executor: Executor | None = None,
    progress: bool = False,
) -> xr.Dataset:
    """What is worth steadying: p95 saved if some ops never varied, and if they took one per cent less.

    Parameters
    ----------
    model : StepModel
    by : {"kind", "rank", "stage", "rank and kind"}
        What is taken together: ops of a name, of a rank (its compute), of a pipeline stage, of a name on a rank.
    draws, seed, executor, progress
        As in `prism.sweep`.

    Returns
    -------
    Dataset
        Per `signature` (a name of what was taken together), the largest saving first: ``saved`` (p95 of the model
        minus p95 with these ops at their mean, seconds, with paired interval), ``elasticity`` (relative change of
        p95 over that of their mean), ``cv`` of their pools taken together, ``criticality`` (share of draws whose longest
        path holds one of them, at least) and ``count``.

    Raises
    ------
    ValueError
        Unknown groupings.
    """
    groups = _groups(model, by)
    pools = model.op_pools
    scenarios: dict[str, object] = {"all": None}
    for name, ops in groups.items():
        scenarios[f"still {name}"] = _Changed(tuple(ops), "still")
        scenarios[f"less {name}"] = _Changed(tuple(ops), "less")
    runs = sweep(model, scenarios, draws=draws, seed=seed, executor=executor, progress=progress)
    step = runs["step_time"]
    base = step.sel(scenario="all").values
    paths = simulate(model, min(draws, 500), seed=seed, paths=True)["criticality"].values
    rows = []
    for name, ops in groups.items():
        still, less = (step.sel(scenario=f"{k} {name}").values for k in ("still", "less"))
        saved, low, high = stats.increase(still, base, resamples=500, seed=seed)
        mean = np.array([pools[o].mean for o in ops])
        second = np.array([pools[o].std ** 2 + pools[o].mean ** 2 for o in ops])
        cv = (
            np.sqrt(max(second.mean() - mean.mean() ** 2, 0.0)) / mean.mean() if mean.any() else 0.0
        )
        p95 = float(stats.p95(base))
        rows.append(
            (name, -saved * p95, -high * p95, -low * p95, float(stats.p95(less) / p95 - 1) / (LESS - 1), cv,
             paths[list(ops)].max(), len(ops))
        )  # fmt: skip
    rows.sort(key=lambda r: -r[1])
    names, saved, low, high, elastic, cv, critical, count = zip(*rows, strict=True)
    return schema.dataset(
        {
            "saved": ("signature", np.array(saved)),
            "saved_interval": (("signature", "ci_bound"), np.stack([low, high], axis=1)),
            "elasticity": ("signature", np.array(elastic)),
            "cv": ("signature", np.array(cv)),
            "criticality": ("signature", np.array(critical)),
            "count": ("signature", np.array(count)),
        },
        coords={"signature": list(names), "ci_bound": ["lower", "upper"]},
        made_by="prism.attribution.steadying",
        source=runs.attrs["source"],
        seed=seed,
        provenance={**schema.provenance(runs), "by": by},
    )


#: factor on durations behind the elasticity: small, and well above rounding
LESS = 0.99


class _Changed:
    """Some ops at their mean, or a little shorter. A class, so that it can be sent to another process."""

    may_be_idle = True

    def __init__(self, ops: tuple[int, ...], how: str) -> None:
        self.ops, self.how = ops, how

    def __call__(self, model: StepModel) -> StepModel:
        chosen = np.zeros(model.dag.n_ops, bool)
        chosen[list(self.ops)] = True
        change = _still if self.how == "still" else _less
        return model.override(np.repeat(chosen[:, None], model.dag.lanes, axis=1), change)


def _still(_: int, pool: DurationPool) -> DurationPool:
    return Fixed(pool.mean)


def _less(_: int, pool: DurationPool) -> DurationPool:
    return Scaled(pool, LESS)


def _groups(model: StepModel, by: str) -> dict[str, list[int]]:
    dag = model.dag
    kinds = [dag.signatures[s].op for s in dag.signature]
    labels = {
        "kind": lambda i: kinds[i],
        "rank": lambda i: f"rank {dag.rank[i]}" if dag.rank[i] >= 0 else None,
        "stage": lambda i: f"stage {dag.stage[i]}" if dag.stage[i] >= 0 else None,
        "rank and kind": lambda i: f"rank {dag.rank[i]} {kinds[i]}" if dag.rank[i] >= 0 else None,
    }
    if by not in labels:
        raise ValueError(f"by {by!r} is not one of {', '.join(labels)}")
    out: dict[str, list[int]] = {}
    for i in range(dag.n_ops):
        name = labels[by](i)
        if name is not None:
            out.setdefault(name, []).append(i)
    return out


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
    _check(model, [component], "p95")

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
    return [k for k in model.pools if _component(k.signature) == component]


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
