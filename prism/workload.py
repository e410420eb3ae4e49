"""From a context to a step model: the graph of its schedule, analytic means, a fleet's spread."""

from __future__ import annotations

import numpy as np
import xarray as xr

from prism import fleet as _fleet
from prism import schema
from prism.context import Context, Link
from prism.dag import WorkloadDAG
from prism.dagbuilder import DagBuilder
from prism.model import StepModel
from prism.montecarlo import propagate, sample_durations
from prism.pools import DurationPool, Fixed, LogNormal, Scaled
from prism.schedules import SCHEDULES
from prism.signature import PoolKey, Signature, stable_hash

FORWARD, BACKWARD, OPTIMIZER = "forward-compute", "backward-compute", "optimizer"
NAME = {"F": FORWARD, "BW": BACKWARD}


def build_dag(ctx: Context) -> WorkloadDAG:
    """The graph of one step: a pipeline schedule, gradients reduced across replicas.

    A template: one replica is written out, data parallelism is its number of replicas, and the
    gradient reductions join them. A transfer between stages is an op on its link that neither side
    waits in: the sender goes on, the receiver needs it. After its last backward a stage reduces its
    gradients over its replicas, then each rank runs the optimizer.

    Parameters
    ----------
    ctx : Context

    Returns
    -------
    WorkloadDAG
        Rank s of the template is pipeline stage s; replica r of it is rank ``ctx.rank(s, r)``.
    """
    p = ctx.parallelism
    builder = DagBuilder(replicas=p.dp)
    orders = SCHEDULES[p.schedule](p.pp, p.microbatches)
    compute = _pipeline(builder, orders)
    _transfers(builder, ctx, compute)
    for stage, order in enumerate(orders):
        kind, microbatch = order[-1]
        end = compute[kind, stage, microbatch]
        if p.dp > 1:
            nodes = {ctx.node_of_rank[ctx.rank(stage, r)] for r in range(p.dp)}
            reduce = Signature("all_reduce", f"stage {stage}", "", "dp", _scope(len(nodes) > 1))
            end = builder.add(reduce, [stage], stage=stage, joins="all", after=[end])
        builder.add(Signature(OPTIMIZER), [stage], stage=stage, after=[end])
    ranks = [[ctx.rank(s, r) for r in range(p.dp)] for s in range(p.pp)]
    return builder.build(np.array(ctx.node_of_rank)[ranks])


def _pipeline(builder: DagBuilder, orders: list) -> dict[tuple[str, int, int], int]:
    """Compute ops, each stage in the order of its schedule: (kind, stage, microbatch) -> op."""
    compute = {}
    for stage, order in enumerate(orders):
        before: list[int] = []
        for kind, microbatch in order:
            op = builder.add(
                Signature(NAME[kind], f"stage {stage}"),
                [stage],
                stage=stage,
                microbatch=microbatch,
                position=microbatch,
                after=before,
            )
            before = [op]
            compute[kind, stage, microbatch] = op
    # a microbatch goes back where it went forth, also where the schedule alone would allow less
    for (kind, stage, microbatch), op in compute.items():
        if kind == "BW":
            builder.wait(op, [compute["F", stage, microbatch]])
    return compute


def _transfers(builder: DagBuilder, ctx: Context, compute: dict) -> None:
    p = ctx.parallelism
    for kind, step in (("F", 1), ("BW", -1)):
        for stage in range(p.pp):
            peer = stage + step
            if not 0 <= peer < p.pp:
                continue
            link = f"stage {stage}->{peer}"
            crosses = any(
                ctx.node_of_rank[ctx.rank(stage, r)] != ctx.node_of_rank[ctx.rank(peer, r)]
                for r in range(p.dp)
            )
            signature = Signature("send-recv", link, "", "pp", _scope(crosses))
            for m in range(p.microbatches):
                sent = builder.add(
                    signature, [stage, peer], site=link, microbatch=m, position=m,
                    after=[compute[kind, stage, m]],
                )  # fmt: skip
                builder.wait(compute[kind, peer, m], [sent])


