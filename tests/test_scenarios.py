"""Hot nodes: whom they touch, by how much, and what may be said about the result."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from graphs import fork_join, keyed

from prism.attribution import ablate
from prism.context import analytic_model
from prism.context.context import read_context
from prism.measure import fleet
from prism.measure.fleet import ReferenceFleet, synthetic_fleet
from prism.model import DagBuilder, PoolKey, Signature
from prism.model.engine.montecarlo import simulate
from prism.model.pools import Empirical, Fixed, LogNormal, Scaled
from prism.model.step_model import StepModel
from prism.whatif.degradations import HotGpu, NodeSpeeds, SlowLink
from prism.whatif.scenarios import Frozen, HotNode, increases, stages_by_node, unchanged
from prism.whatif.sweeping import sweep


@pytest.fixture(scope="module")
def model(root):
    devices = fleet.read_fleet(root / "inputs/reference_fleet.yaml")
    ctx = read_context(root / "inputs/small_step.yaml")
    return analytic_model.model_from_context(ctx, variability=devices, kernel="gemm_varied")


def factors(before: StepModel, after: StepModel) -> np.ndarray:
    return np.array([b.mean / a.mean for a, b in zip(before.op_pools, after.op_pools, strict=True)])


def test_scale_multiplies_by_the_fleets_ratio(model):
    hot = HotNode(2)(model)
    dag = model.dag
    on_node = np.array([2 in dag.node_of_rank[dag.member[a:b]] for a, b in
                        itertools.pairwise(dag.member_ptr)])  # fmt: skip
    for op in range(dag.n_ops):
        signature = dag.signatures[dag.signature[op]]
        touched = on_node[op] and signature.scope != "intra_node"
        fleet_pool = model.fleet_pool(op)
        ratio = float(fleet_pool.quantile(0.95) / fleet_pool.quantile(0.5)) if touched else 1.0
        assert hot.op_pools[op].mean == pytest.approx(ratio * model.op_pools[op].mean)
        assert hot.op_pools[op].cv == pytest.approx(model.op_pools[op].cv)


def test_pin_is_the_constant_quantile_of_the_fleet(model):
    hot = HotNode(0, mode="pin")(model)
    for op in np.flatnonzero(factors(model, hot) != 1.0):
        assert hot.op_pools[op] == Fixed(float(model.fleet_pool(op).quantile(0.95)))


def test_a_fleet_slows_the_whole_node_by_one_factor(model):
    shape = Empirical(tuple(np.linspace(0.5, 1.5, 101)))
    changed = factors(model, HotNode(1, fleet=shape)(model))
    by_own_pools = factors(model, HotNode(1)(model))
    np.testing.assert_allclose(
        changed[by_own_pools != 1], shape.quantile(0.95) / shape.quantile(0.5)
    )
    assert np.all(changed[by_own_pools == 1] == 1)


def test_a_fleet_pins_compute_and_leaves_traffic_to_its_own_pool(model):
    shape = Empirical(tuple(np.linspace(0.5, 1.5, 101)))
    hot = HotNode(1, mode="pin", fleet=shape)(model)
    for (op, lane), pool in hot.overrides.items():
        assert lane == -1
        if model.dag.signatures[model.dag.signature[op]].role == "compute":
            assert pool.value == pytest.approx(
                model.op_pools[op].mean * float(shape.quantile(0.95))
            )
        else:
            assert pool.value == pytest.approx(float(model.fleet_pool(op).quantile(0.95)))


def test_hotter_never_shortens_a_step_invariant(model):
    runs = sweep(model, {str(q): HotNode(3, at=q) for q in (0.51, 0.7, 0.9, 0.99)}, 300)
    assert np.all(np.diff(runs.step_time.values, axis=0) >= 0)


def test_pinning_can_shorten_a_step():
    """The reason why monotonicity is claimed for `scale` only."""
    dag = fork_join(1)
    pool = LogNormal(0.0, 1.0)
    model = StepModel(dag, keyed(dag, [pool]))
    runs = sweep(model, {"free": unchanged, "pinned": HotNode(0, at=0.95, mode="pin")}, 2000)
    free, pinned = runs.step_time.values
    assert np.any(pinned < free)


def test_hot_node_against_theory():
    """One op on the hot node: p95 rises by exactly the factor."""
    dag = fork_join(1)
    model = StepModel(dag, keyed(dag, [LogNormal(0.0, 0.2)]))
    runs = sweep(model, {"healthy": unchanged, "hot": HotNode(0)}, 1000)
    effect = increases(runs, "healthy")
    factor = np.exp(0.2 * 1.6448536269514722)
    np.testing.assert_allclose(effect.increase, factor - 1, rtol=1e-3)
    np.testing.assert_allclose(effect.increase_interval, factor - 1, rtol=1e-3)


def test_no_effect_is_exactly_none_negative_control(model):
    """Common random numbers: a node as fast as the median changes no byte, and a sweep says so."""
    as_median = HotNode(1, at=0.5)
    a, b = (simulate(m, 200)["step_time"] for m in (model, as_median(model)))
    np.testing.assert_allclose(a, b, rtol=1e-12)
    with pytest.raises(ValueError, match="scenario 'b' changes nothing"):
        sweep(model, {"a": unchanged, "b": as_median}, 200)


def test_order_of_scenarios_changes_nothing_invariant(model):
    ab = sweep(model, {"a": unchanged, "b": HotNode(1)}, 100)
    ba = sweep(model, {"b": HotNode(1), "a": unchanged}, 100)
    np.testing.assert_array_equal(ab.sel(scenario="b").step_time, ba.sel(scenario="b").step_time)


def test_scenarios_compose(model):
    both = HotNode(1)(HotNode(2)(model))
    changed = factors(model, both) != 1.0
    assert np.array_equal(
        changed, (factors(model, HotNode(1)(model)) != 1) | (factors(model, HotNode(2)(model)) != 1)
    )


def test_stages_sit_on_their_nodes(model):
    assert stages_by_node(model.dag) == {i: f"stage {i}" for i in range(4)}


def test_a_synthetic_factor_makes_the_result_synthetic(model):
    measured = model.replace(source="measured")
    made = synthetic_fleet(ReferenceFleet.preset("h100", gpus=8))
    for source, expected in (("measured", "simulated"), ("synthetic", "synthetic")):
        hot = HotNode(0, fleet=made.assign_attrs(source=source))
        assert sweep(measured, {"healthy": unchanged, "hot": hot}, 10).source == expected
    # factors, links and shapes that are given by hand were measured by nobody
    for by_hand in (
        HotNode(0, fleet=Empirical((0.9, 1.0, 1.2))), NodeSpeeds({0: 1.2}), HotGpu(0, 1.2), SlowLink(2.0),
    ):  # fmt: skip
        assert sweep(measured, {"healthy": unchanged, "worse": by_hand}, 10).source == "synthetic"
    assert NodeSpeeds({0: 1.0})(measured).source == "measured"


def test_components_are_one_partition_for_every_question():
    b = DagBuilder()
    host = b.add(Signature("launch", role="host"), [0])
    gap = b.add(Signature("gap before forward", role="gap"), [0], after=[host])
    ops = [b.add(Signature("forward"), [0], after=[gap]), b.add(Signature("forward"), [1])]
    b.add(Signature("all_reduce", role="dp", scope="inter_node"), [0, 1], after=ops)
    dag = b.build([0, 1])
    model = StepModel(dag, {PoolKey(s): LogNormal.from_moments(1.0, 0.2) for s in dag.signatures})
    words = {"compute", "dp", "gap", "host"}
    assert set(simulate(model, 50, paths=True)["component"].values) == words
    assert set(ablate(model, draws=50, resamples=5)["component"].values) == words
    for word in words:
        rest = Frozen(tuple(words - {word}))(model)
        varies = {s.component for s in dag.signatures if rest.pools[PoolKey(s)].cv > 0}
        assert varies == {word}
    with pytest.raises(ValueError, match="no op is of component communication"):
        Frozen(("communication",))(model)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: HotNode(4)(m), "node 4 does not exist: the job has nodes 0 to 3"),
        (lambda m: HotNode(0, at=1.0), "strictly between 0 and 1"),
        (lambda m: HotNode(0, mode="melt"), "'scale' or 'pin', got 'melt'"),
        (lambda m: sweep(m, {}), "at least one scenario"),
    ],
)
def test_bad_scenarios_are_refused(model, make, message):
    with pytest.raises(ValueError, match=message):
        make(model)


def test_missing_fleet_pool_is_named():
    dag = fork_join(1)
    exact = {dag.pool_keys[0]: Scaled(LogNormal(0.0, 0.1), 2.0)}
    with pytest.raises(ValueError, match="no fleet-wide pool for branch 0"):
        HotNode(0)(StepModel(dag, exact))
