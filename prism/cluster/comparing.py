"""Policies, estimators and overrun rules side by side over the same real run times."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import xarray as xr
from scipy.stats import t as student

from prism.base import schema
from prism.base.runner import Executor, run_cells
from prism.cluster.machine import Checkpoint, Cluster, Speed
from prism.cluster.overrun import Overrun
from prism.cluster.policies import POLICIES
from prism.cluster.simulator import named, run_cluster
from prism.model.pools import DurationPool

#: shares of the completions over which means are taken
COMPLETIONS = (0.25, 0.5, 0.75, 0.9, 1.0)
#: numbers of a run, beside the times of its jobs
NUMBERS = ("share", "goodput", "delay_mean", "preempted", "killed", "failed", "makespan")


def mean_jct_of_first(run: xr.Dataset, count: int) -> float:
    """Mean completion time of the first `count` jobs to finish, seconds; NaN for none."""
    finish, jct = run["finish"].values, run["jct"].values
    first = np.argsort(finish, kind="stable")[:count]
    return float(np.mean(jct[first])) if count else np.nan


def compare_estimates(
    jobs: xr.Dataset,
    cluster: Cluster,
    *,
    policies: Sequence[str] = ("FCFS", "SRTF", "Arena*"),
    estimates: Sequence[str] = ("point", "p95"),
    overruns: Sequence[Overrun | str] = ("killable",),
    cv: float | DurationPool = 0.2,
    checkpoint: Checkpoint | None = None,
    speed: Speed | None = None,
    seeds: Sequence[int] = range(5),
    drain: bool = False,
    executor: Executor | None = None,
    progress: bool = False,
) -> xr.Dataset:
    """Policies x overrun rules x estimators, over the same real run times, at several levels of completion.

    Level q is the first ``q x (smallest number of jobs that any estimator finished)`` completions of a policy under a rule,
    so that estimators are compared over equally many jobs; the finished share is beside it, since a mean over finished jobs
    flatters whoever finishes fewer. With `drain` all jobs finish.

    Parameters
    ----------
    jobs, cluster, cv, checkpoint, speed, drain
        Passed on to `run_cluster`.
    policies, estimates, overruns : sequences
        Names (and rules).
    seeds : sequence of int
    executor : with the interface of `concurrent.futures`, optional
        Runs cells elsewhere: a process pool, a dask client's executor.
    progress : bool

    Returns
    -------
    Dataset
        ``jct(policy, overrun, scenario, trial, quantile)``, seconds, `scenario` being the estimator and `trial` the seed;
        ``share`` of submitted jobs that finished, ``goodput`` (useful over
        allocated GPU-seconds), ``delay_mean`` (s), ``preempted``, ``killed``, ``failed`` (counts), ``makespan`` (s).
    """
    rules = [Overrun(o) if isinstance(o, str) else o for o in overruns]
    names = [r.rule if r.growth == Overrun().growth else f"{r.rule} x{r.growth:g}" for r in rules]
    axes = (list(policies), rules, list(estimates), list(seeds))
    shape = tuple(len(a) for a in axes)
    for what, given in zip(
        ("policies", "overruns", "estimates", "seeds"), (*axes[:1], names, *axes[2:]), strict=True
    ):
        if len({str(g).lower() for g in given}) < len(given):
            raise ValueError(f"{what} are to be named once each, got {', '.join(map(str, given))}")
    if 0 in shape:
        raise ValueError("needs policies, overrun rules, estimates and seeds, at least one each")
    common = {"cv": cv, "checkpoint": checkpoint, "speed": speed, "drain": drain}
    cells = list(product(*(range(n) for n in shape)))
    found = _computed(jobs, cluster, axes, cells, common, executor, progress)
    jct = np.full((*shape, len(COMPLETIONS)), np.nan)
    for p, o, t in product(*(range(shape[k]) for k in (0, 1, 3))):
        runs = [found[p, o, e, t][0] for e in range(shape[2])]
        least = min(r.size for r in runs)
        for e, times in enumerate(runs):
            jct[p, o, e, t] = [
                times[: int(q * least)].mean() if int(q * least) else np.nan for q in COMPLETIONS
            ]
    numbers = {k: np.array([found[c][1][k] for c in cells]).reshape(shape) for k in NUMBERS}
    dims = ("policy", "overrun", "scenario", "trial")
    return schema.dataset(
        {"jct": ((*dims, "quantile"), jct)} | {k: (dims, v) for k, v in numbers.items()},
        coords={
            "policy": axes[0], "overrun": names, "scenario": axes[2], "trial": axes[3], "quantile": list(COMPLETIONS),
        },
        made_by="prism.cluster.compare_estimates",
        source=schema.derived_source(jobs.attrs["source"]),
        provenance={**schema.provenance(jobs), "cv": cv if isinstance(cv, float | int) else "pool", "drained": drain},
    )  # fmt: skip


def _computed(jobs, cluster, axes, cells, common: dict, executor, progress: bool) -> dict:
    """Runs of all cells. A policy that does not plan runs once for all rules and estimators."""

    def same(cell: tuple[int, ...]) -> tuple[int, ...]:
        policy = named(axes[0][cell[0]], POLICIES, "policy")
        return cell if getattr(policy, "plans", True) else (cell[0], 0, 0, cell[3])

    needed = list(dict.fromkeys(map(same, cells)))
    asked = {
        c: (jobs, cluster, *(axis[i] for axis, i in zip(axes, c, strict=True)), common)
        for c in needed
    }
    done = dict(run_cells(_cell, asked, executor=executor, progress=progress))
    return {c: done[same(c)] for c in cells}


def _cell(
    jobs, cluster, policy, rule, estimate, seed, common
) -> tuple[np.ndarray, dict[str, float]]:
    """Completion times of finished jobs in order of their ends, and numbers of the run."""
    run = run_cluster(jobs, cluster, policy, estimate=estimate, overrun=rule, seed=seed, **common)
    finish = run["finish"].values
    done = np.flatnonzero(np.isfinite(finish))
    submitted = int(np.sum(jobs["submit"].values < cluster.horizon))
    ledger = dict(
        zip(run["scenario"].values.tolist(), run["gpu_seconds"].values.tolist(), strict=True)
    )
    begun = run["delay"].values[np.isfinite(run["delay"].values)]
    return run["jct"].values[done[np.argsort(finish[done], kind="stable")]], {
        "share": done.size / max(submitted, 1),
        "goodput": ledger["useful"] / ledger["allocated"] if ledger["allocated"] else np.nan,
        "delay_mean": float(begun.mean()) if begun.size else np.nan,
        "preempted": int(run["preemptions"].sum()),
        "killed": int(run["kills"].sum()),
        "failed": int(run["failures"].sum()),
        "makespan": float(finish[done].max()) if done.size else np.nan,
    }


def ratios(
    found: xr.Dataset, *, of: str = "p95", to: str = "point", confidence: float = 0.95
) -> xr.Dataset:
    """Mean completion time with one estimator over that with another, by seed, with Student intervals.

    Parameters
    ----------
    found : Dataset of `compare_estimates`
    of, to : str
        Estimators.
    confidence : float

    Returns
    -------
    Dataset
        ``ratio(policy, overrun, quantile)``, mean over seeds, ``ratio_interval`` (NaN for one seed); ``share``, ``goodput``, ``killed`` and
        ``preempted`` with both.

    Raises
    ------
    ValueError
        Estimators that were not compared.
    """
    have = found["scenario"].values.astype(str).tolist()
    for name in (of, to):
        if name not in have:
            raise ValueError(f"estimate {name!r} was not compared; there are {', '.join(have)}")
    each = (found["jct"].sel(scenario=of) / found["jct"].sel(scenario=to)).values
    n = each.shape[2]
    mean = each.mean(axis=2)
    half = np.full_like(mean, np.nan)
    if n > 1:
        half = student.ppf((1 + confidence) / 2, n - 1) * each.std(axis=2, ddof=1) / np.sqrt(n)
    pair = found.sel(scenario=[to, of]).mean("trial")
    dims = ("policy", "overrun", "quantile")
    return schema.dataset(
        {
            "ratio": (dims, mean),
            "ratio_interval": ((*dims, "ci_bound"), np.stack([mean - half, mean + half], axis=-1)),
            "share": (("policy", "overrun", "scenario"), pair["share"].values),
            "goodput": (("policy", "overrun", "scenario"), pair["goodput"].values),
            "killed": (("policy", "overrun", "scenario"), pair["killed"].values),
            "preempted": (("policy", "overrun", "scenario"), pair["preempted"].values),
        },
        coords={
            "policy": found["policy"].values, "overrun": found["overrun"].values, "quantile": found["quantile"].values,
            "scenario": [to, of], "ci_bound": ["lower", "upper"],
        },
        made_by="prism.cluster.ratios",
        source=found.attrs["source"],
        provenance={**schema.provenance(found), "of": of, "to": to, "confidence": confidence},
    )  # fmt: skip
