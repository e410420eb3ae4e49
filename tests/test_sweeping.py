"""Sweeps: the same anywhere, interrupted and gone on with; degradations that hit what they name."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest

from prism.context import analytic_model
from prism.context.context import Context, Parallelism, Topology, Workload, read_context
from prism.model.engine.montecarlo import simulate
from prism.model.pools import Empirical, LogNormal
from prism.whatif import sweeping
from prism.whatif.degradations import CrossDatacenter, HotGpu, NodeSpeeds, SlowLink
from prism.whatif.placement import optimise_placement
from prism.whatif.scenarios import HotNode, unchanged
from prism.whatif.sweeping import SweepError, sweep, switching


@pytest.fixture(scope="module")
def model(root):
    ctx = read_context(root / "inputs/small_step.yaml")
    return analytic_model.model_from_context(ctx, variability=LogNormal.from_moments(1.0, 0.03))


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


class _Dies(Empirical):
    """A pool at which a worker dies, but not this process."""

    def __reduce__(self):
        return os._exit, (1,)


def _die(model):
    return model.replace(pools={k: _Dies((1.0, 2.0)) for k in model.pools})


def test_a_worker_that_dies_loses_nothing_that_was_finished(model, tmp_path, monkeypatch):
    dying = {"as it is": None, "hot": HotNode(3), "dies": _die}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool, pytest.raises(SweepError, match="a worker died"):  # fmt: skip
        sweep(model, dying, 100, executor=pool, folder=tmp_path)
    kept = len(list(tmp_path.glob("*.npy")))
    assert kept >= 1
    computed = []
    cell = sweeping._cell
    monkeypatch.setattr(sweeping, "_cell", lambda *a: computed.append(a[0]) or cell(*a))
    again = sweep(
        model, {"as it is": None, "hot": HotNode(3), "late": HotNode(2)}, 100, folder=tmp_path
    )
    assert len(computed) == 3 - kept
    np.testing.assert_array_equal(again["step_time"], sweep(model, {"as it is": None, "hot": HotNode(3), "late": HotNode(2)}, 100)["step_time"])  # fmt: skip
    # another seed is another sweep
    computed.clear()
    sweep(model, {"hot": HotNode(3)}, 100, seed=1, folder=tmp_path)
    assert len(computed) == 1


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


def test_a_kept_scenario_is_known_by_what_it_does(model, tmp_path):
    """Not by its name: a function that was edited, and a lambda, are what they return now."""
    for factor in (2.0, 20.0, 2.0):
        found = sweep(model, {"x": lambda m, f=factor: SlowLink(f)(m)}, 50, folder=tmp_path)
        np.testing.assert_array_equal(
            found["step_time"][0], sweep(model, {"x": SlowLink(factor)}, 50)["step_time"][0]
        )
    assert len(list(tmp_path.glob("*.npy"))) == 2
    for file in tmp_path.glob("*.npy"):
        file.write_bytes(b"damaged")
    sweep(model, {"x": SlowLink(2.0)}, 50, folder=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is not a folder"):
        sweep(model, {"x": None}, 10, folder=tmp_path / "file")


def test_bad_scenarios_are_named_before_anything_is_computed(model, monkeypatch):
    monkeypatch.setattr(sweeping, "_cell", lambda *a: pytest.fail("computed"))
    for scenario, message in (
        (HotNode(9), "scenario 'bad': node 9 does not exist"),
        (lambda m: None, "scenario 'bad' returns None"),
        (SlowLink(1.0), "scenario 'bad' changes nothing"),
        (lambda m: m.replace(), "changes nothing"),
    ):
        with pytest.raises(ValueError, match=message):
            sweep(model, {"fine": None, "bad": scenario}, 10)
    # pools that do not vary have no slow tail
    with pytest.raises(ValueError, match="changes nothing"):
        sweep(model.at_mean, {"hot": HotNode(0)}, 10)


def test_a_hot_gpu_is_one_gpu_in_a_template_and_written_out_invariant(model):
    explicit = model.replace(dag=model.dag.unroll())
    for replica in (0, 2):
        # the factor of a lane is applied to its duration, that of an op to its pool
        np.testing.assert_allclose(
            simulate(HotGpu(1, 1.5, replica)(model), 50)["step_time"],
            simulate(HotGpu(1, 1.5, replica)(explicit), 50)["step_time"],
            rtol=1e-14,
        )


def test_one_gpu_of_a_folded_rank_cannot_be_hot():
    ctx = Context(
        workload=Workload.preset("llama3-8b"),
        parallelism=Parallelism(dp=1, tp=8, pp=1, microbatches=1, sequence_parallel=True),
        topology=Topology.preset("dgx-h100", nodes=1),
    )
    with pytest.raises(ValueError, match="stands for 8 tensor-parallel GPUs: write them out"):
        HotGpu(0, 1.1)(analytic_model.model_from_context(ctx))


def test_two_hot_nodes_slow_what_they_share_once(model):
    both = HotNode((0, 1))(model)
    ops = np.flatnonzero(model.dag.on_node(0).any(axis=1) & model.dag.on_node(1).any(axis=1))
    shared = [o for o in ops if model.dag.is_inter_node[o]]
    assert shared
    alone = HotNode(0)(model)
    for o in shared:
        assert both.pool(o, 0).mean == pytest.approx(alone.pool(o, 0).mean)
    assert p95(HotNode(1)(HotNode(0)(model))) > p95(both) > p95(alone)


def test_a_cut_is_crossed_by_every_link_over_it_against_theory():
    """Interleaved: the last rank hands on to the first, over the cut too."""
    times = {"forward_s": [0.02] * 8, "backward_s": [0.04] * 8, "optimizer_s": 0.01, "activation_bytes": 6.7e7,
             "gradient_bytes": 1e9, "name": "x"}  # fmt: skip
    ctx = Context(
        workload=times,
        parallelism=Parallelism(pp=4, microbatches=8, schedule="interleaved_1f1b", chunks=2),
        topology={"nodes": 4, "gpus_per_node": 1, "intra_node": {"bandwidth": 3e11, "latency": 5e-6},
                  "inter_node": {"bandwidth": 4e10, "latency": 2e-5}},
    )  # fmt: skip
    model = analytic_model.model_from_context(ctx)
    far = CrossDatacenter(1, 1e9, 0.01, 6.7e7)(model)
    changed = {model.dag.sites[model.dag.site[op]] for op, _ in far.overrides}
    assert changed == {"stage 1->2", "stage 2->1", "stage 3->0", "stage 0->3"}
    assert far.source == "synthetic"
