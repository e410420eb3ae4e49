"""Cost of slow ops in a measured job: replays with ideal durations for all ops outside a group.

The question, and the measure, of Lin et al. (OSDI 2025): an ideal op of a kind takes the mean over all ranks and steps
if it computes and the median if it communicates.
"""

from __future__ import annotations

import numpy as np
import xarray as xr

from prism.base import schema, stats
from prism.base.stats.random_effects import variance_components
from prism.model.dag import WorkloadDAG
from prism.model.engine.montecarlo import propagate
from prism.traces.measured_steps import MeasuredSteps

#: neighbouring steps that the bootstrap keeps together
BLOCK = 4


def slowdown_by_group(measured: MeasuredSteps, *, by: str = "kind") -> xr.Dataset:
    """Slow-down of a job by groups of its ops.

    ``slowdown_g = T(ideal but for g) / T(ideal)``: step time, mean over steps, with the measured durations of group g and
    ideal ones elsewhere. An op belongs to every group one of whose ranks takes part in it.

    Parameters
    ----------
    measured : MeasuredSteps
    by : {"kind", "stage", "replica", "rank"}

    Returns
    -------
    Dataset
        ``slowdown(signature)``, the largest first, with ``slowdown_interval`` (bootstrap over blocks of steps); ``slowdown_all``, of
        the measured job; ``step_mean``, s, with ideal ops everywhere.

    Raises
    ------
    ValueError
        Unknown groupings; a recording of another graph.
    """
    dag = measured.dag
    groups = _groups(dag, by)
    duration = measured.duration.values.T
    ideal = _ideal(dag, duration)

    def steps(d: np.ndarray) -> np.ndarray:
        return propagate(dag, d)[1].max(axis=0)

    best = steps(ideal)
    rows = {
        name: steps(np.where(member[:, None], duration, ideal)) for name, member in groups.items()
    }
    rng = np.random.default_rng(0)
    # neighbouring steps are alike
    index = np.array([stats.block_indices(rng, best.size, BLOCK) for _ in range(1000)])
    base = best[index].mean(axis=1)
    found = sorted(
        (
            (
                x.mean() / best.mean(),
                np.quantile(x[index].mean(axis=1) / base, [0.025, 0.975]),
                name,
            )
            for name, x in rows.items()
        ),
        key=lambda f: -f[0],
    )
    return schema.dataset(
        {
            "slowdown": ("signature", [f[0] for f in found]),
            "slowdown_interval": (("signature", "ci_bound"), [f[1] for f in found]),
            "slowdown_all": ((), float(steps(duration).mean() / best.mean())),
            "step_mean": ((), float(best.mean())),
        },
        coords={"signature": [f[2] for f in found], "ci_bound": ["lower", "upper"]},
        made_by="prism.traces.slowdown_by_group",
        source=measured.source,
        provenance={**measured.provenance, "by": by},
    )


def _ideal(dag: WorkloadDAG, duration: np.ndarray) -> np.ndarray:
    out = np.empty_like(duration)
    kinds = dag.kind
    compute = dag.is_compute
    for kind in np.unique(kinds):
        ops = kinds == kind
        out[ops] = np.mean(duration[ops]) if compute[ops].all() else np.median(duration[ops])
    return out


def _groups(dag: WorkloadDAG, by: str) -> dict[str, np.ndarray]:
    """Ops of each group, bool (op,)."""
    if by == "kind":
        kinds = dag.kind
        return {str(k): kinds == k for k in np.unique(kinds)}
    if by not in ("rank", "stage", "replica"):
        raise ValueError(f"by {by!r} is not one of kind, stage, replica, rank")
    own = {"rank": dag.rank, "stage": dag.stage, "replica": dag.dp}[by]
    owned = (dag.rank >= 0) & (own >= 0)
    owner = np.repeat(np.arange(dag.n_ops), np.diff(dag.member_ptr))
    out = {}
    for v in np.unique(own[owned]):
        # a rank of several stages takes part for each of them; what it does alone is of one
        theirs = np.isin(dag.member, dag.rank[owned & (own == v)])
        member = np.zeros(dag.n_ops, bool)
        member[owner[theirs]] = True
        out[f"{by} {v}"] = np.where(owned, own == v, member)
    if not out:
        raise ValueError(f"no op of the graph is of a {by}")
    return out


def persistent_stragglers(measured: MeasuredSteps, *, confidence: float = 0.95) -> xr.Dataset:
    """Split the variation of a kind of op over ranks into a persistent and a passing part.

    Durations are taken relative to the median of the same kind, stage and step over ranks, and a rank's over its ops of a
    step; what is left differs between ranks (it stays: a slow machine) or from step to step (it passes).

    Parameters
    ----------
    measured : MeasuredSteps
    confidence : float

    Returns
    -------
    Dataset
        Per `kind` of compute that at least three ranks do: ``persistent_share`` of the variance, with interval;
        ``slowdown(kind, rank)``, the mean of the rank's over steps.

    Raises
    ------
    ValueError
        A recording of another graph; no such kind, or fewer than two steps.
    """
    duration = measured.duration.values.T
    dag = measured.dag
    kinds = dag.kind
    ranks = np.unique(dag.member)
    found, means = {}, {}
    compute = dag.is_compute
    for kind in np.unique(kinds[compute]):
        relative = _relative(dag, duration, (kinds == kind) & compute, ranks)
        if np.isfinite(relative).any(axis=1).sum() >= 3 and relative.shape[1] >= 2:
            found[str(kind)] = variance_components(relative, confidence=confidence)
            means[str(kind)] = _nanmean(relative)
    if not found:
        raise ValueError("no kind of compute is done by three ranks over two steps")
    names = sorted(found, key=lambda k: -found[k].share)
    return schema.dataset(
        {
            "persistent_share": ("kind", [found[k].share for k in names]),
            "persistent_share_interval": (
                ("kind", "ci_bound"),
                [found[k].share_interval for k in names],
            ),
            "slowdown": (("kind", "rank"), [means[k] for k in names]),
        },
        coords={"kind": names, "rank": ranks, "ci_bound": ["lower", "upper"]},
        made_by="prism.traces.persistent_stragglers",
        source=measured.source,
        provenance={**measured.provenance, "confidence": confidence},
    )


def _relative(dag: WorkloadDAG, duration: np.ndarray, ops: np.ndarray, ranks: np.ndarray):
    """Mean over a rank's ops of a step of duration over the median of ranks alike, (rank, step)."""
    out = np.full((ranks.size, duration.shape[1]), np.nan)
    for stage in np.unique(dag.stage[ops]):
        here = ops & (dag.stage == stage)
        own = np.unique(dag.rank[here])
        mean = np.stack([duration[here & (dag.rank == r)].mean(axis=0) for r in own])
        middle = np.median(mean, axis=0)
        if own.size > 1 and (middle > 0).all():
            out[np.searchsorted(ranks, own)] = mean / middle
    return out


def _nanmean(x: np.ndarray) -> np.ndarray:
    known = np.isfinite(x)
    return np.where(
        known.any(axis=1), np.nansum(x, axis=1) / np.maximum(known.sum(axis=1), 1), np.nan
    )
