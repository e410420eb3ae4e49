"""Ablation of components: every subset with common random numbers, and Shapley shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, combinations
from math import factorial

import numpy as np
import xarray as xr

from prism.base import schema
from prism.model.step_model import StepModel
from prism.whatif.scenarios import Frozen
from prism.whatif.sweeping import Executor, sweep

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
    """Components that every op belongs to exactly one of: compute, host, gap, and the roles of process groups."""
    return sorted({s.component for s in model.dag.signatures})


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
    """Attribute a statistic of step time to components: alone, last, and as Shapley shares.

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
        Number of resamples of the bootstrap over draws, the same ones in every subset.
    executor, progress
        Passed on to `prism.sweep`.

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
    if isinstance(components, str):
        raise ValueError(f"components needs a sequence of names, got {components!r}")
    if draws < 2 or resamples < 1 or not 0 < confidence < 1:
        raise ValueError(
            f"needs at least 2 draws and a resample, and a confidence between 0 and 1, got {draws}, {resamples}, {confidence}"
        )
    names = list(partition(model) if components is None else components)
    check(model, names, statistic)
    subsets = list(chain.from_iterable(combinations(names, n) for n in range(len(names) + 1)))
    label = {s: "+".join(s) or "none" for s in subsets}
    frozen = {label[s]: only(model, s) for s in subsets}
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


def check(model: StepModel, names: list[str], statistic: str) -> None:
    """Refuse components and statistics that there are not."""
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


def only(model: StepModel, varying: Sequence[str]):
    """Scenario in which only some components vary; None if that is all of them."""
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
