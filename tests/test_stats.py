"""Estimators against scipy and at their nominal rates."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats
from statistical import assert_share_close

from prism.base import stats


@pytest.mark.parametrize(
    ("q", "confidence", "n"), [(0.95, 0.95, 59), (0.99, 0.95, 299), (0.5, 0.9, 4)]
)
def test_min_draws_against_published(q, confidence, n):
    """Wilks' sample sizes, as tabulated everywhere."""
    assert stats.min_draws(q, confidence=confidence) == n
    assert q**n <= 1 - confidence < q ** (n - 1)


def test_guarantee_covers_at_its_nominal_rate_against_theory():
    """The bound is over the true quantile in at least 95 % of repetitions, and exactly as often as
    the binomial says for its order statistic."""
    n, repetitions = 100, 4000
    rng = np.random.default_rng(0)
    truth = scipy_stats.lognorm(0.5).ppf(0.95)
    covered = sum(stats.guarantee(rng.lognormal(0.0, 0.5, n)) >= truth for _ in range(repetitions))
    k = next(k for k in range(1, n + 1) if scipy_stats.binom.cdf(k - 1, n, 0.95) >= 0.95)
    nominal = scipy_stats.binom.cdf(k - 1, n, 0.95)
    assert nominal >= 0.95
    assert_share_close(covered, repetitions, nominal)


def test_guarantee_is_the_smallest_valid_order_statistic():
    for n in (59, 60, 93, 100, 1000):
        x = np.arange(1.0, n + 1)
        k = int(stats.guarantee(x))
        assert scipy_stats.binom.cdf(k - 1, n, 0.95) >= 0.95
        assert k == 1 or scipy_stats.binom.cdf(k - 2, n, 0.95) < 0.95


def test_guarantee_refuses_too_few_and_dependent_draws():
    with pytest.raises(ValueError, match="needs 59 draws, got 58; simulate at least 59"):
        stats.guarantee(np.arange(58.0))
    jobs = xr.DataArray(np.ones((20, 50)), dims=("job", "draw"))
    with pytest.raises(ValueError, match="several draws of one job are dependent"):
        stats.guarantee(jobs)
    with pytest.raises(ValueError, match="1 of 100 values are NaN"):
        stats.guarantee(np.append(np.ones(99), np.nan))


@given(st.integers(20, 400), st.floats(0.05, 0.95), st.integers(0, 2**31))
def test_quantile_interval_against_scipy(n, q, seed):
    x = np.random.default_rng(seed).normal(size=n)
    ours = stats.quantile_interval(x, q)
    ci = scipy_stats.quantile_test(x, q=np.quantile(x, q), p=q).confidence_interval(0.95)
    np.testing.assert_array_equal(ours, (ci.low, ci.high))


@given(st.integers(2, 60), st.integers(2, 60), st.integers(0, 2**31))
def test_ks_distance_against_scipy(n, m, seed):
    rng = np.random.default_rng(seed)
    # rounded, so that ties occur within and between samples
    x, y = rng.normal(size=n).round(1), rng.normal(0.3, 1.2, size=m).round(1)
    expected = scipy_stats.ks_2samp(x, y, method="asymp").statistic
    assert stats.ks_distance(x, y) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("n", "m"), [(1000, 16), (1000, 60), (300, 200)])
def test_ks_noise_floor_against_simulation(n, m):
    rng = np.random.default_rng(1)
    d = np.array([stats.ks_distance(rng.normal(size=n), rng.normal(size=m)) for _ in range(1000)])
    assert stats.ks_noise_floor(n, m) == pytest.approx(np.median(d), rel=0.06)


@pytest.mark.parametrize("m", [16, 60])
@pytest.mark.parametrize("shift", [0.0, 0.1, 0.5, 1.0])
def test_ks_interval_covers_at_least_at_its_level(m, shift):
    truth = 2 * scipy_stats.norm.cdf(shift / 2) - 1
    rng = np.random.default_rng(7)
    hits, n = 0, 400
    for _ in range(n):
        low, high = stats.ks_interval(rng.normal(size=1000), rng.normal(shift, 1, m))
        hits += low <= truth <= high
    assert hits / n >= 0.95 - 4.5 * np.sqrt(0.0475 / n)


