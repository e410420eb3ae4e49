"""Comparisons that pass for the same distribution and fail for another."""

from __future__ import annotations

import numpy as np
import pytest
from statistical import assert_share_close

from prism import validation, workload
from prism.context import read_context
from prism.model import StepModel
from prism.montecarlo import simulate
from prism.pools import LogNormal
from prism.traces import fit_pools
from prism.validation import ValidationError, compare, require


def test_same_distribution_passes_and_a_shifted_one_fails_negative_control():
    rng = np.random.default_rng(0)
    measured = rng.normal(10.0, 0.5, 400)
    right = compare(rng.normal(10.0, 0.5, 4000), measured)
    require(right, ks=0.1, p95_error=0.02)
    wrong = compare(rng.normal(10.4, 0.5, 4000), measured)
    with pytest.raises(
        ValidationError, match=r"KS distance 0\.\d+ is over 0.100; p95 error .* is over"
    ):
        require(wrong, ks=0.1, p95_error=0.02)


def test_errors_against_theory():
    measured = np.linspace(1.0, 2.0, 1001)
    found = compare(1.1 * measured, measured, mean_only=1.5)
    np.testing.assert_allclose(found.relative_error.sel(scenario="predicted"), 0.1)
    np.testing.assert_allclose(found.relative_error_mean, [0.1, 0.0], atol=1e-12)
    assert found.relative_error.sel(scenario="mean only", quantile=0.95) == pytest.approx(
        1.5 / 1.95 - 1
    )
    # a constant covers what lies below it, and at the median its KS distance is one half
    assert np.isnan(found.ks_noise_floor.sel(scenario="mean only"))
    assert found.coverage.sel(scenario="mean only") == pytest.approx(0.5, abs=0.002)
    assert found.ks_distance.sel(scenario="mean only") == pytest.approx(0.5, abs=0.001)


def test_errors_carry_the_uncertainty_of_the_measured_quantile():
    """The interval of the p95 error covers the error against the true p95 at its nominal rate."""
    rng = np.random.default_rng(4)
    truth, predicted = (
        LogNormal(0.0, 0.3),
        1.1 * LogNormal(0.0, 0.3).quantile(np.arange(0.0005, 1, 0.001)),
    )
    exact = np.quantile(predicted, 0.5) / float(truth.quantile(0.5)) - 1
    hits = 0
    for i in range(100):
        found = compare(predicted, rng.lognormal(0.0, 0.3, 100), resamples=150, seed=i)
        low, high = found.relative_error_interval.sel(scenario="predicted", quantile=0.5).values
        hits += low <= exact <= high
    assert hits / 100 >= 0.95 - 4.5 * np.sqrt(0.0475 / 100)


def test_a_synthetic_comparison_says_so():
    assert (
        compare(np.ones(9) + np.arange(9), np.arange(1.0, 9.0), source="synthetic").source
        == "synthetic"
    )


def test_ks_interval_lies_around_the_distance():
    rng = np.random.default_rng(2)
    found = compare(rng.normal(0, 1, 2000) + 10, rng.normal(0.8, 1, 200) + 10)
    low, high = found.ks_distance_interval.values[0]
    # the truth: 2 Phi(0.4) - 1
    assert low < 0.3108 < high
    assert low < float(found.ks_distance[0]) < high


def test_recording_and_prediction_are_independent(root):
    """A recording made with the seed of the prediction must not share its random numbers."""
    dag, observed = steps(root, 0.0, n=200)
    model = StepModel(dag, fit_pools(dag, observed.isel(step=slice(0, None, 2))))
    predicted = simulate(model, 200, seed=3).step_time.values
    r = np.corrcoef(predicted, observed.step_time)[0, 1]
    assert abs(r) < 4.5 / np.sqrt(200)


def steps(root, step_cv, n=400):
    ctx = read_context(root / "inputs/small_step.yaml")
    model = workload.model_from_context(ctx, variability=LogNormal.from_moments(1.0, 0.05))
    return model.dag.unroll(), workload.synthetic_steps(model, n, step_cv=step_cv, seed=3)


def test_independent_steps_are_predicted(root):
    """Data that are independent by construction: at the noise floor, p95 covered as stated."""
    dag, observed = steps(root, 0.0)
    found = validation.validate_steps(dag, observed)
    held_out = found.sel(scenario="held out")
    assert float(held_out.ks_distance) < 2 * float(held_out.ks_noise_floor)
    assert_share_close(round(200 * float(held_out.coverage)), 200, 0.95, z=4.5)


def test_coupled_steps_need_the_coupling_negative_control(root):
    """Steps that share a factor: drawn independently they are off, with the fitted coupling not."""
    dag, observed = steps(root, 0.03)
    found = validation.validate_steps(dag, observed)
    for scenario in ("in sample", "held out"):
        row, alone = (found.sel(scenario=s) for s in (scenario, f"{scenario}, independent"))
        assert float(alone.ks_distance) > 2.5 * float(alone.ks_noise_floor)
        assert float(row.ks_distance) < 2 * float(row.ks_noise_floor)


def test_held_out_steps_are_not_used_for_fitting(root):
    dag, observed = steps(root, 0.0, n=40)
    spoilt = observed.copy(deep=True)
    spoilt["duration"][1::2] *= 100.0
    a = validation.validate_steps(dag, observed)
    b = validation.validate_steps(dag, spoilt)
    held = {"scenario": "held out"}
    assert float(a.relative_error_mean.sel(held)) == float(b.relative_error_mean.sel(held))
    assert float(a.sel(scenario="in sample").relative_error_mean) != float(
        b.sel(scenario="in sample").relative_error_mean
    )


def test_few_steps_are_refused(root):
    dag, observed = steps(root, 0.0, n=3)
    with pytest.raises(ValueError, match="at least 4 measured steps, got 3"):
        validation.validate_steps(dag, observed)
