"""Weak scaling: step time with the same work for each GPU and more replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr
from tqdm import tqdm

from prism.base import schema, stats
from prism.context.analytic_model import model_from_context
from prism.context.context import Context
from prism.model.coupling import Coupling, Loading
from prism.model.engine.montecarlo import simulate
from prism.model.pools import DurationPool, HeavyTail, LogNormal, Scaled
from prism.model.step_model import StepModel
from prism.whatif.scenarios import Frozen

COMPONENTS = ("all", "compute", "communication")
QUANTILES = (0.05, 0.5, 0.95)


@dataclass(frozen=True)
class Spread:
    """Assumed spread of ops around their mean.

    Attributes
    ----------
    compute, communication : DurationPool
        With mean 1.
    step : float
        Loading of the scores that all compute of a step shares, all communication between nodes, and all within
        them: one each.
    """

    compute: DurationPool
    communication: DurationPool
    step: float = 0.0

    def model(self, ctx: Context) -> StepModel:
        """The step of a context that varies like this."""
        model = model_from_context(ctx, variability=self.compute, communication=self.communication)
        shared = {"step": Loading(self.step)}
        kinds = {s.op for s in model.dag.signatures}
        return model.replace(coupling=Coupling(dict.fromkeys(kinds, shared) if self.step else {}))


def assumed_spreads() -> dict[str, Spread]:
    """Three ways in which ops might vary, assumptions all of them.

    ``light``: LogNormal, 3 % for compute and 10 % for communication, every op by itself. ``shared``: the same, with a
    quarter of the variance of scores common to a step. ``heavy``: 2 %, and one compute op in 500 or one transfer in
    100 beyond 1.04, where a Pareto tail begins whose variance barely exists.
    """
    compute, transfers = (LogNormal.from_moments(1.0, cv) for cv in (0.03, 0.1))
    return {
        "light": Spread(compute, transfers),
        "shared": Spread(compute, transfers, step=0.5),
        "heavy": Spread(_tailed(0.002, 0.4), _tailed(0.01, 0.45)),
    }


def _tailed(tail: float, shape: float) -> DurationPool:
    pool = HeavyTail(mu=0.0, sigma=0.02, threshold=1.04, tail=tail, shape=shape, scale=0.05)
    return Scaled(pool, 1 / pool.mean)


def at_size(ctx: Context, dp: int) -> Context:
    """The context with another number of replicas, and as many nodes as they need."""
    p = ctx.parallelism.model_copy(update={"dp": dp})
    nodes = -(-p.lanes * p.tp * p.pp // ctx.topology.gpus_per_node)
    changed = {"parallelism": {"dp": dp}, "topology": {"nodes": nodes}}
    return Context.model_validate(_with(ctx, changed))


def _with(ctx: Context, changed: Mapping[str, Mapping]) -> dict:
    given = {name: getattr(ctx, name) for name in type(ctx).model_fields}
    for part, values in changed.items():
        dumped = given[part].model_dump(exclude_none=True)
        given[part] = type(given[part]).model_validate(dumped | dict(values))
    return given


def weak_scaling(
    ctx: Context,
    dp: Sequence[int],
    spreads: Mapping[str, Spread],
    *,
    slowdowns: Sequence[float] = (0.01, 0.02, 0.05, 0.1),
    draws: int = 1000,
    seed: int = 0,
    progress: bool = False,
) -> xr.Dataset:
    """Simulate a job at several sizes; all of it varying, compute alone, and communication alone.

    Parameters
    ----------
    ctx : Context
    dp : sequence of int
        Numbers of replicas.
    spreads : mapping of name to Spread
    slowdowns : sequence of float
        Against the step in which nothing varies.
    draws, seed, progress

    Returns
    -------
    Dataset
        ``step_time(scenario, size, component, draw)``, ``step_mean``, ``step_std`` and ``step_quantile`` with
        intervals, s; ``exceeds(scenario, size, component, slowdown)`` with its interval. `size` is the number of
        GPUs.
    """
    if not len(dp) or not spreads:
        raise ValueError("needs at least one number of replicas and one spread")
    shape = (len(spreads), len(dp), len(COMPONENTS))
    times, still, gpus = np.empty((*shape, draws)), np.empty(len(dp)), []
    with tqdm(total=int(np.prod(shape)), disable=not progress, leave=False) as bar:
        for j, d in enumerate(dp):
            here = at_size(ctx, d)
            gpus.append(here.topology.gpus)
            for i, spread in enumerate(spreads.values()):
                model = spread.model(here)
                # pools of mean 1: the same step for every spread
                still[j] = simulate(model.at_mean, 1)["step_time"].values[0]
                for k, component in enumerate(COMPONENTS):
                    alone = _alone(model, component)
                    times[i, j, k] = simulate(alone, draws, seed=seed)["step_time"].values
                    bar.update()
    return _dataset(times, still, gpus, list(spreads), slowdowns, seed)


def _alone(model: StepModel, component: str) -> StepModel:
    """The model in which nothing but a component varies."""
    if component == "all":
        return model
    present = set(model.dag.component.tolist())
    local = present & {"compute", "host", "gap"}
    others = present - {"compute"} if component == "compute" else local
    return Frozen(tuple(sorted(others)))(model)


def _dataset(times, still, gpus, names, slowdowns, seed) -> xr.Dataset:
    flat = times.reshape(-1, times.shape[-1])
    dims, shape = ("scenario", "size", "component"), times.shape[:-1]
    rng = np.random.default_rng(seed)
    index = rng.integers(0, flat.shape[1], (500, flat.shape[1]))
    spread = np.array([np.quantile(x[index].std(axis=1), [0.025, 0.975]) for x in flat])
    quantiles = np.array([[stats.quantile_interval(x, q) for q in QUANTILES] for x in flat])
    limit = (1 + np.asarray(slowdowns)) * still[:, None]  # (size, slowdown)
    over = times[..., None, :] > limit[None, :, None, :, None]
    share = np.array([stats.share_interval(x) for x in over.reshape(-1, times.shape[-1])])
    return schema.dataset(
        {
            "step_time": ((*dims, "draw"), times),
            "step_mean": (dims, times.mean(axis=-1)),
            "step_std": (dims, times.std(axis=-1)),
            "step_std_interval": ((*dims, "ci_bound"), spread.reshape(*shape, 2)),
            "step_quantile": (
                (*dims, "quantile"),
                np.moveaxis(np.quantile(times, QUANTILES, axis=-1), 0, -1),
            ),
            "step_quantile_interval": (
                (*dims, "quantile", "ci_bound"),
                quantiles.reshape(*shape, len(QUANTILES), 2),
            ),
            "exceeds": ((*dims, "slowdown"), over.mean(axis=-1)),
            "exceeds_interval": (
                (*dims, "slowdown", "ci_bound"),
                share.reshape(*over.shape[:-1], 2),
            ),
        },
        coords={
            "scenario": names,
            "size": gpus,
            "component": list(COMPONENTS),
            "quantile": list(QUANTILES),
            "slowdown": list(slowdowns),
            "ci_bound": ["lower", "upper"],
        },
        made_by="prism.whatif.weak_scaling",
        source="synthetic",
        seed=seed,
        provenance={"without_variability_s": still.tolist()},
    )
