"""The engine: longest paths exactly, draws of the right distribution, nothing depends on order."""

from __future__ import annotations

import numba
import numpy as np
import pytest
from graphs import chain, fork_join, keyed, networkx_longest_path, random_dag
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from statistical import assert_mean_close

from prism.model.dag_builder import DagBuilder
from prism.model.engine import kernels, lowering, montecarlo
from prism.model.engine.montecarlo import simulate
from prism.model.pools import (
    Bimodal,
    Empirical,
    Fixed,
    Gamma,
    HeavyTail,
    LogNormal,
    MaxOf,
    Normal,
    Scaled,
)
from prism.model.signature import PoolKey, Signature
from prism.model.step_model import StepModel

seeds = st.integers(0, 2**32 - 1)


@settings(max_examples=60, deadline=None)
@given(seed=seeds, n=st.integers(1, 40), density=st.floats(0, 0.6))
def test_zero_variance_equals_longest_path_against_networkx(seed, n, density):
    rng = np.random.default_rng(seed)
    dag = random_dag(rng, n, density)
    # multiples of 1/1024: sums are exact in binary, so equality is exact
    duration = rng.integers(0, 4096, n) / 1024
    model = StepModel(dag, keyed(dag, [Fixed(d) for d in duration]))
    expected = networkx_longest_path(dag, duration)
    assert simulate(model, 1).step_time.values[0] == expected
    _, finish = montecarlo.propagate(dag, duration[:, None])
    assert finish.max() == expected


@settings(max_examples=30, deadline=None)
@given(seed=seeds, n=st.integers(2, 30))
def test_slots_equal_full_table_invariant(seed, n):
    """Reused rows of finish times give what a table of all of them gives."""
    dag = random_dag(np.random.default_rng(seed), n)
    model = StepModel(dag, keyed(dag, [LogNormal(0.1 * i, 0.4) for i in range(n)]))
    _, finish = montecarlo.propagate(dag, montecarlo.sample_durations(model, 300, seed=seed))
    np.testing.assert_array_equal(finish.max(axis=0), simulate(model, 300, seed=seed).step_time)


def test_slots_are_reused():
    dag = chain(1000)
    assert dag.slots[1] <= 2


@settings(max_examples=20, deadline=None)
@given(seed=seeds, op=st.integers(0, 14), factor=st.floats(1, 5))
def test_longer_duration_never_shortens_invariant(seed, op, factor):
    dag = random_dag(np.random.default_rng(seed), 15)
    pools = [Gamma(2.0 + i, 0.1) for i in range(15)]
    slower = list(pools)
    slower[op] = Scaled(pools[op], factor)
    before = simulate(StepModel(dag, keyed(dag, pools)), 200, seed=seed).step_time.values
    after = simulate(StepModel(dag, keyed(dag, slower)), 200, seed=seed).step_time.values
    assert np.all(after >= before)


def test_scaling_all_by_c_scales_the_step_invariant():
    dag = random_dag(np.random.default_rng(3), 20)
    pools = [LogNormal(-0.1 * i, 0.3) for i in range(20)]
    a = simulate(StepModel(dag, keyed(dag, pools)), 500).step_time.values
    b = simulate(StepModel(dag, keyed(dag, [Scaled(p, 4.0) for p in pools])), 500).step_time.values
    np.testing.assert_allclose(b, 4.0 * a, rtol=1e-14)


def test_threads_and_number_of_draws_change_nothing_invariant():
    dag = random_dag(np.random.default_rng(5), 30)
    model = StepModel(dag, keyed(dag, [LogNormal(0.0, 0.2 + 0.01 * i) for i in range(30)]))
    many = simulate(model, 5000, seed=9, threads=4).step_time.values
    one = simulate(model, 5000, seed=9, threads=1).step_time.values
    np.testing.assert_array_equal(one, many)
    watched = simulate(model, 5000, seed=9, finish_of=[0, 7], paths=True).step_time.values
    np.testing.assert_array_equal(watched, many)
    np.testing.assert_array_equal(simulate(model, 777, seed=9).step_time.values, many[:777])
    assert not np.array_equal(simulate(model, 777, seed=10).step_time.values, many[:777])