def _scope(crosses_nodes: bool) -> str:
    return "inter_node" if crosses_nodes else "intra_node"


def model_from_context(
    ctx: Context,
    *,
    variability: xr.Dataset | DurationPool | None = None,
    kernel: str | None = None,
) -> StepModel:
    """Analytic means, spread from a fleet.

    Compute: the context's mean times the relative durations of a fleet kernel. Transfers:
    ``latency + bytes / bandwidth``; all-reduce over n ranks as a ring:
    ``2 (n - 1) (latency + bytes / (n bandwidth))`` (Patarasuk and Yuan 2009); both LogNormal with the
    link's cv.

    Parameters
    ----------
    ctx : Context
    variability : Dataset of `read_fleet` or DurationPool with mean 1, optional
        None: compute does not vary.
    kernel : str, optional
        Which kernel of the fleet stands for compute; its first if not given.

    Returns
    -------
    StepModel
        Source ``synthetic``: nobody measured this job.
    """
    if isinstance(variability, xr.Dataset):
        variability = _fleet.relative_pool(variability, kernel)
    dag = build_dag(ctx)
    pools = {}
    for signature in dag.signatures:
        mean, cv = _analytic(ctx, signature)
        if signature.role == "compute":
            pool = Scaled(variability, mean) if variability is not None else Fixed(mean)
        else:
            pool = LogNormal.from_moments(mean, cv) if cv > 0 else Fixed(mean)
        pools[PoolKey(signature)] = pool
    return StepModel(dag, pools, source="synthetic")


def _analytic(ctx: Context, signature: Signature) -> tuple[float, float]:
    """Mean (s) and cv of an op; the cv of compute comes from the fleet."""
    w, n = ctx.workload, ctx.parallelism.dp
    if signature.op == OPTIMIZER:
        return w.optimizer_s, 0.0
    if signature.role == "compute":
        times = w.forward_s if signature.op == FORWARD else w.backward_s
        return times[int(signature.shape.split()[1])], 0.0
    link: Link = getattr(ctx.topology, signature.scope)
    if signature.role == "pp":
        return link.latency + w.activation_bytes / link.bandwidth, link.cv
    return 2 * (n - 1) * (link.latency + w.gradient_bytes / (n * link.bandwidth)), link.cv


def synthetic_steps(
    model: StepModel, steps: int, *, step_cv: float = 0.02, seed: int = 0
) -> xr.Dataset:
    """A made-up recording of a model: what `prism.traces.observe` would give, source ``synthetic``.

    Each step's compute ops share one LogNormal factor with mean 1 and cv `step_cv`, a dependence
    that real steps show and that independent draws of the ops cannot: so a comparison against this
    recording can fail, and should.

    Returns
    -------
    Dataset
        ``duration(step, op)``, ``gap(step, op)`` (zero), ``step_time(step)``, seconds, where `op` runs
        over ``model.dag.unroll()``.
    """
    dag = model.dag.unroll()
    # a stream of its own: with that of `simulate`, a prediction would know the recording
    stream = stable_hash("recording", int(seed)) >> 1
    duration = sample_durations(model.replace(dag=dag), steps, seed=stream)
    if step_cv > 0:
        factor = LogNormal.from_moments(1.0, step_cv)
        shared = factor.quantile(np.random.default_rng(stream).random(steps))
        compute = np.array([s.role == "compute" for s in dag.signatures])
        duration[compute[dag.signature]] *= shared
    _, finish = propagate(dag, duration)
    return schema.dataset(
        {
            "duration": (("step", "op"), duration.T),
            "gap": (("step", "op"), np.zeros_like(duration.T)),
            "step_time": ("step", finish.max(axis=0)),
        },
        coords={"step": np.arange(steps)},
        made_by="prism.workload.synthetic_steps",
        source="synthetic",
        seed=seed,
        provenance={"step_cv": step_cv},
    )
