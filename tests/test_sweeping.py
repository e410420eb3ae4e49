"""Sweeps: the same anywhere, interrupted and gone on with; degradations that hit what they name."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest

from prism import sweeping, workload
from prism.context import read_context
from prism.degradations import CrossDatacenter, HotGpu, NodeSpeeds, SlowLink
from prism.montecarlo import simulate
from prism.placement import optimise_placement
from prism.pools import LogNormal
from prism.scenarios import HotNode, unchanged
from prism.sweeping import SweepError, sweep, switching


@pytest.fixture(scope="module")
def model(root):
    ctx = read_context(root / "inputs/small_step.yaml")
    return workload.model_from_context(ctx, variability=LogNormal.from_moments(1.0, 0.03))


SCENARIOS = {
    "as it is": None,
    "hot": HotNode(3),
    "slow": SlowLink(2.0),
    "one": HotGpu(1, 1.5, replica=2),
}


def test_workers_give_the_same_bytes_invariant(model):
    here = sweep(model, SCENARIOS, 300, seed=2)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        there = sweep(model, SCENARIOS, 300, seed=2, executor=pool)
    np.testing.assert_array_equal(here["step_time"], there["step_time"])


def test_a_dask_cluster_gives_the_same_bytes_invariant(model):
    distributed = pytest.importorskip("distributed", reason="needs dask.distributed")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster, distributed.Client(cluster) as client:  # fmt: skip
        there = sweep(model, SCENARIOS, 200, seed=2, executor=client.get_executor())
    np.testing.assert_array_equal(
        sweep(model, SCENARIOS, 200, seed=2)["step_time"], there["step_time"]
    )


def _die(model):
    os._exit(1)


def test_a_worker_that_dies_loses_nothing_that_was_finished(model, tmp_path, monkeypatch):
    dying = {"as it is": None, "hot": HotNode(3), "dies": _die}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool, pytest.raises(SweepError, match="a worker died"):  # fmt: skip
        sweep(model, dying, 100, executor=pool, folder=tmp_path)
    kept = len(list(tmp_path.glob("*.npz")))
    assert kept >= 1
    computed = []
    cell = sweeping._cell
    monkeypatch.setattr(sweeping, "_cell", lambda name, *a: computed.append(name) or cell(name, *a))
    again = sweep(
        model, {"as it is": None, "hot": HotNode(3), "late": HotNode(2)}, 100, folder=tmp_path
    )
    assert len(computed) == 3 - kept and "late" in computed
    np.testing.assert_array_equal(again["step_time"], sweep(model, {"as it is": None, "hot": HotNode(3), "late": HotNode(2)}, 100)["step_time"])  # fmt: skip
    # another seed is another sweep
    computed.clear()
    sweep(model, {"hot": HotNode(3)}, 100, seed=1, folder=tmp_path)
    assert computed == ["hot"]


def test_a_scenario_that_changes_nothing_is_no_result(model):
    with pytest.raises(ValueError, match="scenario 'idle' changes nothing"):
        sweep(model, {"idle": lambda m: m.replace()}, 10)
    sweep(model, {"reference": unchanged}, 10)
    with pytest.raises(ValueError, match="at least one scenario"):
        sweep(model, {}, 10)


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        (NodeSpeeds({17: 1.2}), "node 17 does not exist"),
        (HotGpu(9, 1.2), "rank 9 computes nothing: ranks are 0 to 3"),
        (HotGpu(1, 1.2, replica=7), "replica 7: there are 4"),
        (SlowLink(2.0, between=(0, 2)), "no communication between stages 0 and 2"),
        (SlowLink(2.0, role="ep"), "no communication between nodes of role ep"),
        (CrossDatacenter(3, 1e9, 1e-3, 1e6), "no transfer crosses between stages 3 and 4"),
    ],
)
def test_what_is_not_there_cannot_degrade(model, scenario, message):
    with pytest.raises(ValueError, match=message):
        scenario(model)


def test_factors_must_be_positive():
    for make in (lambda: NodeSpeeds({0: 0.0}), lambda: HotGpu(0, -1.0), lambda: SlowLink(np.nan)):
        with pytest.raises(ValueError, match="positive and finite"):
            make()


def p95(model, **how) -> float:
    return float(np.quantile(simulate(model, 1000, **how)["step_time"], 0.95))


def test_degradations_never_help_and_grow_with_how_bad_they_are_invariant(model):
    base = p95(model)
    for make in (lambda f: NodeSpeeds({2: f}), lambda f: HotGpu(1, f), lambda f: SlowLink(f)):
        worse = [p95(make(f)(model)) for f in (1.1, 1.5, 3.0)]
        assert base <= worse[0] <= worse[1] <= worse[2] and worse[2] > base


def test_a_datacenter_far_away_costs_by_its_bandwidth_against_theory(model):
    """Nothing else varies: each way over the cut adds its time to the longest path at least once."""
    still = model.at_mean
    base = float(simulate(still, 1)["step_time"][0])
    near, far = (
        float(simulate(CrossDatacenter(1, bw, 0.01, 6.7e7)(still), 1)["step_time"][0])
        for bw in (1e12, 1e9)
    )
    assert base < near < far
    extra = 6.7e7 / 1e9 - 6.7e7 / 1e12
    assert far - near >= 2 * extra * 0.999


def test_a_job_that_switches_takes_each_scenarios_own_draws(model):
    runs = sweep(model, {"base": None, "hot": HotNode(3)}, 50)
    which = np.arange(50) % 2
    mixed = switching(runs, which, name="flapping")["step_time"].sel(scenario="flapping").values
    step = runs["step_time"].values
    np.testing.assert_array_equal(mixed, np.where(which == 1, step[1], step[0]))
    with pytest.raises(ValueError, match="for each of 50 draws one of 2 scenarios"):
        switching(runs, which + 1, name="x")


def test_placement_is_the_best_there_is_and_beats_random_and_sorted_against_theory(model):
    """Four nodes, one stage each; the last stage computes most. All 24 assignments by hand."""
    from itertools import permutations

    speed = np.array([1.3, 1.0, 1.1, 1.0])
    found = optimise_placement(model, speed, draws=500)
    best = found["node_of_position"].sel(policy="optimised").values
    values = {
        o: p95(NodeSpeeds(dict(enumerate(speed[list(o)])))(model), seed=1)
        for o in permutations(range(4))
    }
    least = min(values.values())
    assert values[tuple(best)] <= least * 1.002
    q = found["p95"]
    for other in ("as given", "random, median of 20"):
        assert float(q.sel(policy="optimised")) <= float(q.sel(policy=other)) * 1.001
    low, high = found["p95_interval"].sel(policy="optimised").values
    assert low <= float(q.sel(policy="optimised")) <= high
    with pytest.raises(ValueError, match="a positive speed for each of 4 nodes"):
        optimise_placement(model, [1.0, 1.1])
