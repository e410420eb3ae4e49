"""From a context to a step model: the graph of its schedule, analytic means, a measured spread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import xarray as xr

from prism.context import analytic
from prism.context.context import Context, StageTimes
from prism.context.parts import BACKWARD, FORWARD, OPTIMIZER
from prism.context.step_graph import StepGraph
from prism.context.topology import Efficiency
from prism.measure import fleet as _fleet
from prism.model.coupling import Coupling, Loading
from prism.model.dag import WorkloadDAG
from prism.model.engine.montecarlo import propagate
from prism.model.pools import DurationPool, Fixed, LogNormal, Scaled
from prism.model.signature import PoolKey
from prism.model.step_model import StepModel

__all__ = [
    "BACKWARD", "FORWARD", "OPTIMIZER", "analytic_pools", "assumed_coupling", "build_dag", "deterministic_step", "model_from_context",
]  # fmt: skip


def build_dag(ctx: Context) -> WorkloadDAG:
    """The graph of one step: a pipeline schedule, what its ops consist of, gradients reduced across replicas.

    A template: one pipeline is written out, data and context parallelism are its lanes, and their
    collectives join groups of lanes. Tensor-parallel ranks are one op of their width, or written out
    (`prism.context.Parallelism.fold_tp`). A transfer between stages is an op on its link that neither side
    waits in: the sender goes on, the receiver needs it. Two ops of a schedule that run side by side share the
    GPU by turns, while either one's collectives run beside the other's compute.

    Parameters
    ----------
    ctx : Context

    Returns
    -------
    WorkloadDAG
        Rank ``stage x slices + slice`` of the template is a pipeline stage's tensor-parallel slice (one slice
        if they are folded); lane r of it is rank ``ctx.rank(stage, r, slice)``.
    """
    return StepGraph(ctx).dag


def analytic_pools(
    ctx: Context,
    *,
    variability: xr.Dataset | DurationPool | None = None,
    kernel: str | None = None,
    communication: DurationPool | None = None,
) -> dict[PoolKey, DurationPool]:
    """Pools with analytic means and a measured shape, for every op of a context's graph.

    Parameters
    ----------
    ctx : Context
    variability : Dataset of `read_fleet` or DurationPool with mean 1, optional
        How compute varies around its mean. None: as ``ctx.variability`` says.
    kernel : str, optional
        Which kernel of the fleet stands for compute; its first if not given.
    communication : DurationPool with mean 1, optional
        How transfers vary; LogNormal with the link's cv if not given.

    Returns
    -------
    dict of PoolKey to DurationPool
    """
    return _pools(StepGraph(ctx), variability, kernel, communication)


def model_from_context(
    ctx: Context,
    *,
    variability: xr.Dataset | DurationPool | None = None,
    kernel: str | None = None,
    communication: DurationPool | None = None,
) -> StepModel:
    """Analytic means (`prism.analytic`), spread from a fleet, coupling as ``ctx.variability`` says.

    Parameters
    ----------
    ctx, variability, kernel, communication
        Passed on to `analytic_pools`.

    Returns
    -------
    StepModel
        Source ``synthetic``: nobody measured this job.

    Raises
    ------
    prism.context.MemoryShortage
        If the job does not fit on its GPUs.
    """
    if not isinstance(ctx.workload, StageTimes):
        analytic.check_memory(ctx)
    step = StepGraph(ctx)
    pools = _pools(step, variability, kernel, communication)
    return StepModel(step.dag, pools, assumed_coupling(ctx, step.dag), source="synthetic")


def assumed_coupling(ctx: Context, dag: WorkloadDAG) -> Coupling:
    """Loadings of the context's variability, for every kind of op of the graph."""
    v = ctx.variability
    compute = {
        n: Loading(a) for n in ("step", "node", "rank", "microbatch") if (a := getattr(v, n))
    }
    shared = {"step": Loading(v.communication_step)} if v.communication_step else {}
    by_kind = {s.op: compute if s.role == "compute" else shared for s in dag.signatures}
    return Coupling({kind: levels for kind, levels in by_kind.items() if levels})


def _pools(step: StepGraph, variability, kernel, communication) -> dict[PoolKey, DurationPool]:
    if isinstance(variability, xr.Dataset):
        variability = _fleet.relative_pool(variability, kernel)
    cv = step.ctx.variability.compute_cv
    if variability is None and cv > 0:
        variability = LogNormal.from_moments(1.0, cv)
    pools: dict[PoolKey, DurationPool] = {}
    for signature, part in step.parts.items():
        shape = variability
        if not part.is_compute:
            shape = communication
            if shape is None and part.cv > 0:
                shape = LogNormal.from_moments(1.0, part.cv)
        mean = part.price(step.ctx.topology)
        varies = shape is not None and mean > 0
        pools[PoolKey(signature)] = Scaled(shape, mean) if varies else Fixed(mean)
    return pools


def deterministic_step(ctx: Context) -> Callable[[Efficiency], float]:
    """Step time of a context if nothing varies, as a function of what its hardware reaches.

    The graph is built once; another efficiency changes means only. What a rank does one after the other is one op
    of it, which is exact where nothing varies.
    """
    step = StepGraph(ctx, merged=True)
    # lanes that do not vary are alike: one stands for all
    dag = replace(step.dag, lanes=1)

    def seconds(efficiency: Efficiency) -> float:
        topology = ctx.topology.model_copy(update={"efficiency": efficiency})
        mean = np.array([step.parts[s].price(topology) for s in dag.signatures])
        _, finish = propagate(dag, mean[dag.signature][:, None])
        return float(finish.max())

    return seconds
