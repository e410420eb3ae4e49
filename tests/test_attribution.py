"""Shares against theory: they add up, serial ops give variance shares, symmetric branches one half each."""

from __future__ import annotations

import numpy as np
import pytest

from prism.attribution import ablate, budget, partition, savings
from prism.model.dag_builder import DagBuilder
from prism.model.engine.montecarlo import simulate
from prism.model.pools import Empirical, Fixed, Gamma, LogNormal, Normal, Scaled
from prism.model.signature import PoolKey, Signature
from prism.model.step_model import StepModel

COMPUTE, TP, DP = Signature("work"), Signature("tp", role="tp", scope="intra_node"), Signature("dp", role="dp", scope="inter_node")  # fmt: skip


def serial(cvs=(0.02, 0.03, 0.06)) -> StepModel:
    b, before = DagBuilder(), []
    for s in (COMPUTE, TP, DP):
        before = [b.add(s, [0, 1] if s is not COMPUTE else [0], after=before)]
    pools = {
        PoolKey(s): LogNormal.from_moments(1.0, cv)
        for s, cv in zip((COMPUTE, TP, DP), cvs, strict=True)
    }
    return StepModel(b.build([0, 1]), pools)


def parallel(spread=0.1) -> StepModel:
    b = DagBuilder()
    ends = [b.add(s, [0, 1]) for s in (TP, DP)]
    b.add(COMPUTE, [0], after=ends)
    pools = {PoolKey(s): LogNormal.from_moments(1.0, spread) for s in (TP, DP)}
    return StepModel(b.build([0, 1]), pools | {PoolKey(COMPUTE): Fixed(0.5)})


def test_serial_independent_ops_give_variance_shares_against_theory():
    found = ablate(serial(), statistic="variance", draws=20_000, resamples=200)
    truth = {"compute": 0.02**2, "tp": 0.03**2, "dp": 0.06**2}
    for c, v in truth.items():
        low, high = found["shapley_interval"].sel(component=c).values
        assert low - 1e-4 < v < high + 1e-4
        assert float(found["shapley"].sel(component=c)) == pytest.approx(v, rel=0.1)


@pytest.mark.parametrize("statistic", ["p95", "std", "cv", "variance"])
@pytest.mark.parametrize("make", [serial, parallel])
def test_shares_add_up_to_the_whole_invariant(make, statistic):
    found = ablate(make(), statistic=statistic, draws=500, resamples=20)
    names = [str(c) for c in found["component"].values]
    whole = found["value"].sel(ablation="+".join(names)) - found["value"].sel(ablation="none")
    assert float(found["shapley"].sum()) == pytest.approx(float(whole), abs=1e-12)
    assert found.sizes["ablation"] == 2 ** len(names)


def test_symmetric_branches_get_half_each_and_are_not_additive_against_theory():
    found = ablate(parallel(), components=("tp", "dp"), draws=20_000, resamples=200)
    tp, dp = found["shapley"].sel(component="tp"), found["shapley"].sel(component="dp")
    half = float(tp + dp) / 2
    low, high = found["shapley_interval"].sel(component="tp").values
    assert low < half < high
    # one branch alone already makes the maximum late; the second adds less
    assert float(found["last"].sel(component="dp")) < 0.8 * float(
        found["alone"].sel(component="dp")
    )


def test_intervals_of_shares_cover_at_their_rate():
    """The p95 share of one lone component: against its exact value, over seeds."""
    b = DagBuilder()
    b.add(COMPUTE, [0])
    model = StepModel(b.build([0]), {PoolKey(COMPUTE): LogNormal.from_moments(1.0, 0.2)})
    truth = float(LogNormal.from_moments(1.0, 0.2).quantile(0.95)) - 1.0
    hits = 0
    for seed in range(100):
        low, high = ablate(model, draws=400, resamples=200, seed=seed)["shapley_interval"].values[0]
        hits += low <= truth <= high
    assert hits / 100 > 0.95 - 4.5 * np.sqrt(0.0475 / 100)


def test_a_kernel_off_the_longest_path_is_not_worth_steadying_however_it_varies():
    b = DagBuilder()
    quick, long = Signature("quick"), Signature("long")
    ends = [b.add(quick, [0], stage=0), b.add(long, [1], stage=1)]
    b.add(DP, [0, 1], after=ends)
    pools = {PoolKey(quick): LogNormal.from_moments(0.1, 1.0), PoolKey(long): LogNormal.from_moments(10.0, 0.05),
             PoolKey(DP): Fixed(0.1)}  # fmt: skip
    model = StepModel(b.build([0, 1]), pools)
    found = savings(model, draws=2000)
    assert found["signature"].values[0] == "long"
    row = found.sel(signature="quick")
    assert float(row["cv"]) > 10 * float(found.sel(signature="long")["cv"])
    assert float(row["saved"]) == pytest.approx(0.0, abs=1e-9) and float(row["on_path"]) == 0.0
    # serial and dominant: p95 follows the mean
    assert float(found.sel(signature="long")["elasticity"]) == pytest.approx(10 / 10.1, abs=0.01)
    by_stage = savings(model, by="stage", draws=500)
    assert by_stage["signature"].values[0] == "stage 1"
    low, high = found.sel(signature="long")["saved_interval"].values
    exact = 10.0 * (float(LogNormal.from_moments(1.0, 0.05).quantile(0.95)) - 1.0)
    assert low - 0.03 < exact < high + 0.03


