"""Pools against scipy, fits against planted parameters."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.special import polygamma

from prism import pools
from prism.pools import Empirical, Fixed, Gamma, LogNormal, Normal, Scaled, Shifted, fit, lower

FREE = 6.0 * polygamma(1, 6.0) - 1  # determinant of the gamma information, shape 6
finite = st.floats(0.001, 1000.0)


@pytest.mark.parametrize(
    ("pool", "oracle"),
    [
        (LogNormal(-1.0, 0.4), stats.lognorm(0.4, scale=np.exp(-1.0))),
        (Normal(3.0, 0.5), stats.norm(3.0, 0.5)),
        (Gamma(2.5, 0.2), stats.gamma(2.5, scale=0.2)),
    ],
    ids=["lognormal", "normal", "gamma"],
)
def test_moments_and_quantiles_against_scipy(pool, oracle):
    q = np.array([1e-6, 0.01, 0.5, 0.95, 1 - 1e-6])
    np.testing.assert_allclose(pool.quantile(q), oracle.ppf(q))
    assert pool.mean == pytest.approx(oracle.mean())
    assert pool.std == pytest.approx(oracle.std())


def test_cv_of_lognormal_against_theory():
    assert LogNormal(2.0, 0.7).cv == pytest.approx(np.sqrt(np.expm1(0.49)))


@given(st.lists(finite, min_size=1, max_size=50))
def test_empirical_has_the_moments_of_its_samples_invariant(samples):
    pool = Empirical(tuple(samples))
    assert pool.mean == pytest.approx(np.mean(samples))
    assert pool.std == pytest.approx(np.std(samples), abs=1e-9)
    np.testing.assert_array_equal(
        pool.quantile([0.0, 0.3, 1.0]), np.quantile(samples, [0.0, 0.3, 1.0], method="inverted_cdf")
    )


@given(finite, finite, st.floats(0.01, 100.0), st.floats(0.0, 10.0))
def test_lowering_keeps_the_distribution_invariant(mu, sigma, factor, by):
    pool = Scaled(Shifted(Scaled(Gamma(mu, sigma), 2.0), by), factor)
    low = lower(pool)
    q = np.array([0.1, 0.5, 0.9])
    np.testing.assert_allclose(low.shift + low.scale * low.base.quantile(q), pool.quantile(q))


@pytest.mark.parametrize(
    ("family", "planted", "spread"),
    [
        # standard errors of the maximum likelihood estimates times sqrt(n), from the information
        ("lognormal", LogNormal(-2.0, 0.3), (0.3, 0.3 / np.sqrt(2))),
        ("normal", Normal(4.0, 0.6), (0.6, 0.6 / np.sqrt(2))),
        (
            "gamma",
            Gamma(6.0, 0.05),
            (np.sqrt(6.0 / FREE), 0.05 * np.sqrt(polygamma(1, 6.0) / FREE)),
        ),
    ],
)
def test_fit_recovers_planted_parameters(family, planted, spread):
    x = planted.frozen.rvs(5000, random_state=np.random.default_rng(1))
    found = fit(x, family).pool
    for f, error in zip(dataclasses.fields(planted), spread, strict=True):
        distance = abs(getattr(found, f.name) - getattr(planted, f.name))
        assert distance < 4.5 * error / np.sqrt(x.size)


def test_best_finds_the_family():
    rng = np.random.default_rng(2)
    assert fit(rng.lognormal(0.0, 0.8, 4000)).family == "lognormal"
    assert fit(rng.gamma(0.7, 2.0, 4000)).family == "gamma"
    assert fit(rng.normal(10.0, 1.0, 4000)).family == "normal"


def test_wrong_family_is_rejected_negative_control():
    x = np.random.default_rng(3).lognormal(0.0, 0.8, 400)
    wrong = fit(x, "gamma", bootstrap=199)
    right = fit(x, "lognormal", bootstrap=199)
    assert wrong.ad_pvalue < 0.05 < right.ad_pvalue


def test_anderson_darling_against_scipy():
    x = np.random.default_rng(4).normal(10.0, 1.0, 300)
    ours = fit(x, "normal")
    known = {"loc": ours.pool.mu, "scale": ours.pool.sigma}
    theirs = stats.goodness_of_fit(
        stats.norm, x, known_params=known, statistic="ad", n_mc_samples=1,
        rng=np.random.default_rng(0),
    )  # fmt: skip
    assert ours.ad == pytest.approx(theirs.statistic)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Empirical(()), "at least one sample"),
        (lambda: Empirical((1.0, np.nan)), "1 of 2 durations is negative, NaN or infinite"),
        (lambda: Empirical((1.0, -1.0)), "first: -1.0"),
        (lambda: Normal(1.0, 0.5), "below zero; use LogNormal or Gamma"),
        (lambda: LogNormal(0.0, 0.0), "sigma > 0"),
        (lambda: Gamma(np.inf, 1.0), "finite parameters"),
        (lambda: Fixed(-1.0), "negative"),
        (lambda: Scaled(Fixed(1.0), -2.0), "a factor >= 0"),
        (lambda: Shifted(Fixed(1.0), -2.0), "support >= 0"),
        (lambda: Shifted(Normal(1.0, 0.1), -0.9), "support >= 0"),
        (lambda: pools.fit_families([0.0, 0.0, 0.0, 1.0]), "no family fits"),
        (lambda: fit([1.0, 2.0, 3.0], "weibull"), "unknown family 'weibull'"),
        (lambda: fit([1.0, 2.0], "gamma"), "at least 3 samples"),
        (lambda: fit([1.0, 1.0, 1.0], "gamma"), "use family='empirical'"),
        (lambda: fit([0.0, 1.0, 2.0], "lognormal"), "1 of 3 are 0"),
        (lambda: fit([1.0, np.inf, 2.0]), "infinite"),
    ],
)
def test_bad_input_is_refused_in_one_line(make, message):
    with pytest.raises(ValueError, match=message) as fault:
        make()
    assert "\n" not in str(fault.value)


def test_a_normal_can_be_shifted_up():
    assert Shifted(Normal(1.0, 0.05), 0.1).mean == pytest.approx(1.1)


def test_fits_dataset_orders_families_by_aic():
    fits = pools.fit_families(np.random.default_rng(5).gamma(0.7, 1.0, 1000))
    table = pools.fits_dataset(fits, source="synthetic")
    assert list(fits) == list(table.scenario.values)
    assert np.all(np.diff(table.aic.values) >= 0)
