"""Comparisons that pass for the same distribution and fail for another."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from scipy import stats as scipy_stats
from statistical import assert_share_close

import prism
from prism.base import schema, stats
from prism.base.tables import TableError
from prism.context import analytic_model
from prism.context.context import read_context
from prism.model.dag_builder import DagBuilder
from prism.model.engine.montecarlo import simulate
from prism.model.pools import LogNormal
from prism.model.signature import Signature
from prism.model.step_model import StepModel
from prism.traces import MeasuredSteps, fit_model, fit_pools, measure_steps, synthetic_steps
from prism.validation import comparison, cross_validation
from prism.validation.comparison import (
    ValidationError,
    compare,
    quantile_quantile,
    read_step_times,
    require,
)
from prism.validation.cross_validation import cross_validate


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
    observed = steps(root, 0.0, n=200)
    model = StepModel(observed.dag, fit_pools(observed.select(slice(0, None, 2))))
    predicted = simulate(model, 200, seed=3).step_time.values
    r = np.corrcoef(predicted, observed.step_time)[0, 1]
    assert abs(r) < 4.5 / np.sqrt(200)


def steps(root, step_cv, n=400):
    ctx = read_context(root / "inputs/small_step.yaml")
    model = analytic_model.model_from_context(ctx, variability=LogNormal.from_moments(1.0, 0.05))
    return synthetic_steps(model, n, step_cv=step_cv, seed=3)


def test_independent_steps_are_predicted(root):
    """Data that are independent by construction: at the noise floor, intervals covered as stated."""
    observed = steps(root, 0.0)
    found = cross_validate(observed, draws=2000).sel(scenario="model")
    assert float(found.ks_distance) < 1.5 * float(found.ks_noise_floor)
    for level in found.level.values:
        inside = round(400 * float(found.coverage.sel(level=level)))
        assert_share_close(inside, 400, float(level), z=4.5)


def test_coupled_steps_need_the_coupling_negative_control(root):
    """Steps that share a factor: drawn independently they are off, with the fitted coupling not."""
    observed = steps(root, 0.03)
    found = cross_validate(observed, draws=2000)
    model, alone, means = (found.sel(scenario=s) for s in found.scenario.values[:3])
    assert float(alone.ks_distance) > 2 * float(alone.ks_noise_floor)
    assert float(model.ks_distance) < 1.5 * float(model.ks_noise_floor)
    assert float(model.crps) < float(alone.crps) < float(means.crps)
    low, high = model.std_error_interval.values
    assert low < 0 < high and float(alone.std_error) < -0.2
    p95 = found.relative_error.sel(quantile=0.95)
    assert abs(float(p95.sel(scenario="model"))) < 0.015


def test_left_out_steps_are_not_used_for_fitting(root, monkeypatch):
    """Every step is left out once, together with its neighbours, and what is fitted then does not hold it."""
    observed = steps(root, 0.0, n=40)
    seen = []

    def watched(train, **options):
        seen.append(set(train.steps["step"].values.tolist()))
        return fit_model(train, **options)

    monkeypatch.setattr(cross_validation, "fit_model", watched)
    cross_validate(observed, draws=200)
    every = set(observed.steps["step"].values.tolist())
    left_out = [sorted(every - s) for s in seen[1:]]
    assert seen[0] == every
    assert left_out == [list(range(10 * k, 10 * k + 10)) for k in range(4)]


def test_few_steps_get_what_can_be_said(root):
    observed = steps(root, 0.0, n=5)
    found = cross_validate(observed, draws=200)
    assert np.all(np.isfinite(found.ks_in_sample)) and np.all(np.isnan(found.crps))
    assert schema.provenance(found)["folds"] == 0
    with pytest.raises(ValueError, match=r"one measured step has no distribution .*got 1"):
        cross_validate(observed.select([0]))


@pytest.fixture(scope="module")
def real(prism_data):
    """The whole procedure on both public traces, one setting."""
    folder = prism_data / "traces/straggler_analysis"
    return {
        n: prism.validate(prism.read_trace(folder / f"trace-{n}.parquet")) for n in ("ST", "SE")
    }


@pytest.mark.parametrize("name", ["ST", "SE"])
def test_bars_on_real_steps_against_published(real, name):
    """Accepted on all steps at the 5 % level; cross-validated within 0.05 of the measured steps themselves,
    CRPS below both baselines and within 10 % of resampled steps, spread within 20 %, p95 of all folds together
    within 3 %, and the loss of p95 on left-out steps within 15 % of that of resampled steps."""
    found = real[name]
    model, alone, means, again = (found.sel(scenario=s) for s in found.scenario.values)
    assert float(model.ks_in_sample) <= float(found.ks_critical)
    assert float(model.ks_distance) <= float(again.ks_distance) + 0.05
    assert float(model.crps) < min(float(alone.crps), float(means.crps))
    assert float(model.crps) <= 1.1 * float(again.crps)
    assert abs(float(model.std_error)) <= 0.2
    assert abs(float(model.relative_error.sel(quantile=0.95))) <= 0.03
    assert float(model.pinball) <= 1.15 * float(again.pinball)
    for level in (0.8, 0.9):
        low, high = model.coverage_interval.sel(level=level).values
        assert low <= level <= high


def test_steps_differ_from_themselves_by_nothing(real):
    """Measured and repeated measured steps have one p95, also where it lies between two far values."""
    y = np.concatenate([np.linspace(2.1, 2.23, 30), [2.37, 2.38]])
    again = compare(np.tile(y, 500), y)
    assert np.all(again.relative_error == 0.0) and float(again.ks_distance[0]) < 1e-12
    for found in real.values():
        assert float(found.relative_error.sel(scenario="resampled", quantile=0.95)) == 0.0


def test_pooled_errors_do_not_hide_those_of_folds():
    """Four stretches of unlike speed: all folds together look right, the left-out ones are not."""
    dag = one_op()
    rng = np.random.default_rng(0)
    y = np.repeat([1.0, 1.3, 0.8, 1.1], 10) * (1 + 0.01 * rng.standard_normal(40))
    found = cross_validate(MeasuredSteps.from_arrays(dag, y[None]), draws=500).sel(scenario="model")
    assert abs(float(found.relative_error_mean)) < 0.01
    assert float(found.fold_error_mean) > 0.1 and float(found.ks_distance) > 0.7


def test_sums_that_differ_in_the_last_bit_are_equal():
    b = DagBuilder()
    last = None
    for i in range(8):
        last = b.add(Signature(f"k{i}"), [0], after=[] if last is None else [last])
    dag = b.build([0])
    steps_ = MeasuredSteps.from_arrays(dag, np.full((8, 24), 0.1), step_time=np.full(24, 0.8))
    found = cross_validate(steps_, draws=100).sel(scenario="model")
    assert float(found.ks_in_sample) == 0.0 and float(found.ks_distance) == 0.0
    assert np.isnan(float(found.std_error)) and np.all(np.isnan(found.std_error_interval))


def one_op():
    b = DagBuilder()
    b.add(Signature("work"), [0])
    return b.build([0])


def test_what_was_kept_and_what_strikes_is_told(real):
    st = schema.provenance(real["ST"])
    assert set(st["gaps_kept"]) >= {"forward-compute", "forward-send-recv"}
    assert st["events"] == {"embedding-grads-all-reduce": 2 / 32}
    # both of these steps have the fastest compute of all
    assert st["event_scores"]["embedding-grads-all-reduce"]["compute"] < -0.5
    assert schema.provenance(real["SE"])["events"] == {}


def test_the_pools_of_the_other_trace_fail_negative_control(real, prism_data):
    """ST's predictions against SE's steps."""
    measured = prism.read_trace(prism_data / "traces/straggler_analysis/trace-SE.parquet")
    observed = measure_steps(measured)
    wrong = compare(real["ST"].step_time, observed.step_time, block=4)
    with pytest.raises(comparison.ValidationError, match=r"KS distance 1\.000 is over 0\.300"):
        comparison.require(wrong, ks=0.3, p95_error=0.05)


def test_anderson_darling_against_scipy():
    """Scipy standardises the statistic by a factor that depends on the sizes alone."""
    rng = np.random.default_rng(5)
    pairs = [(rng.normal(0, 1, 40), rng.normal(d, s, 25)) for d, s in ((0, 1), (0.5, 1), (0, 3))]
    pairs.append((np.round(pairs[1][0]), np.round(pairs[1][1])))  # ties
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # p-values beyond its table; a changed default
        theirs = [scipy_stats.anderson_ksamp([x, y]).statistic for x, y in pairs]
    ours = [stats.anderson_darling(x, y) - 1 for x, y in pairs]
    np.testing.assert_allclose(np.array(ours) / ours[1], np.array(theirs) / theirs[1], rtol=1e-9)


def test_anderson_darling_of_one_distribution_against_theory():
    rng = np.random.default_rng(6)
    found = [stats.anderson_darling(rng.random(60), rng.random(400)) for _ in range(800)]
    assert np.mean(found) == pytest.approx(1.0, abs=4.5 * np.std(found) / np.sqrt(800))
    assert_share_close(int(np.sum(np.array(found) > 2.492)), 800, 0.05)


def test_quantile_bands_hold_what_they_say():
    """Each band holds its measured quantile at its rate if the prediction is right, and not if it is wrong."""
    rng = np.random.default_rng(7)
    predicted = rng.gamma(4.0, 1.0, 40_000)
    inside = np.zeros(50)
    for _ in range(400):
        found = quantile_quantile(predicted, rng.gamma(4.0, 1.0, 50))
        low, high = found.band.values.T
        inside += (found.measured.values >= low) & (found.measured.values <= high)
    assert np.all(np.abs(inside / 400 - 0.95) < 4.5 * np.sqrt(0.0475 / 400))
    wrong = quantile_quantile(predicted, rng.gamma(4.0, 1.3, 50))
    low, high = wrong.band.values.T
    assert np.mean((wrong.measured.values > high) | (wrong.measured.values < low)) > 0.5


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("step_time_s\n1.5\n2.5\n", [1.5, 2.5]),
        ("iteration,step_time_ms,loss\n1,1500,3.2\n2,2500,3.1\n", [1.5, 2.5]),
        ("1.5\n2.5\n", [1.5, 2.5]),
        ("seconds\n1.5\n2.5\n", [1.5, 2.5]),
    ],
)
def test_a_plain_table_of_step_times_is_enough(tmp_path, text, seconds):
    file = tmp_path / "steps.csv"
    file.write_text(text)
    np.testing.assert_allclose(read_step_times(file), seconds)
    assert compare(np.linspace(1, 3, 200), file).provenance.count('"steps": 2') == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "needs one column of step times .*has a, b"),
        ("step_time_s\n1.0\nfast\n", "step_time_s must be a number"),
        ("step_time_s\n1.0\n0\n", "a step of 0 s is no step .data row 2"),
        ("step_time_s,step_time_ms\n1.0,1000\n", "needs one column"),
    ],
)
def test_a_table_without_step_times_is_refused(tmp_path, text, message):
    file = tmp_path / "steps.csv"
    file.write_text(text)
    with pytest.raises(TableError, match=message):
        compare([1.0, 2.0], file)