def test_a_budget_is_what_reaches_the_target():
    model = serial()
    now = float(np.quantile(simulate(model, 2000)["step_time"], 0.95))
    exact = budget(model, "dp", now)
    assert float(exact["spread_factor"]) == pytest.approx(1.0, abs=1e-3)
    half = budget(model, "dp", now - 0.03)
    assert 0 < float(half["spread_factor"]) < 1 and float(half["p95"]) <= now - 0.03
    assert float(budget(model, "dp", 100.0)["spread_factor"]) == 10.0
    with pytest.raises(ValueError, match="even if dp never varies"):
        budget(model, "dp", 3.0)
    scaled = StepModel(
        model.dag, dict(model.pools) | {PoolKey(DP): Scaled(LogNormal.from_moments(1.0, 0.06), 1.0)}
    )
    assert float(budget(scaled, "dp", now)["spread_factor"]) == pytest.approx(1.0, abs=1e-3)
    samples = StepModel(model.dag, dict(model.pools) | {PoolKey(DP): Empirical((0.5, 1.0, 1.5))})
    # 0.5 about a mean of 1 can be stretched twice before it turns negative
    assert float(budget(samples, "dp", 100.0)["spread_factor"]) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: ablate(m, components=("pp",)), "components pp: the model has compute, dp, tp"),
        (lambda m: ablate(m, components=("dp", "dp")), "each to be named once"),
        (lambda m: ablate(m, statistic="p99"), "statistic 'p99' is not one of p95"),
        (lambda m: savings(m, by="planet"), "by 'planet' is not one of kind"),
        (lambda m: budget(m, "pp", 1.0), "components pp"),
    ],
)
def test_questions_about_what_is_not_there_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(serial())


def test_every_op_is_of_one_component_invariant():
    model = serial()
    assert partition(model) == ["compute", "dp", "tp"]


def test_a_budget_under_a_scenario_is_of_what_the_scenario_made():
    """Ops that a scenario changed vary with the rest: half the spread is half the spread."""
    from prism.whatif.degradations import HotGpu, NodeSpeeds

    model = NodeSpeeds({0: 2.0})(serial())
    now = float(np.quantile(simulate(model, 2000)["step_time"], 0.95))
    found = budget(model, "compute", now)
    # p95 of a few draws is not quite monotone where other components vary more
    assert float(found["spread_factor"]) == pytest.approx(1.0, abs=0.01)
    assert 0 < float(budget(model, "compute", now - 0.005)["spread_factor"]) < 1
    b = DagBuilder(replicas=3)
    b.add(COMPUTE, [0], stage=0)
    lanes = StepModel(b.build([[0, 1, 2]]), {PoolKey(COMPUTE): LogNormal.from_moments(1.0, 0.05)})
    one_hot = HotGpu(0, 1.5, replica=2)(lanes)
    now = float(np.quantile(simulate(one_hot, 2000)["step_time"], 0.95))
    assert float(budget(one_hot, "compute", now)["spread_factor"]) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("family", ["normal", "gamma", "wide", "samples"])
def test_a_budget_of_any_pool_ends_where_it_can_vary_no_more(family):
    pool = {
        "normal": Normal(1.0, 0.05), "gamma": Gamma(100.0, 0.01), "wide": LogNormal.from_moments(1.0, 3.0),
        "samples": Empirical(tuple(np.random.default_rng(0).uniform(0.5, 1.5, 30))),
    }[family]  # fmt: skip
    b = DagBuilder()
    b.add(COMPUTE, [0])
    model = StepModel(b.build([0]), {PoolKey(COMPUTE): pool})
    found = budget(model, "compute", 3.0)
    if family == "wide":
        # at f = 1 p95 is 4.3 s, and it falls again where the tail takes all: the first crossing counts
        assert 0 < float(found["spread_factor"]) < 1 and float(found["p95"]) <= 3.0
    else:
        assert float(found["largest_factor"]) >= 1
    with pytest.raises(ValueError, match="target and most must be positive"):
        budget(model, "compute", float("nan"))


def test_elasticities_of_a_chain_are_its_shares_against_theory():
    """Serial ops of equal pools: each has its share of p95, and of the spread's part of it."""
    model = serial((0.05, 0.05, 0.05))
    found = savings(model, draws=4000)
    assert float(found["elasticity"].sum()) == pytest.approx(1.0, abs=0.02)
    for name in ("work", "tp", "dp"):
        row = found.sel(signature=name)
        low, high = row["elasticity_interval"].values
        assert low - 0.01 <= 1 / 3 <= high + 0.01
        assert 0 < float(row["elasticity_spread"]) < 0.05
        assert float(row["path_share"]) == pytest.approx(1 / 3, rel=0.02)
        assert float(row["on_path"]) == 1.0


def test_elasticity_of_many_alike_ranks_is_their_share():
    """Eight ranks into one collective: none is special, and a window of draws says so where one draw cannot."""
    b = DagBuilder()
    ends = [b.add(COMPUTE, [r]) for r in range(8)]
    b.add(DP, list(range(8)), after=ends)
    pools = {PoolKey(COMPUTE): LogNormal.from_moments(1.0, 0.05), PoolKey(DP): Fixed(0.1)}
    found = savings(StepModel(b.build(list(range(8))), pools), by="rank", draws=4000)
    values = found["elasticity"].values
    assert 0.85 < values.sum() < 1.0
    assert np.ptp(values) < 0.16
    assert found["elasticity_interval"].shape == (8, 2)


@pytest.mark.parametrize(
    "given", [{"components": "compute"}, {"resamples": 0}, {"confidence": 95}, {"draws": 1}]
)
def test_ablations_that_cannot_be_are_refused(given):
    with pytest.raises(ValueError, match="needs"):
        ablate(serial(), **given)
