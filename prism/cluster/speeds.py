"""Speed of a job by number of GPUs, from a model of its step."""

from __future__ import annotations

from collections.abc import Sequence

from prism.cluster.machine import Speed
from prism.context.analytic_model import deterministic_step
from prism.context.context import Context


def speed_from_context(ctx: Context, dp: Sequence[int]) -> Speed:
    """Speed at other numbers of replicas, with the same sequences a step shared out among them.

    Step times are those of `prism.context.deterministic_step`: means only. The context's own number of replicas is the one
    that a job asks for.

    Parameters
    ----------
    ctx : Context
    dp : sequence of int
        Numbers of replicas, each a divisor of replicas times microbatches of the context.

    Raises
    ------
    ValueError
        Numbers of replicas that do not share out the step.

    Examples
    --------
    >>> from prism.context import Parallelism, Topology, Workload
    >>> ctx = Context(
    ...     workload=Workload.preset("llama3-8b"),
    ...     parallelism=Parallelism(dp=2, tp=8, microbatches=16),
    ...     topology=Topology.preset("dgx-h100", nodes=2),
    ... )
    >>> speed = speed_from_context(ctx, [1, 2, 4])
    >>> 1.5 < float(speed(2.0)) < 2.0
    True
    """
    p = ctx.parallelism
    total = p.dp * p.microbatches
    times = {}
    for n in sorted({*dp, p.dp}):
        if n < 1 or total % n:
            raise ValueError(
                f"{n} replicas do not share {total} microbatches; a divisor of {total} does"
            )
        nodes = -(-n * p.cp * p.tp * p.pp // ctx.topology.gpus_per_node)
        changed = p.model_dump() | {"dp": n, "microbatches": total // n}
        here = Context(
            workload=ctx.workload,
            parallelism=type(p).model_validate(changed),
            topology=ctx.topology.model_copy(update={"nodes": nodes}),
            variability=ctx.variability,
        )
        times[n] = deterministic_step(here)(here.topology.efficiency)
    factors = tuple(n / p.dp for n in times)
    return Speed(factors, tuple(1.0 if n == p.dp else times[p.dp] / t for n, t in times.items()))
