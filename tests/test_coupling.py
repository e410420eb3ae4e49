"""Coupling: marginals stay, planted loadings come back, jobs differ from steps, events strike together."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import keyed
from processes import COMPUTE, EVENT, TRANSFER, pipeline, record
from scipy import stats

from prism import traces
from prism.base import stats as estimates
from prism.model.coupling import Coupling, Loading
from prism.model.dag_builder import DagBuilder
from prism.model.engine import montecarlo
from prism.model.engine.montecarlo import simulate
from prism.model.pools import Empirical, Fixed, Gamma, LogNormal, MaxOf, Normal, Scaled
from prism.model.signature import PoolKey, Signature
from prism.model.step_model import StepModel
from prism.traces import MeasuredSteps
from prism.traces.fitting import joint_events

FOUR = {"step": 0.4, "node": -0.3, "rank": Loading(0.3, 0.4), "microbatch": 0.5}


def side_by_side(ranks=4, microbatches=3, **options):
    """Ops of one kind on several ranks and microbatches, and one of another kind."""
    b = DagBuilder(**options)
    for r in range(ranks):
        for m in range(microbatches):
            b.add(Signature("op"), [r], microbatch=m, position=m)
    b.add(Signature("other"), [0], microbatch=0)
    return b


def draws_of(model, n=100_000, seed=0):
    return montecarlo.sample_durations(model, n, seed=seed)


@pytest.mark.parametrize(
    "pool",
    [LogNormal(0.0, 0.4), Gamma(3.0, 0.2), Normal(5.0, 0.5), Empirical(tuple(range(1, 12)))],
    ids=lambda p: p.family,
)
@pytest.mark.parametrize("events", [{}, {"op": 0.07}], ids=["scores", "event"])
def test_marginals_are_the_pools_for_any_loadings_invariant(pool, events):
    dag = side_by_side().build([0, 0, 1, 1])
    pools = {PoolKey(Signature("op")): pool, PoolKey(Signature("other")): pool}
    model = StepModel(dag, pools, Coupling({"op": FOUR}, events))
    for x in draws_of(model, 200_000)[[0, 7]]:
        if isinstance(pool, Empirical):
            values, counts = np.unique(x, return_counts=True)
            assert tuple(values) == pool.samples
            assert stats.chisquare(counts).pvalue > 1e-4
        else:
            assert stats.kstest(x, pool.frozen.cdf).pvalue > 1e-4


def test_correlations_are_the_planted_ones_against_theory():
    dag = side_by_side().build([0, 0, 1, 1])
    pool = Normal(10.0, 1.0)
    coupling = Coupling({"op": FOUR, "other": {"step": 0.5, "microbatch": 0.6}})
    model = StepModel(dag, {PoolKey(Signature(k)): pool for k in ("op", "other")}, coupling)
    n = 200_000
    r = np.corrcoef(draws_of(model, n))
    at = {
        (int(k), int(m), dag.signatures[s].op): i
        for i, (k, m, s) in enumerate(zip(dag.rank, dag.microbatch, dag.signature, strict=True))
    }
    step, node, rank, microbatch = 0.16, 0.09, 0.25, 0.25
    expected = {
        ((0, 0, "op"), (3, 1, "op")): step,
        ((0, 0, "op"), (1, 1, "op")): step + node,
        ((0, 0, "op"), (0, 1, "op")): step + node + rank,
        ((0, 0, "op"), (2, 0, "op")): step + microbatch,
        ((0, 0, "op"), (1, 0, "op")): step + node + microbatch,
        # another kind loads the shared scores with loadings of its own
        ((3, 0, "op"), (0, 0, "other")): 0.4 * 0.5 + 0.5 * 0.6,
        ((3, 1, "op"), (0, 0, "other")): 0.4 * 0.5,
    }
    for (a, b), truth in expected.items():
        assert abs(r[at[a], at[b]] - truth) < 4.5 / np.sqrt(n), (a, b)


def test_classes_are_independent():
    """A congested step is not a hot step."""
    b = DagBuilder()
    b.add(Signature("op"), [0])
    b.add(Signature("wire", role="dp", scope="inter_node"), [0, 1])
    coupling = Coupling({"op": {"step": 1.0}, "wire": {"step": 1.0}})
    dag = b.build([0, 1])
    x = draws_of(StepModel(dag, keyed(dag, [Normal(5.0, 0.5)] * 2), coupling))
    assert abs(np.corrcoef(x)[0, 1]) < 4.5 / np.sqrt(x.shape[1])


def test_independent_coupling_equals_no_coupling_exactly():
    dag = side_by_side().build([0, 0, 1, 1])
    pools = {PoolKey(Signature(k)): LogNormal(0.0, 0.4) for k in ("op", "other")}
    plain = simulate(StepModel(dag, pools), 500).step_time.values
    for coupling in (Coupling.independent(), Coupling({"op": {"step": 0.0}})):
        np.testing.assert_array_equal(
            simulate(StepModel(dag, pools, coupling), 500).step_time, plain
        )


def test_jobs_keep_what_is_persistent_against_theory():
    """One op, persistent share 0.64: steps of a job correlate at 0.64, jobs do not."""
    b = DagBuilder()
    b.add(Signature("op"), [0])
    dag = b.build([0])
    pool = {PoolKey(Signature("op")): Normal(10.0, 1.0)}
    model = StepModel(dag, pool, Coupling({"op": {"rank": Loading(0.0, 0.8), "step": 0.3}}))
    x = simulate(model, 2, jobs=40_000).step_time
    assert x.dims == ("job", "draw")
    r = np.corrcoef(x.values.T)[0, 1]
    assert abs(r - 0.64) < 4.5 * (1 - 0.64**2) / np.sqrt(40_000)
    redrawn = simulate(model, 40_000).step_time.values
    assert abs(np.corrcoef(redrawn[1:], redrawn[:-1])[0, 1]) < 4.5 / np.sqrt(40_000)
    assert stats.kstest(redrawn, stats.norm(10, 1).cdf).pvalue > 1e-4


def test_dependent_draws_are_refused_and_would_undercover():
    """With 80 % persistent variance a bound that pools 20 jobs of 50 draws covers far less than 95 %."""
    b = DagBuilder()
    b.add(Signature("op"), [0])
    pool = {PoolKey(Signature("op")): Normal(10.0, 1.0)}
    model = StepModel(b.build([0]), pool, Coupling({"op": {"rank": Loading(0.0, np.sqrt(0.8))}}))
    x = simulate(model, 50, jobs=20 * 300).step_time
    with pytest.raises(ValueError, match="several draws of one job are dependent"):
        estimates.guarantee(x)
    truth = stats.norm(10, 1).ppf(0.95)
    pooled = [estimates.guarantee(part.ravel()) >= truth for part in np.split(x.values, 300)]
    assert np.mean(pooled) < 0.75
    apart = simulate(model, 1000 * 300, seed=1).step_time.values
    honest = [estimates.guarantee(part) >= truth for part in np.split(apart, 300)]
    assert np.mean(honest) > 0.95 - 4.5 * np.sqrt(0.0475 / 300)


def test_events_strike_all_ops_of_a_kind_at_once():
    dag = side_by_side().build([0, 0, 1, 1])
    pools = {PoolKey(Signature(k)): LogNormal(0.0, 0.4) for k in ("op", "other")}
    x = draws_of(StepModel(dag, pools, Coupling(events={"op": 0.05})))
    slow = x > LogNormal(0.0, 0.4).quantile(0.95)
    assert np.array_equal(slow[:12].all(axis=0), slow[:12].any(axis=0))
    assert abs(np.mean(slow[0]) - 0.05) < 4.5 * np.sqrt(0.0475 / x.shape[1])


# templates


def template(groups=None, replicas=4):
    """Two stages, a reduction over groups of replicas and one over all."""
    b = DagBuilder(replicas=replicas, groups=groups or {})
    for m in range(2):
        first = b.add(Signature("op"), [0], microbatch=m, position=m)
        b.add(Signature("op"), [1], microbatch=m, position=m, after=[first])
    inner = b.add(
        Signature("inner", role="dp"), [1], joins=next(iter(groups or {"all": 0})), after=[2, 3]
    )
    outer = b.add(
        Signature("outer", role="dp", scope="inter_node"), [0, 1], joins="all", after=[inner]
    )
    b.add(Signature("op"), [0], after=[outer, 0])
    return b.build(np.arange(2 * replicas).reshape(2, replicas) // 2)


def modelled(dag):
    pools = {PoolKey(s): LogNormal(0.1 * i, 0.3) for i, s in enumerate(dag.signatures)}
    return StepModel(dag, pools, Coupling({"op": FOUR, "outer": {"step": 0.7}}, {"inner": 0.1}))


@pytest.mark.parametrize("groups", [None, {"pairs": [0, 0, 2, 2]}, {"strided": [0, 1, 0, 1]}])
def test_lanes_equal_the_graph_written_out_exactly(groups):
    model = modelled(template(groups))
    written_out = model.replace(dag=model.dag.unroll())
    for options in ({}, {"jobs": 7}):
        a, b = (simulate(m, 300, seed=5, **options).step_time.values for m in (model, written_out))
        np.testing.assert_array_equal(a, b)
    a, b = (simulate(m, 300, paths=True) for m in (model, written_out))
    np.testing.assert_allclose(a.exposed_time, b.exposed_time, rtol=1e-12)
    np.testing.assert_allclose(a.busy_time, b.busy_time, rtol=1e-12)
    np.testing.assert_allclose(a.exposed_time.sum("component"), a.step_time, rtol=1e-12)


def test_one_replica_of_many_can_be_hot_exactly():
    from prism.whatif.scenarios import HotNode

    model = modelled(template({"pairs": [0, 0, 2, 2]}))
    for node in range(4):
        for mode in ("scale", "pin"):
            hot = HotNode(node, mode=mode)
            a = simulate(hot(model), 200).step_time.values
            b = simulate(hot(model.replace(dag=model.dag.unroll())), 200).step_time.values
            np.testing.assert_allclose(a, b, rtol=1e-12)
            assert not np.array_equal(a, simulate(model, 200).step_time.values)


def test_replicas_raise_the_step_by_order_statistics_against_theory():
    """One op joined over r replicas: the maximum of r."""
    replicas = 64
    b = DagBuilder(replicas=replicas)
    first = b.add(Signature("op"), [0])
    b.add(Signature("end", role="dp"), [0], joins="all", after=[first])
    dag = b.build(np.arange(replicas)[None])
    pool = LogNormal(0.0, 0.25)
    tiny = LogNormal(-30.0, 0.1)
    model = StepModel(dag, {PoolKey(dag.signatures[0]): pool, PoolKey(dag.signatures[1]): tiny})
    x = simulate(model, 20_000, seed=3).step_time.values
    assert stats.kstest(x, lambda t: pool.frozen.cdf(t) ** replicas).pvalue > 1e-4


@pytest.mark.parametrize("shared", [{}, {"step": 0.5}], ids=["independent", "step"])
@pytest.mark.parametrize(
    "pool", [LogNormal(0.0, 0.3), Empirical(tuple(np.linspace(1, 2, 50)))], ids=["logn", "emp"]
)
def test_width_equals_the_maximum_of_ranks_against_simulation(pool, shared):
    """Between two meetings: eight ranks written out, or one op of width eight."""

    def model(folded):
        b = DagBuilder()
        if folded:
            ops = [b.add(Signature("op"), [0], width=8)]
        else:
            ops = [b.add(Signature("op"), [r], position=r) for r in range(8)]
        b.add(Signature("end", role="tp"), list(range(8)), after=ops)
        pools = {PoolKey(Signature("op")): pool, PoolKey(Signature("end", role="tp")): Fixed(0.0)}
        return StepModel(b.build([0] * 8), pools, Coupling({"op": shared}))

    a, b = (
        simulate(model(f), 40_000, seed=s).step_time.values for s, f in enumerate((True, False))
    )
    if isinstance(pool, Empirical):
        counts = [np.bincount(np.searchsorted(pool.samples, x), minlength=50)[20:] for x in (a, b)]
        assert stats.chi2_contingency(counts).pvalue > 1e-4
    else:
        assert stats.ks_2samp(a, b).pvalue > 1e-4


def test_width_with_scores_of_ranks_is_refused():
    b = DagBuilder()
    b.add(Signature("op"), [0], width=8)
    model = StepModel(
        b.build([0]), {PoolKey(Signature("op")): LogNormal(0, 0.1)}, Coupling({"op": {"rank": 0.5}})
    )
    with pytest.raises(ValueError, match="write the ranks out"):
        simulate(model, 10)


# fitting


@pytest.fixture(scope="module")
def process():
    return pipeline()


def test_planted_loadings_are_recovered(process):
    """Within 4.5 of their own standard errors, and those are not so wide as to say nothing."""
    observed = record(process, 400, 1, coupled=True)
    fit = traces.fit_coupling(observed, traces.fit_pools(observed))
    planted = {"forward": COMPUTE, "backward": COMPUTE, "send": TRANSFER, "gap": TRANSFER}
    for kind, loadings in planted.items():
        for level in ("step", "rank", "microbatch"):
            at = {"signature": kind, "level": level, "component": "transient"}
            share = float(fit.shares.variance_share.sel(at))
            error = float(fit.shares.standard_error.sel(at))
            assert abs(share - loadings.get(level, 0.0) ** 2) < 4.5 * error + 0.01, (kind, level)
            assert error < 0.1
    assert set(fit.coupling.events) == {"reduce"}
    low, high = fit.tails.event_probability_interval.sel(signature="reduce").values
    assert low < EVENT < high


def test_no_dependence_is_not_invented_negative_control(process):
    observed = record(process, 400, 2, coupled=False)
    fit = traces.fit_coupling(observed, traces.fit_pools(observed))
    assert not fit.coupling.events
    for levels in fit.coupling.loadings.values():
        assert sum(v.share for v in levels.values()) < 0.1


def test_persistent_ranks_are_told_apart():
    """Ranks of different speed in one pool: persistent; the same speeds in pools of their own: nothing."""
    b = DagBuilder()
    for r in range(12):
        for m in range(4):
            b.add(Signature("op"), [r], microbatch=m, position=m)
    dag = b.build(range(12))
    rng = np.random.default_rng(3)
    z = 0.8 * rng.standard_normal(12)[dag.rank, None] + 0.6 * rng.standard_normal((dag.n_ops, 200))
    observed = MeasuredSteps.from_arrays(dag, np.exp(0.1 * z))
    every = traces.fit_pools(observed)
    fleet_wide = {k: p for k, p in every.items() if k == k.fleet}
    found = traces.fit_coupling(observed, fleet_wide).coupling.loadings["op"]["rank"]
    # one draw of 12 speeds: the share is that of this draw
    assert found.persistent**2 == pytest.approx(0.64, abs=0.15)
    assert found.transient**2 < 0.02
    own = traces.fit_coupling(observed, every).coupling.loadings["op"]
    assert own.get("rank", Loading()).share < 0.02


@pytest.mark.parametrize("coupled", [True, False])
def test_held_out_steps_are_predicted(process, coupled):
    """Fitted on 400 steps: KS at most 0.06 against 1000 held-out steps, on average over seeds. Fitted on
    40: no worse than 1.2 times resampling of whole steps."""
    distance: dict[int, list[float]] = {400: [], 40: []}
    whole = []
    for seed in range(4):
        for n in distance:
            every = record(process, n + 1000, 10 + seed, coupled=coupled)
            train, test = every.select(slice(0, n)), every.step_time.values[n:]
            model = traces.fit_model(train)
            predicted = simulate(model, 4000, seed=seed).step_time
            distance[n].append(estimates.ks_distance(predicted, test))
            if n == 40:
                whole.append(estimates.ks_distance(train.step_time, test))
            if coupled and n == 400:
                alone = simulate(model.replace(coupling=Coupling.independent()), 4000, seed=seed)
                assert estimates.ks_distance(alone.step_time, test) > 0.15
    assert np.mean(distance[400]) <= 0.06
    assert np.mean(distance[40]) <= 1.2 * np.mean(whole)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Coupling({"op": {"planet": 0.5}}), "unknown level planet"),
        (lambda: Coupling({"op": {"step": 0.9, "rank": 0.9}}), "sum to 1.62, so no correlation"),
        (lambda: Coupling({"op": {"step": float("nan")}}), "no correlation"),
        (lambda: Coupling(events={"op": 1.0}), r"must lie in \(0, 1\), got 1.0"),
        (lambda: DagBuilder(replicas=2, groups={"x": [1, 1]}), "lowest of its group"),
        (lambda: DagBuilder().add(Signature("a"), [0], joins="x"), "joins 'x'"),
    ],
)
def test_bad_input_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("loading", [0.7, 0.95, 0.99])
def test_gaussian_dependence_is_no_event_negative_control(loading):
    rng = np.random.default_rng(4)
    kinds = np.repeat("op", 12)
    found = 0
    for _ in range(20):
        z = loading * rng.standard_normal(100) + np.sqrt(1 - loading**2) * rng.standard_normal(
            (12, 100)
        )
        u = (np.argsort(np.argsort(z, axis=1), axis=1) + 0.5) / 100
        found += bool(joint_events.find_events(u, kinds, np.ones(12, bool), 0)[0])
    assert found == 0


def test_transfers_load_their_microbatch():
    """An op of two ranks has no rank of its own, but its microbatch."""
    b = DagBuilder()
    for s in range(3):
        for m in range(2):
            b.add(Signature("send", f"{s}", role="pp"), [s, s + 1], microbatch=m, position=m)
    dag = b.build([0] * 4)
    pools = {PoolKey(s): Normal(5.0, 0.5) for s in dag.signatures}
    x = draws_of(StepModel(dag, pools, Coupling({"send": {"microbatch": 0.8}})))
    r = np.corrcoef(x)
    same = (dag.microbatch[:, None] == dag.microbatch)[np.triu_indices(6, 1)]
    r = r[np.triu_indices(6, 1)]
    assert np.all(np.abs(r[same] - 0.64) < 4.5 * (1 - 0.64**2) / np.sqrt(x.shape[1]))
    assert np.all(np.abs(r[~same]) < 4.5 / np.sqrt(x.shape[1]))


def test_overrides_of_lanes_and_of_whole_ops_combine():
    model = modelled(template())
    op = 0
    one = np.zeros((model.dag.n_ops, 4), bool)
    one[op, 1] = True
    slow = model.override(one, lambda _, p: Scaled(p, 10.0))
    assert slow.pool(op, 1).mean == pytest.approx(10 * model.pool(op).mean)
    assert slow.pool(op, 0).mean == model.pool(op).mean
    frozen = slow.override(one.any(axis=1), lambda _, p: Fixed(5.0))
    assert {frozen.pool(op, lane) for lane in (-1, 0, 1, 2)} == {Fixed(5.0)}
    twice = slow.override(one.any(axis=1), lambda _, p: Scaled(p, 2.0))
    assert twice.pool(op, 1).mean == pytest.approx(20 * model.pool(op).mean)
    assert twice.pool(op, 3).mean == pytest.approx(2 * model.pool(op).mean)
    for bad in (lambda _, p: Gamma(4.0, 100.0), lambda _, p: MaxOf(p, 64)):
        with pytest.raises(ValueError, match="not take another distribution"):
            model.override(one, bad)
    with pytest.raises(ValueError, match="override the lowest of the group"):
        model.replace(overrides={(int(np.flatnonzero(model.dag.grouping)[0]), 1): Fixed(1.0)})
    with pytest.raises(ValueError, match="there are"):
        model.replace(overrides={(999, -1): Fixed(1.0)})


def test_few_steps_are_refused(process):
    observed = record(process, 19, 1, coupled=False)
    with pytest.raises(ValueError, match="at least 20 steps for 10 jackknife blocks, got 19"):
        traces.fit_coupling(observed, {})
    assert traces.fit_model(observed).coupling.is_independent


def test_engine_is_compiled_once():
    """All forms of a model run through one compiled version: a second would cost seconds again."""
    from prism.model.engine import kernels

    assert len(kernels.simulate.signatures) == 1


# kinds that share a level with no other op of their own


def chain_of(kinds: int, r: float, n: int = 1000):
    """Single ops of several kinds, one after the other, with correlation r between any two."""
    b = DagBuilder()
    last = None
    for i in range(kinds):
        last = b.add(Signature(f"k{i}"), [0], after=[] if last is None else [last])
    dag = b.build([0])
    rng = np.random.default_rng(0)
    shared = rng.standard_normal(n)
    duration = np.exp(
        0.2 * (np.sqrt(r) * shared + np.sqrt(1 - r) * rng.standard_normal((kinds, n)))
    )
    return MeasuredSteps.from_arrays(dag, duration)


@pytest.mark.parametrize("kinds", [2, 3, 8])
def test_correlation_between_single_ops_of_different_kinds_is_recovered(kinds):
    observed = chain_of(kinds, 0.9)
    model = traces.fit_model(observed)
    shares = [levels["step"].share for levels in model.coupling.loadings.values()]
    assert np.allclose(shares, 0.9, atol=0.03)
    times = simulate(model, 4000).step_time
    assert float(times.std()) == pytest.approx(float(observed.step_time.std()), rel=0.06)


def test_microbatches_of_a_single_stage_are_recovered():
    """Pure data parallelism: no two forwards of a rank share a microbatch, a forward and a backward do."""
    dag = pipeline(stages=1)
    model = traces.fit_model(record(dag, 400, 1, coupled=True))
    for kind in ("forward", "backward"):
        loadings = model.coupling.loadings[kind]
        assert loadings["microbatch"].transient == pytest.approx(COMPUTE["microbatch"], abs=0.06)
        assert loadings["rank"].transient == pytest.approx(COMPUTE["rank"], abs=0.12)


# events that go with a score


def test_an_event_with_the_score_of_another_class_keeps_marginals_and_rate():
    b = DagBuilder()
    reduces = [b.add(Signature("reduce", role="dp", scope="intra_node"), [0, 1]) for _ in range(3)]
    work = [b.add(Signature("work"), [r], after=reduces) for r in (0, 1)]
    dag = b.build([0, 0])
    pools = {PoolKey(Signature("reduce", role="dp", scope="intra_node")): LogNormal(0.0, 0.5),
             PoolKey(Signature("work")): LogNormal(1.0, 0.3)}  # fmt: skip
    coupling = Coupling({"work": {"step": 0.9}}, {"reduce": 0.1}, {"reduce": {"compute": -0.8}})
    x = montecarlo.sample_durations(StepModel(dag, pools, coupling), 40_000, seed=1)
    for op, pool in ((reduces[0], LogNormal(0.0, 0.5)), (work[0], LogNormal(1.0, 0.3))):
        u = np.sort(pool_cdf(pool, x[op]))
        assert np.max(np.abs(u - (np.arange(u.size) + 0.5) / u.size)) < 1.95 / np.sqrt(u.size)
    struck = x[reduces[0]] > pool_quantile(LogNormal(0.0, 0.5), 0.9)
    assert np.all(struck == (x[reduces[1]] > pool_quantile(LogNormal(0.0, 0.5), 0.9)))
    # E[Z | struck] = b phi(z_p) / p, seen through the loading of the work
    z = stats.norm.ppf(pool_cdf(LogNormal(1.0, 0.3), x[work[0]]))
    expected = 0.9 * -0.8 * stats.norm.pdf(stats.norm.isf(0.1)) / 0.1
    assert z[struck].mean() == pytest.approx(expected, abs=0.06)


def pool_cdf(pool: LogNormal, x: np.ndarray) -> np.ndarray:
    return stats.norm.cdf((np.log(x) - pool.mu) / pool.sigma)


def pool_quantile(pool: LogNormal, q: float) -> float:
    return float(pool.quantile(q))


def test_an_event_with_the_score_of_its_own_class_is_refused():
    observed = chain_of(2, 0.5, n=40)
    model = StepModel(
        observed.dag,
        traces.fit_pools(observed),
        Coupling({}, {"k0": 0.1}, {"k0": {"compute": 0.5}}),
    )
    with pytest.raises(
        ValueError, match="goes with the step score of compute, which is its own class"
    ):
        simulate(model, 10)


def test_no_events_where_some_series_move_together_and_others_do_not_negative_control():
    """Ten of twelve series with correlation 0.98: their common tails are no events."""
    found = 0
    for seed in range(25):
        rng = np.random.default_rng(seed)
        shared = rng.standard_normal(60)
        z = np.sqrt(0.02) * rng.standard_normal((12, 60))
        z[:10] += np.sqrt(0.98) * shared
        z[10:] = rng.standard_normal((2, 60))
        u = (np.argsort(np.argsort(z, axis=1), axis=1) + 0.5) / 60
        found += bool(joint_events.find_events(u, np.full(12, "op"), np.ones(12, bool), seed)[0])
    assert found <= 3
