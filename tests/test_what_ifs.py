"""What-ifs: together and contradictory, over time, between sites; where a bad node hurts."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from prism.attribution import persistent_share, savings_by_place
from prism.base.stats.random_effects import variance_components
from prism.context import analytic_model
from prism.context.context import read_context
from prism.model.coupling import Coupling, Loading
from prism.model.dag_builder import DagBuilder
from prism.model.engine.montecarlo import simulate
from prism.model.pools import Fixed, LogNormal
from prism.model.signature import PoolKey, Signature
from prism.model.step_model import StepModel
from prism.whatif import datacenters, histories, placement
from prism.whatif.degradations import CrossDatacenter, NodeSpeeds, SlowLink
from prism.whatif.scenarios import Compose, Frozen, HotNode
from prism.whatif.sweeping import sweep

DP = Signature("all-reduce", "4e+09 B", role="dp", scope="inter_node")


@pytest.fixture(scope="module")
def model(root):
    ctx = read_context(root / "inputs/small_step.yaml")
    return analytic_model.model_from_context(ctx, variability=LogNormal.from_moments(1.0, 0.03))


def chain(cvs=(0.05, 0.05)) -> StepModel:
    """Two nodes, one op each, then a transfer."""
    b = DagBuilder()
    first, second = (
        b.add(Signature(f"work-{i}"), [i], stage=i, after=[0] if i else []) for i in range(2)
    )
    b.add(DP, [0, 1], after=[first, second])
    pools = {
        PoolKey(Signature(f"work-{i}")): LogNormal.from_moments(1.0, cv) for i, cv in enumerate(cvs)
    }
    return StepModel(b.build([0, 1]), pools | {PoolKey(DP): Fixed(0.1)})


def test_together_is_one_after_the_other_invariant(model):
    parts = NodeSpeeds({1: 1.3}), SlowLink(2.0), Frozen(("dp",))
    by_hand = parts[2](parts[1](parts[0](model)))
    both = sweep(model, {"x": Compose(*parts), "y": lambda _: by_hand}, 50)["step_time"]
    np.testing.assert_array_equal(both[0], both[1])
    # speeds of one node multiply
    twice = Compose(NodeSpeeds({1: 1.3}), NodeSpeeds({1: 2.0}))(model)
    np.testing.assert_allclose(
        simulate(twice, 50)["step_time"], simulate(NodeSpeeds({1: 2.6})(model), 50)["step_time"]
    )


@pytest.mark.parametrize(
    "parts",
    [
        (SlowLink(2.0, between=(1, 2)), CrossDatacenter(1, 1e9, 0.01, 1e6)),
        (CrossDatacenter(1, 2e9, 0.01, 1e6), CrossDatacenter(1, 1e9, 0.01, 1e6)),
    ],
)
def test_what_undoes_another_is_refused(model, parts):
    with pytest.raises(ValueError, match=r"part 2 .* undoes what came before on"):
        Compose(*parts)(model)
    with pytest.raises(ValueError, match="at least one scenario"):
        Compose()


def test_pinning_a_slowed_node_undoes_it(root):
    m = chain()
    pinned = HotNode(0, mode="pin")
    with pytest.raises(ValueError, match="undoes"):
        Compose(NodeSpeeds({0: 1.5}), pinned)(m)
    Compose(NodeSpeeds({1: 1.5}), pinned)(m)


def test_a_course_takes_each_states_own_draws_invariant(model):
    course = np.where(histories.flapping(60, up=5, down=3, seed=1), 3.0, 1.0)
    found = histories.simulate_course(model, course, SlowLink, name="flapping")["step_time"]
    states = sweep(model, {"1": None, "3": SlowLink(3.0)}, 60)["step_time"].values
    np.testing.assert_allclose(
        found.sel(scenario="flapping"), np.where(course == 3.0, states[1], states[0]), rtol=1e-14
    )
    many = histories.simulate_course(
        model, np.linspace(1, 2, 50), lambda f: NodeSpeeds({3: f}), name="ramp", levels=4
    )
    assert many.sizes["scenario"] == 5
    rising = many["step_time"].sel(scenario="ramp").values
    assert rising[-10:].mean() > rising[:10].mean()


def test_a_flapping_link_holds_its_states_for_the_time_it_says_against_theory():
    bad = histories.flapping(200_000, up=20, down=5, seed=3)
    assert bad.mean() == pytest.approx(0.2, abs=0.01)
    turns = np.flatnonzero(np.diff(bad.astype(int)) == 1).size
    assert bad.sum() / turns == pytest.approx(5, rel=0.05)


def test_a_throttled_node_heats_at_its_rate_against_theory():
    """T = 1 - (1 - 1/h)^n passes the limit at n = log(1 - limit) / log(1 - 1/h)."""
    course = histories.throttled(400, factor=1.3, heating=20, limit=0.9, resume=0.7, cooled=0.4)
    first = int(np.argmax(course > 1))
    assert first == int(np.ceil(np.log(0.1) / np.log(1 - 1 / 20)))
    assert set(course) == {1.0, 1.3} and 0.1 < (course[first:] > 1).mean() < 0.9


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: histories.throttled(10, factor=1.2, heating=5, resume=0.95), "cooled < resume < limit"),
        (lambda: histories.throttled(10, factor=0.5, heating=5), "factor and heating must be at least 1"),
        (lambda: histories.flapping(10, up=0, down=3), "up and down are mean numbers of steps"),
        (lambda: histories.rotating(0, 3), "draws must be at least 1"),
        (lambda: CrossDatacenter(1, 1e9, 0.01, 1e6, replicas=2), "give one of them"),
        (lambda: CrossDatacenter(), "give one of them"),
    ],
)  # fmt: skip
def test_courses_and_cuts_that_cannot_be(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_cut_replicas_add_what_must_cross_against_theory(root):
    """One all-reduce of 4 GB between four replicas, nothing varies: its own time plus latency and bytes."""
    b = DagBuilder(replicas=4)
    work = b.add(Signature("work"), [0], stage=0)
    b.add(DP, [0], after=[work], joins="all")
    m = StepModel(
        b.build([[0, 1, 2, 3]]), {PoolKey(Signature("work")): Fixed(1.0), PoolKey(DP): Fixed(0.5)}
    )
    cut = CrossDatacenter(replicas=1, bandwidth=1e9, latency=0.02)
    assert float(simulate(cut(m), 1)["step_time"][0]) == pytest.approx(1.5 + 0.02 + 4.0)
    jitter = CrossDatacenter(replicas=1, bandwidth=1e9, latency=0.02, jitter=0.2)(m)
    step = simulate(jitter, 4000)["step_time"].values
    assert step.mean() == pytest.approx(1.5 + 4.02, abs=4 * 0.2 * 4.02 / 63)
    assert step.std() == pytest.approx(0.2 * 4.02, rel=0.1)
    with pytest.raises(ValueError, match="needs a model of lanes, and 1 to 3"):
        CrossDatacenter(replicas=4)(m)


def test_bytes_that_nobody_knows_are_asked_for(model):
    with pytest.raises(ValueError, match="does not say its bytes: give message"):
        CrossDatacenter(1)(model)


def test_distance_and_the_bandwidth_that_is_enough(model):
    found = datacenters.split_cost(
        model, after=1, message=6.7e7, bandwidths=[1e9, 1e10, 1e11], jitters=[0.0, 0.5], draws=200
    )
    rise = found["increase"].isel(latency=0)
    assert (np.diff(rise.values, axis=0) < 0).all()
    assert (rise.sel(jitter=0.5) > rise.sel(jitter=0.0)).all()
    limit = float(rise.sel(jitter=0.0, bandwidth=1e10))
    needed = datacenters.bandwidth_needed(found, limit)
    assert float(needed["bandwidth_needed"].sel(jitter=0.0)[0]) == pytest.approx(1e10)
    low, high = needed["bandwidth_needed_interval"].sel(jitter=0.0).values[0]
    assert low <= 1e10 <= high
    assert np.isinf(datacenters.bandwidth_needed(found, 1e-9)["bandwidth_needed"].values).all()
    with pytest.raises(ValueError, match="bandwidth needs values, each once"):
        datacenters.split_cost(model, after=1, message=1.0, bandwidths=[1e9, 1e9])


def test_a_node_on_a_path_with_slack_costs_nothing_and_shares_add_up():
    b = DagBuilder()
    ends = [b.add(Signature("long"), [0], stage=0), b.add(Signature("short"), [1], stage=1)]
    b.add(DP, [0, 1], after=ends)
    m = StepModel(
        b.build([0, 1]),
        {
            PoolKey(Signature("long")): LogNormal.from_moments(2.0, 0.02),
            PoolKey(Signature("short")): LogNormal.from_moments(0.5, 0.02),
            PoolKey(DP): Fixed(0.1),
        },
    )
    found = placement.position_costs(m, lambda n: NodeSpeeds({n: 1.3}), draws=300)
    assert found["increase"].values[1] == 0.0
    assert found["increase"].values[0] == pytest.approx(0.3 * 2.0 / 2.1, rel=0.03)
    np.testing.assert_allclose(found["path_share"], [2.0 / 2.1, 0.0], atol=1e-3)
    assert found["stage"].values.tolist() == [0, 1]


@pytest.mark.parametrize(("seed", "limit"), [(0, 40_320), (1, 40_320), (0, 0), (1, 0)])
def test_search_over_eight_nodes_equals_brute_force_against_theory(seed, limit, monkeypatch):
    """Eight stages of unequal work in a chain beside a barrier of pairs: all assignments of their speeds."""
    rng = np.random.default_rng(seed)
    b, pools = DagBuilder(), {}
    ends = []
    for i, work in enumerate(rng.uniform(0.5, 1.5, 8)):
        s = Signature(f"work-{i}")
        pools[PoolKey(s)] = LogNormal.from_moments(work, 0.03)
        ends.append(b.add(s, [i], stage=i))
        if i % 2:
            ends[-2:] = [b.add(Signature("pair", f"{i}", role="tp"), [i - 1, i], after=ends[-2:])]
            pools[PoolKey(Signature("pair", f"{i}", role="tp"))] = Fixed(0.0)
            s2 = Signature(f"more-{i}")
            pools[PoolKey(s2)] = LogNormal.from_moments(rng.uniform(0.2, 1.0), 0.03)
            ends[-1] = b.add(s2, [i], stage=i, after=[ends[-1]])
    m = StepModel(b.build(list(range(8))), pools)
    speed = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 1.1, 1.3, 1.6])
    monkeypatch.setattr(placement, "EXHAUSTIVE", limit)
    found = placement.optimise_placement(m, speed, draws=100, seed=seed)
    chosen = found["node_of_position"].sel(policy="optimised").values

    def p95(order) -> float:
        placed = NodeSpeeds(dict(enumerate(speed[list(order)])))(m)
        return float(np.quantile(simulate(placed, 100, seed=seed)["step_time"], 0.95))

    every = {tuple(speed[list(o)]): o for o in permutations(range(8))}
    least = min(map(p95, every.values()))
    assert len(every) == placement._assignments(speed) == 336
    assert p95(chosen) <= least * 1.005


def test_all_distinct_assignments_are_tried_once():
    speed = np.array([1.0, 1.2, 1.0, 1.5])
    orders = placement._distinct(speed)
    assert len({tuple(speed[o]) for o in orders}) == len(orders) == placement._assignments(speed)


def test_cells_of_the_heatmap_are_the_kernels_of_a_place():
    found = savings_by_place(chain((0.02, 0.2)), draws=2000)
    saved = found["saved"].to_pandas()
    assert list(saved.index) == ["stage 0", "stage 1", "shared"]
    assert saved.loc["stage 1", "work-1"] > 3 * abs(saved.loc["stage 0", "work-0"])
    assert np.isnan(saved.loc["stage 0", "work-1"]) and saved.loc["shared", "all-reduce"] == 0.0
    low, high = found["saved_interval"].sel(place="stage 1", kind="work-1").values
    assert low < saved.loc["stage 1", "work-1"] < high
    with pytest.raises(ValueError, match="by 'planet' is not one of kind, rank, stage, replica"):
        savings_by_place(chain(), rows="planet")


@pytest.mark.parametrize("kept", [0.0, 0.6, 1.0])
def test_persistence_is_what_was_planted(kept):
    """One op whose rank score stays with the job by so much: nearly linear, so that is its share."""
    b = DagBuilder()
    b.add(Signature("work"), [0])
    coupling = Coupling(
        {"work": {"rank": Loading(float(np.sqrt(1 - kept)), persistent=float(np.sqrt(kept)))}}
    )
    pools = {PoolKey(Signature("work")): LogNormal.from_moments(1.0, 0.02)}
    found = persistent_share(StepModel(b.build([0]), pools, coupling), jobs=300, draws=40)
    low, high = found["persistent_share_interval"].sel(component="compute").values
    assert low - 0.02 <= kept <= high + 0.02
    total = np.hypot(found["std_between"], found["std_within"])
    np.testing.assert_allclose(total, 0.02, rtol=0.12)


def test_variance_components_recover_what_was_planted_and_cover_at_their_rate():
    rng = np.random.default_rng(1)
    hits = np.zeros(3)
    for _ in range(300):
        x = 5 + 0.3 * rng.standard_normal((25, 1)) + 0.1 * rng.standard_exponential((25, 30))
        x[rng.random(x.shape) < 0.3] = np.nan
        c = variance_components(x)
        truth = (0.3, 0.1, 0.9)
        for i, name in enumerate(("between", "within", "share")):
            low, high = getattr(c, f"{name}_interval")
            hits[i] += low <= truth[i] <= high
    # three standard errors of 300 trials at 95 %, and a jackknife that is not exact
    assert (hits / 300 > 0.91).all() and (hits / 300 < 0.99).all(), hits / 300


def test_groups_that_do_not_differ_have_no_variance_between_them():
    x = np.random.default_rng(0).standard_normal((40, 20))
    c = variance_components(x)
    assert c.between_interval[0] < 0.2 * c.within
    assert c.share < 0.06
    with pytest.raises(ValueError, match="at least 3 groups"):
        variance_components(x[:2])
