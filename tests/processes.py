"""Known processes: steps whose dependence was planted, drawn by numpy and by nothing of PRISM's engine."""

from __future__ import annotations

import numpy as np
from scipy import stats

from prism.model.dag import WorkloadDAG
from prism.model.dag_builder import DagBuilder
from prism.model.signature import Signature
from prism.traces import MeasuredSteps

COMPUTE = {"step": 0.35, "rank": 0.3, "microbatch": 0.75}
TRANSFER = {"step": 0.5}
EVENT = 0.04


def pipeline(stages: int = 3, replicas: int = 3, microbatches: int = 4) -> WorkloadDAG:
    """A forward-backward pipeline with transfers, launch gaps and a joining reduction, written out."""
    b = DagBuilder()
    ends: dict[tuple[int, int], int] = {}
    for r in range(replicas):
        forward: dict[tuple[int, int], int] = {}
        for m in range(microbatches):
            for s in range(stages):
                rank = s * replicas + r
                after = [ends[s, r]] if (s, r) in ends else []
                if s:
                    link = [rank - replicas, rank]
                    sent = b.add(
                        Signature("send", f"{s}", "", "pp", "inter_node"), link, dp=r, position=m,
                        after=[forward[s - 1, m]],
                    )  # fmt: skip
                    after.append(sent)
                gap = b.add(
                    Signature("gap", f"{s}", role="gap"), [rank], dp=r, position=m, after=after
                )
                forward[s, m] = ends[s, r] = b.add(
                    Signature("forward", f"{s}"), [rank], stage=s, microbatch=m, position=m, dp=r,
                    after=[gap],
                )  # fmt: skip
        for m in range(microbatches):
            for s in reversed(range(stages)):
                rank = s * replicas + r
                after = [ends[s, r]] + ([forward[s + 1, m]] if s + 1 < stages else [])
                forward[s, m] = ends[s, r] = b.add(
                    Signature("backward", f"{s}"), [rank], stage=s, microbatch=m, position=m, dp=r,
                    after=after,
                )  # fmt: skip
    for s in range(stages):
        ranks = [s * replicas + r for r in range(replicas)]
        b.add(
            Signature("reduce", f"{s}", "", "dp", "inter_node"), ranks, stage=s,
            after=[ends[s, r] for r in range(replicas)],
        )  # fmt: skip
    return b.build([0] * (stages * replicas))


def record(dag: WorkloadDAG, steps: int, seed: int, *, coupled: bool) -> MeasuredSteps:
    """Steps of the process: LogNormal compute, heavy transfers, gaps, and rare joint slow reductions."""
    rng = np.random.default_rng(seed)
    kind = np.array([s.op for s in dag.signatures])[dag.signature]
    z = rng.standard_normal((dag.n_ops, steps))
    if coupled:
        shared: dict = {}

        def score(*name):
            return shared.setdefault(name, rng.standard_normal(steps))

        for op in range(dag.n_ops):
            loadings = COMPUTE if kind[op] in ("forward", "backward") else TRANSFER
            own = np.sqrt(1 - sum(a * a for a in loadings.values()))
            name = {
                "step": ("step", kind[op] if kind[op] == "gap" else dag.rank[op] >= 0),
                "rank": ("rank", dag.rank[op]),
                "microbatch": ("microbatch", dag.dp[op], dag.microbatch[op]),
            }
            z[op] = own * z[op] + sum(a * score(*name[level]) for level, a in loadings.items())
    u = stats.norm.cdf(z)
    if coupled:
        reduce = kind == "reduce"
        strikes = rng.random(steps) < EVENT
        u[reduce] = np.where(strikes, 1 - EVENT * (1 - u[reduce]), (1 - EVENT) * u[reduce])
    quantile = {
        "forward": stats.lognorm(0.08, scale=0.010).ppf,
        "backward": stats.lognorm(0.08, scale=0.020).ppf,
        "send": lambda p: 0.0005 + 0.0005 * stats.pareto(2.5).ppf(p),
        "gap": stats.gamma(2.0, scale=0.0005).ppf,
        "reduce": lambda p: (
            stats.lognorm(0.15, scale=0.010).ppf(p) + 0.05 * np.maximum(p - 0.96, 0) / 0.04
        ),
    }
    duration = np.empty_like(u)
    for name, ppf in quantile.items():
        duration[kind == name] = ppf(u[kind == name])
    return MeasuredSteps.from_arrays(dag, duration, made_by="tests.processes", seed=seed)
