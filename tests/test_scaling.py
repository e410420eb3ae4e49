"""What size does: maxima of light tails, shared factors and heavy tails, against what theory says."""

from __future__ import annotations

import numpy as np
import pytest

from prism.context.analytic_model import model_from_context
from prism.context.context import Context, Parallelism, Topology, Workload
from prism.model.pools import LogNormal
from prism.model.step_model import StepModel
from prism.whatif.scaling import Spread, assumed_spreads, at_size, weak_scaling
from prism.whatif.scenarios import Frozen


@pytest.fixture(scope="module")
def job() -> Context:
    return Context(
        workload=Workload.preset("megatron-22b", layers=2),
        parallelism=Parallelism(dp=2, tp=8, microbatches=1),
        topology=Topology.preset("dgx-a100", nodes=2),
    )


@pytest.fixture(scope="module")
def found(job):
    return weak_scaling(job, [4, 64], assumed_spreads(), draws=800)


def test_size_is_the_number_of_gpus_and_work_stays(job, found):
    assert found["size"].values.tolist() == [32, 512]
    assert at_size(job, 16).topology.nodes == 16
    assert at_size(job, 16).workload == job.workload


def test_maxima_of_light_tails_vary_less_and_shared_factors_alike_against_theory(found):
    """Largest of n log-normals: its spread falls like 1 / sqrt(2 ln n); a factor of all ops keeps its own."""
    std = found["step_std"].sel(component="compute")
    interval = found["step_std_interval"].sel(component="compute")
    light, shared, heavy = (std.sel(scenario=s).values for s in ("light", "shared", "heavy"))
    assert interval.sel(scenario="light", size=512)[1] < interval.sel(scenario="light", size=32)[0]
    assert shared[1] / shared[0] == pytest.approx(1.0, abs=0.1)
    assert heavy[1] / heavy[0] > 1.2 > light[1] / light[0]


def test_means_grow_with_size_invariant(found):
    for name in found["scenario"].values:
        small, large = found["step_mean"].sel(scenario=name, component="compute").values
        assert large > small


def test_exceedance_against_theory():
    """One GPU whose ops all share one factor: the share over +x is that of the factor itself."""
    pool = LogNormal.from_moments(1.0, 0.05)
    alone = Context(
        workload=Workload.preset("megatron-22b", layers=2),
        parallelism=Parallelism(),
        topology=Topology.preset("dgx-a100", nodes=1, gpus_per_node=1),
    )
    ds = weak_scaling(
        alone, [1], {"one": Spread(pool, pool, step=1.0)}, slowdowns=[0.03], draws=4000
    )
    share = float(ds["exceeds"].sel(component="all", slowdown=0.03).item())
    expected = 1 - float(pool.frozen.cdf(1.03))
    assert share == pytest.approx(expected, abs=4.5 * np.sqrt(expected * (1 - expected) / 4000))
    assert float(ds["exceeds"].sel(component="communication", slowdown=0.03).item()) == 0.0


def test_frozen_components_do_not_vary_and_the_others_do(job):
    model = model_from_context(job, variability=LogNormal.from_moments(1.0, 0.1))
    still = Frozen(("compute", "dp", "tp"))(model)
    assert isinstance(still, StepModel)
    assert all(p.std == 0 for p in still.op_pools)
    half = Frozen(("dp",))(model)
    for op, (a, b) in enumerate(zip(model.op_pools, half.op_pools, strict=True)):
        role = model.dag.signatures[model.dag.signature[op]].role
        assert b.mean == pytest.approx(a.mean)
        assert (b.std == 0) == (role == "dp")


def test_a_component_that_is_not_there_is_refused(job):
    model = model_from_context(job)
    with pytest.raises(
        ValueError, match=r"no op is of component ep; the model has compute, dp, tp"
    ):
        Frozen(("ep",))(model)
    with pytest.raises(ValueError, match="at least one number of replicas"):
        weak_scaling(job, [], assumed_spreads())
