"""Savings: reduction of p95 if some ops were constant, by kind, rank, stage or place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import xarray as xr

from prism.base import schema, stats
from prism.model.dag import WorkloadDAG
from prism.model.engine.montecarlo import simulate
from prism.model.pools import DurationPool, Fixed, Scaled, Shifted
from prism.model.step_model import StepModel
from prism.whatif.sweeping import Executor, sweep

#: factors on durations, and on their distance from the mean, behind elasticities: near 1, and well above rounding
LESS, STEADIER = 0.999, 0.99
#: quantiles between which draws stand for the p95
AROUND = (0.93, 0.97)


def savings(
    model: StepModel,
    *,
    by: str = "kind",
    draws: int = 2000,
    resamples: int = 300,
    seed: int = 0,
    executor: Executor | None = None,
    progress: bool = False,
) -> xr.Dataset:
    """Compute the reduction of p95 if some ops were constant, and its response to their mean and spread.

    Elasticities are relative changes of p95 over the relative change of what is changed, all durations of the group (`elasticity`)
    or their distance from the mean alone (`elasticity_spread`), taken on the mean of the draws between the quantiles of
    `AROUND`: a single order statistic moves with the longest path of one draw.

    Parameters
    ----------
    model : StepModel
    by : {"kind", "rank", "stage", "rank and kind"}
        What is taken together: ops of a name, of a rank (its compute), of a pipeline stage, of a name on a rank.
    draws, seed, executor, progress
        Passed on to `prism.sweep`.
    resamples : int
        Number of resamples of the paired bootstrap over draws behind the 95 % intervals.

    Returns
    -------
    Dataset
        Per `signature` (a name of what was taken together), the largest saving first: ``saved`` (p95 of the model
        minus p95 with these ops at their mean, seconds), ``elasticity`` and ``elasticity_spread``, with intervals; ``cv`` of
        their pools taken together, ``path_share`` (of the longest path's time), ``on_path`` (ops of the group on the longest
        path of a draw, on average; in whichever replica) and ``count``.

    Raises
    ------
    ValueError
        Unknown groupings.
    """
    groups = _groups(model.dag, by)
    scenarios: dict[str, _Changed | None] = {"all": None}
    for name, ops in groups.items():
        scenarios |= {f"{how} {name}": _Changed(ops, change) for how, change in CHANGES.items()}
    runs = sweep(model, scenarios, draws=draws, seed=seed, executor=executor, progress=progress)
    paths = simulate(model, min(draws, 500), seed=seed, paths=True)
    pick = np.random.default_rng(seed).integers(0, draws, (resamples, draws))
    base = _resampled(runs["step_time"].sel(scenario="all").values, pick)
    rows = {name: _row(model, runs, name, ops, paths, base, pick) for name, ops in groups.items()}
    names = sorted(rows, key=lambda n: -rows[n]["saved"])
    data: dict[str, tuple] = {}
    for key in next(iter(rows.values())):
        dims = ("signature", "ci_bound") if key.endswith("_interval") else ("signature",)
        data[key] = (dims, np.array([rows[n][key] for n in names]))
    return schema.dataset(
        data,
        coords={"signature": names, "ci_bound": ["lower", "upper"]},
        made_by="prism.attribution.savings",
        source=runs.attrs["source"],
        seed=seed,
        provenance={**schema.provenance(runs), "by": by},
    )


def _resampled(x: np.ndarray, pick: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """p95, and the mean between the quantiles of `AROUND`: of the draws, then of each resample."""
    every = np.sort(np.vstack([x[None, :], x[pick]]), axis=1)
    low, high = (round(q * x.size) for q in AROUND)
    return stats.p95(every), every[:, low : max(high, low + 1)].mean(axis=1)


def _row(model: StepModel, runs: xr.Dataset, name: str, ops: tuple, paths, base, pick) -> dict:
    """Compute the figures of one group of ops."""
    p95, around = base
    changed = {
        how: _resampled(runs["step_time"].sel(scenario=f"{how} {name}").values, pick)
        for how in CHANGES
    }
    out: dict[str, object] = {}
    for key, values in {
        "saved": p95 - changed["still"][0],
        "elasticity": (changed["less"][1] / around - 1) / (LESS - 1),
        "elasticity_spread": (changed["steadier"][1] / around - 1) / (STEADIER - 1),
    }.items():
        out[key] = values[0]
        out[f"{key}_interval"] = np.quantile(values[1:], [0.025, 0.975])
    pools = [model.op_pools[o] for o in ops]
    mean = np.array([p.mean for p in pools])
    second = np.array([p.std**2 + p.mean**2 for p in pools])
    spread = np.sqrt(max(second.mean() - mean.mean() ** 2, 0.0))
    on_path = paths["criticality"].values[list(ops)]
    return out | {
        "cv": spread / mean.mean() if mean.any() else 0.0,
        "path_share": float(on_path @ mean) / float(paths["step_time"].mean()),
        "on_path": float(on_path.sum()),
        "count": len(ops),
    }


def savings_by_place(
    model: StepModel,
    *,
    rows: str = "stage",
    columns: str = "kind",
    draws: int = 1000,
    seed: int = 0,
    executor: Executor | None = None,
    progress: bool = False,
) -> xr.Dataset:
    """Compute the reduction of p95 if the ops of one kind at one place were constant.

    Parameters
    ----------
    model : StepModel
    rows : {"rank", "stage", "replica"}
    columns : {"kind", "stage"}
        Ops that belong to no one rank or stage (collectives) are in a row of their own, ``shared``.
    draws, seed, executor, progress
        Passed on to `prism.sweep`; one scenario a cell.

    Returns
    -------
    Dataset
        ``saved(place, kind)``, s, with ``saved_interval``; NaN where there is no such op.

    Raises
    ------
    ValueError
        Unknown groupings.
    """
    at, of = _labels(model.dag, rows), _labels(model.dag, columns)
    cells: dict[tuple[str, str], list[int]] = {}
    for op, cell in enumerate(zip(at, of, strict=True)):
        cells.setdefault(cell, []).append(op)
    scenarios = {f"{r} | {c}": _Changed(tuple(ops), _still) for (r, c), ops in cells.items()}
    runs = sweep(
        model, {"all": None} | scenarios, draws, seed=seed, executor=executor, progress=progress
    )["step_time"]
    names = [list(dict.fromkeys(sorted(x, key=_natural))) for x in (at, of)]
    saved = np.full((len(names[0]), len(names[1])), np.nan)
    interval = np.full((*saved.shape, 2), np.nan)
    pick = np.random.default_rng(seed).integers(0, draws, (300, draws))
    base = _resampled(runs.sel(scenario="all").values, pick)[0]
    for r, c in cells:
        i, j = names[0].index(r), names[1].index(c)
        less = base - _resampled(runs.sel(scenario=f"{r} | {c}").values, pick)[0]
        saved[i, j], interval[i, j] = less[0], np.quantile(less[1:], [0.025, 0.975])
    return schema.dataset(
        {
            "saved": (("place", "kind"), saved),
            "saved_interval": (("place", "kind", "ci_bound"), interval),
        },
        coords={"place": names[0], "kind": names[1], "ci_bound": ["lower", "upper"]},
        made_by="prism.attribution.savings_by_place",
        source=schema.derived_source(model.source),
        seed=seed,
        provenance={"draws": draws, "rows": rows, "columns": columns},
    )


@dataclass(frozen=True)
class _Changed:
    """Some ops at their mean, or a little shorter. A class, so that it can be sent to another process."""

    ops: tuple[int, ...]
    change: Callable[[int, DurationPool], DurationPool]
    allows_no_effect = True

    def __call__(self, model: StepModel) -> StepModel:
        chosen = np.zeros((model.dag.n_ops, model.dag.lanes), bool)
        chosen[list(self.ops)] = True
        return model.override(chosen, self.change)


def _still(_: int, pool: DurationPool) -> DurationPool:
    return Fixed(pool.mean)


def _less(_: int, pool: DurationPool) -> DurationPool:
    return Scaled(pool, LESS)


def _steadier(_: int, pool: DurationPool) -> DurationPool:
    return Shifted(Scaled(pool, STEADIER), (1 - STEADIER) * pool.mean)


CHANGES = {"still": _still, "less": _less, "steadier": _steadier}


#: what belongs to no one rank or stage
SHARED = "shared"


def _labels(dag: WorkloadDAG, by: str) -> list[str]:
    """The group of each op."""
    if by == "kind":
        return [dag.signatures[s].op for s in dag.signature]
    index = {"rank": dag.rank, "stage": dag.stage, "replica": dag.dp}.get(by)
    if index is None or (by == "replica" and dag.lanes > 1):
        words = "kind, rank, stage" + ("" if dag.lanes > 1 else ", replica")
        raise ValueError(f"by {by!r} is not one of {words}")
    return [f"{by} {i}" if i >= 0 else SHARED for i in index]


def _groups(dag: WorkloadDAG, by: str) -> dict[str, tuple[int, ...]]:
    """Ops by group; those that belong to none are left out."""
    if by == "rank and kind":
        pairs = zip(_labels(dag, "rank"), _labels(dag, "kind"), strict=True)
        labels = [SHARED if r == SHARED else f"{r} {k}" for r, k in pairs]
    else:
        labels = _labels(dag, by)
    out: dict[str, list[int]] = {}
    for op, label in enumerate(labels):
        if label != SHARED:
            out.setdefault(label, []).append(op)
    return {label: tuple(ops) for label, ops in out.items()}


def _natural(label: str) -> tuple:
    """Numbers in their order, words after them."""
    word, _, number = label.rpartition(" ")
    return (0, word, int(number)) if number.isdigit() else (1, label, 0)