def test_order_of_construction_changes_nothing_invariant():
    """The same step built in reverse: other indices, other topological order, same bytes."""

    def build(reverse: bool):
        builder = DagBuilder()
        names = [f"op {i}" for i in range(12)]
        number = {n: builder.add(Signature(n), [0]) for n in (names[::-1] if reverse else names)}
        for i in range(12):
            for j in range(i + 1, 12):
                if (i * j) % 3 == 1:
                    builder.wait(number[names[j]], [number[names[i]]])
        pools = {PoolKey(Signature(n)): LogNormal(0.05 * i, 0.3) for i, n in enumerate(names)}
        return StepModel(builder.build([0]), pools)

    np.testing.assert_array_equal(
        simulate(build(False), 500, seed=1).step_time, simulate(build(True), 500, seed=1).step_time
    )


def test_changing_one_pool_leaves_other_draws_identical():
    dag = chain(5)
    pools = [LogNormal(0.0, 0.3)] * 5
    changed = [*pools[:2], Gamma(3.0, 1.0), *pools[3:]]
    a = montecarlo.sample_durations(StepModel(dag, keyed(dag, pools)), 100)
    b = montecarlo.sample_durations(StepModel(dag, keyed(dag, changed)), 100)
    np.testing.assert_array_equal(a[[0, 1, 3, 4]], b[[0, 1, 3, 4]])
    assert not np.array_equal(a[2], b[2])


def test_chain_of_normals_against_theory():
    n, mu, sigma = 25, 1.0, 0.05
    dag = chain(n)
    x = simulate(
        StepModel(dag, keyed(dag, [Normal(mu, sigma)] * n)), 20_000, seed=2
    ).step_time.values
    assert stats.kstest(x, stats.norm(n * mu, np.sqrt(n) * sigma).cdf).pvalue > 1e-4
    assert_mean_close(x, n * mu)


def test_fork_join_against_order_statistics():
    width = 16
    dag = fork_join(width)
    pool = LogNormal(0.0, 0.25)
    x = simulate(StepModel(dag, keyed(dag, [pool] * width)), 20_000, seed=4).step_time.values
    assert stats.kstest(x, lambda t: pool.frozen.cdf(t) ** width).pvalue > 1e-4


def test_negative_control_fork_join():
    """The same check must reject a distribution that is a little off."""
    dag = fork_join(16)
    pool = LogNormal(0.0, 0.25)
    x = simulate(StepModel(dag, keyed(dag, [pool] * 16)), 20_000, seed=4).step_time.values
    assert stats.kstest(x, lambda t: pool.frozen.cdf(t) ** 17).pvalue < 1e-4


POOLS = [
    LogNormal(-3.0, 0.3),
    LogNormal(0.0, 1.2),
    Normal(5.0, 0.7),
    Gamma(4.0, 0.5),
    Gamma(0.8, 2.0),
    Bimodal(0.0, 0.02, 0.3, 0.05, 0.7),
    HeavyTail(0.0, 0.1, 1.2, 0.05, 0.3, 0.5),
]


@pytest.mark.parametrize("pool", POOLS, ids=repr)
def test_tables_reach_into_the_tails_against_scipy(pool):
    """What the engine interpolates is the quantile function, to 0.1 % out to 1e-6."""
    values = lowering._table(pool, kernels.OCTAVE)
    v = kernels.octave_tails()
    probe = np.geomspace(1e-6, 0.5, 4001)[:-1]
    lower = np.interp(probe, v, values[: kernels.SIDE])
    upper = np.interp(probe, v, values[kernels.SIDE :])
    if isinstance(pool, Bimodal):
        # between its modes the quantile function is nearly vertical: there probabilities must agree
        np.testing.assert_allclose(pool.frozen.cdf(lower), probe, rtol=2e-3, atol=4e-3)
        np.testing.assert_allclose(pool.frozen.sf(upper), probe, rtol=2e-3, atol=4e-3)
        return
    np.testing.assert_allclose(lower, pool.frozen.ppf(probe), rtol=1e-3)
    np.testing.assert_allclose(upper, pool.frozen.isf(probe), rtol=1e-3)


@pytest.mark.parametrize("pool", [*POOLS, Empirical((0.1, 0.2, 0.2, 0.5))], ids=repr)
def test_draws_have_the_moments_of_the_pool_against_theory(pool):
    dag = chain(1)
    x = montecarlo.sample_durations(StepModel(dag, keyed(dag, [pool])), 200_000, seed=11)[0]
    assert_mean_close(x, pool.mean)
    assert_mean_close((x - pool.mean) ** 2, pool.std**2)