def ar1(rng, n, r):
    x = np.empty(n)
    x[0] = rng.normal()
    for t in range(1, n):
        x[t] = r * x[t - 1] + np.sqrt(1 - r * r) * rng.normal()
    return x


def test_effective_size_against_theory():
    """AR(1) with a: n (1 - a) / (1 + a), if the block is long enough to see it."""
    rng = np.random.default_rng(8)
    sizes = [stats.effective_size(ar1(rng, 4000, 0.5), 30) for _ in range(5)]
    assert np.mean(sizes) == pytest.approx(4000 / 3, rel=0.15)
    assert stats.effective_size(rng.normal(size=500), 1) == 500


def test_share_interval_against_scipy():
    hits = np.arange(40) < 37
    expected = scipy_stats.binomtest(37, 40).proportion_ci(0.95, method="exact")
    assert stats.share_interval(hits) == pytest.approx((expected.low, expected.high))


def test_share_interval_of_dependent_hits_covers():
    rng = np.random.default_rng(9)
    limit = scipy_stats.norm.ppf(0.8)
    covered = 0
    for _ in range(400):
        low, high = stats.share_interval(ar1(rng, 100, 0.5) <= limit, block=8)
        covered += low <= 0.8 <= high
    assert covered / 400 >= 0.92


def test_increase_is_paired():
    """Pairs resampled together: what both runs share does not widen the interval."""
    rng = np.random.default_rng(2)
    x = rng.lognormal(0.0, 0.5, 1000)
    slower = 1.1 * x * rng.lognormal(0.0, 0.001, 1000)
    _, low, high = stats.increase(slower, x)
    assert low < 0.1 < high
    assert high - low < 0.005
    _, low, high = stats.increase(rng.permutation(slower), x)
    assert high - low > 0.05


def test_increase_covers_at_its_nominal_rate():
    truth = scipy_stats.norm(1.1, 0.11).ppf(0.95) / scipy_stats.norm(1.0, 0.1).ppf(0.95) - 1
    rng = np.random.default_rng(3)
    covered, n = 0, 200
    for i in range(n):
        x = rng.normal(1.0, 0.1, 400)
        y = 1.1 + 0.11 * (0.6 * (x - 1.0) / 0.1 + 0.8 * rng.standard_normal(400))
        _, low, high = stats.increase(y, x, resamples=200, seed=i)
        covered += low <= truth <= high
    # a percentile bootstrap of a quantile falls a little short of 95 %
    assert 0.90 < covered / n < 0.99


def test_block_indices_keep_neighbours_together():
    picked = stats.block_indices(np.random.default_rng(4), 100, 10)
    assert picked.size == 100
    steps = np.diff(picked.reshape(10, 10), axis=1) % 100
    assert np.all(steps == 1)


def test_mean_interval_covers_at_its_nominal_rate():
    rng = np.random.default_rng(5)
    hits = 0
    for _ in range(3000):
        _, low, high = stats.mean_interval(rng.normal(2.0, 1.0, 5))
        hits += low <= 2.0 <= high
    assert_share_close(hits, 3000, 0.95)


def test_crps_against_theory():
    """Of a normal prediction at y: ``y (2 Phi(y) - 1) + 2 phi(y) - 1 / sqrt(pi)`` (Gneiting and Raftery 2007);
    few draws are not charged for being few."""
    from scipy.stats import norm

    rng = np.random.default_rng(0)
    y = np.array([-1.0, 0.0, 0.5, 2.0])
    exact = np.mean(y * (2 * norm.cdf(y) - 1) + 2 * norm.pdf(y) - 1 / np.sqrt(np.pi))
    assert stats.crps(rng.standard_normal(200_000), y) == pytest.approx(exact, abs=0.005)
    few = [stats.crps(rng.standard_normal(8), y) for _ in range(4000)]
    assert np.mean(few) == pytest.approx(exact, abs=5 * np.std(few) / np.sqrt(4000))


def test_noise_floor_of_a_large_and_a_small_sample_against_simulation():
    rng = np.random.default_rng(1)
    seen = [stats.ks_distance(rng.random(4000), rng.random(8)) for _ in range(1500)]
    assert stats.ks_noise_floor(4000, 8) == pytest.approx(np.median(seen), rel=0.04)
