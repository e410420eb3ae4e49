"""From a context to a step: schedules and step times against published oracles and closed forms."""

from __future__ import annotations

import json

import numpy as np
import pytest
from pydantic import ValidationError
from scipy import stats

from prism.base.specs import SpecError
from prism.context import analytic_model
from prism.context.context import Context, Link, Parallelism, StageTimes, Topology, read_context
from prism.model.engine.montecarlo import simulate
from prism.model.pools import Empirical, Fixed
from prism.traces import synthetic_steps

FREE = Link(bandwidth=1e30, latency=0.0)


def context(pp=4, dp=1, microbatches=8, schedule="1f1b", forward=1.0, backward=2.0, **links):
    parallelism = Parallelism(dp=dp, pp=pp, microbatches=microbatches, schedule=schedule)
    stages = parallelism.plan.stages
    return Context(
        workload=StageTimes(
            name="unit", forward_s=[forward] * stages, backward_s=[backward] * stages, optimizer_s=1e-12,
            activation_bytes=1.0, gradient_bytes=1.0,
        ),
        parallelism=parallelism,
        topology=Topology(nodes=pp, gpus_per_node=dp, **{"intra_node": FREE, "inter_node": FREE} | links),
    )  # fmt: skip


@pytest.fixture(scope="module")
def oracles(prism_data):
    return json.loads((prism_data / "schedules.json").read_text())


def test_makespans_against_published(oracles):
    """The graph of every schedule takes as long as the oracle says, with and without latency. Stage times halve a
    backward in two parts, so that cells with other halves are left to the schedules' own test."""
    seen = set()
    for case in oracles["grid"]:
        shape = {
            "microbatches": case["microbatches"],
            "pp": case["stages"],
            "schedule": case["name"],
        }
        for times, makespan in case["makespan"].items():
            f, b, w = map(float, times.split(","))
            whole = case["name"] in ("gpipe", "gpipe_lifo", "1f1b", "interleaved_1f1b")
            if b == w or whole:
                ctx = context(**shape, forward=f, backward=b + w)
                assert step_time(ctx) == pytest.approx(makespan), (case["name"], times)
                seen.add((case["name"], times))
        late = context(**shape, inter_node=Link(bandwidth=1e30, latency=1.0))
        assert step_time(late) == pytest.approx(case["makespan_p2p_latency_1"])
    assert {name for name, _ in seen} == {row["name"] for row in oracles["grid"]}
    assert len(seen) >= 15


def step_time(ctx: Context) -> float:
    return float(simulate(analytic_model.model_from_context(ctx), 1).step_time[0])


@pytest.mark.parametrize(("pp", "m"), [(1, 1), (2, 4), (4, 8), (16, 64)])
def test_zero_variance_1f1b_against_theory(pp, m):
    """Makespan (m + p - 1)(f + b)."""
    assert step_time(context(pp=pp, microbatches=m)) == pytest.approx((m + pp - 1) * 3.0)


def test_ring_all_reduce_against_theory():
    link = Link(bandwidth=1e9, latency=1e-3)
    ctx = Context(
        workload=StageTimes(name="r", forward_s=[1.0], backward_s=[1.0], optimizer_s=0.5,
                          activation_bytes=1.0, gradient_bytes=4e9),
        parallelism=Parallelism(dp=4),
        topology=Topology(nodes=1, gpus_per_node=4, intra_node=link, inter_node=FREE),
    )  # fmt: skip
    # 2 (n - 1) steps of latency + bytes / (n bandwidth)
    assert step_time(ctx) == pytest.approx(1 + 1 + 6 * (1e-3 + 1.0) + 0.5)


def test_dag_has_every_op_once():
    dag = analytic_model.build_dag(context(pp=4, dp=3, microbatches=5))
    names = [dag.signatures[s].op for s in dag.signature]
    assert names.count("forward-compute") == names.count("backward-compute") == 4 * 5
    assert names.count("send-recv") == 2 * 3 * 5
    assert names.count("all_reduce") == names.count("optimizer") == 4
    assert np.unique(dag.key).size == dag.n_ops
    written_out = dag.unroll()
    assert written_out.n_ops == 3 * (20 + 20 + 30 + 4) + 4


def test_variability_keeps_the_analytic_mean():
    shape = Empirical((0.8, 1.0, 1.2))
    model = analytic_model.model_from_context(context(), variability=shape)
    still = analytic_model.model_from_context(context())
    for varied, fixed in zip(model.op_pools, still.op_pools, strict=True):
        assert varied.mean == pytest.approx(fixed.mean)
        assert isinstance(fixed, Fixed)


def test_synthetic_steps_share_a_factor():
    model = analytic_model.model_from_context(context(), variability=Empirical((0.99, 1.0, 1.01)))
    coupled = synthetic_steps(model, 400, step_cv=0.05, seed=1)
    alone = synthetic_steps(model, 400, step_cv=0.0, seed=1)
    assert coupled.source == "synthetic"
    assert float(coupled.step_time.std()) > 5 * float(alone.step_time.std())
    assert stats.ks_2samp(alone.step_time, simulate(model, 4000).step_time).pvalue > 1e-3


def test_degrees_must_multiply_up():
    with pytest.raises(ValidationError, match="dp 2 x pp 4 = 8 ranks, but 4 nodes x 1 GPUs = 4"):
        Context(
            workload=context().workload,
            parallelism=Parallelism(dp=2, pp=4),
            topology=context().topology,
        )


def test_embedded_context_is_valid(root):
    assert read_context(root / "inputs/small_step.yaml").parallelism.pp == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("pp: 4", "pp: 3"), "make them equal"),
        (("forward_s: [0.020, ", "forward_s: ["), "forward_s has 3 times for pp = 4"),
        (("schedule: 1f1b", "schedule: zigzag"), r"parallelism: schedule: 'zigzag' is not one of gpipe, .*1f1b"),
        (("dp: 4", "dp: four"), r"parallelism.dp: .*got 'four'"),
        (("workload:", "workload: ["), "not valid YAML at line"),
        (("  name: small-1f1b", "  nme: small-1f1b"), "workload.nme: Extra inputs"),
    ],
)  # fmt: skip
def test_bad_contexts_are_refused_in_one_line(root, tmp_path, change, message):
    file = tmp_path / "ctx.yaml"
    file.write_text((root / "inputs/small_step.yaml").read_text().replace(*change, 1))
    with pytest.raises(SpecError, match=message) as fault:
        read_context(file)
    assert "\n" not in str(fault.value)