@pytest.mark.parametrize("pool", POOLS, ids=repr)
def test_draws_follow_the_pool_against_scipy(pool):
    dag = chain(1)
    x = montecarlo.sample_durations(StepModel(dag, keyed(dag, [pool])), 200_000, seed=12)[0]
    assert stats.kstest(x, pool.frozen.cdf).pvalue > 1e-4


def test_maximum_of_n_against_order_statistics():
    dag = chain(1)
    pool = LogNormal(0.0, 0.3)
    x = montecarlo.sample_durations(StepModel(dag, keyed(dag, [MaxOf(pool, 32)])), 100_000)[0]
    assert stats.kstest(x, lambda t: pool.frozen.cdf(t) ** 32).pvalue > 1e-4
    assert_mean_close(x, MaxOf(pool, 32).mean)


def test_ten_million_draws_follow_the_pool_against_theory():
    """KS at 1e7 draws, where an error of 0.0006 of a table would show."""
    dag = chain(1)
    pool = LogNormal(0.0, 0.4)
    x = np.sort(simulate(StepModel(dag, keyed(dag, [pool])), 10_000_000, seed=6).step_time.values)
    grid = np.arange(1, x.size + 1) / x.size
    distance = np.max(np.abs(pool.frozen.cdf(x) - grid + 0.5 / x.size))
    assert stats.kstwobign.sf(distance * np.sqrt(x.size)) > 1e-3
    for q in (1e-6, 1e-5, 1 - 1e-5):
        expected = q * x.size
        assert abs(np.searchsorted(x, pool.quantile(q)) - expected) < 4.5 * np.sqrt(
            x.size * q * (1 - q)
        )


def test_empirical_draws_each_sample_equally_often_against_theory():
    samples = tuple(np.linspace(1.0, 2.0, 37))
    dag = chain(1)
    x = montecarlo.sample_durations(StepModel(dag, keyed(dag, [Empirical(samples)])), 100_000)[0]
    values, counts = np.unique(x, return_counts=True)
    assert tuple(values) == samples
    assert stats.chisquare(counts).pvalue > 1e-4


def test_ops_and_draws_are_uncorrelated():
    n, draws = 40, 20_000
    dag = chain(n)
    x = montecarlo.sample_durations(StepModel(dag, keyed(dag, [Normal(10.0, 1.0)] * n)), draws)
    between_ops = np.corrcoef(x)[np.triu_indices(n, 1)]
    between_draws = np.array([np.corrcoef(row[1:], row[:-1])[0, 1] for row in x])
    for r in (between_ops, between_draws):
        assert np.max(np.abs(r)) < 5.0 / np.sqrt(draws)


def test_mixer_is_injective():
    """Distinct counters give distinct hashes; the mixer is a bijection, so none may collide."""
    counters = np.arange(1_000_000, dtype=np.uint64)

    @numba.njit
    def hashes(x, out):
        for i in range(x.size):
            out[i] = kernels.mix64(x[i] * np.uint64(0x9E3779B97F4A7C15) + np.uint64(12345))

    out = np.empty_like(counters)
    hashes(counters, out)
    assert np.unique(out).size == counters.size


def test_a_cycle_is_refused_and_named():
    builder = DagBuilder()
    a, b, c = (builder.add(Signature(n), [0]) for n in ("alpha", "beta", "gamma"))
    builder.wait(b, [a])
    builder.wait(c, [b])
    builder.wait(a, [c])
    with pytest.raises(ValueError, match=r"waits for itself: .*alpha.*") as fault:
        builder.build([0])
    assert all(n in str(fault.value) for n in ("alpha", "beta", "gamma"))


def test_missing_pools_are_listed_at_once():
    dag = chain(3)
    with pytest.raises(ValueError, match=r"2 ops have no duration pool: op 0.*op 2"):
        StepModel(dag, {PoolKey(Signature("op 1")): Fixed(1.0)})


def test_no_draws_are_refused():
    dag = chain(1)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        simulate(StepModel(dag, keyed(dag, [Fixed(1.0)])), 0)
