"""Guarantees that cover the fit."""

from __future__ import annotations

import numpy as np
import pytest
from processes import pipeline, record

from prism.base import stats
from prism.model.engine.montecarlo import simulate
from prism.traces import fit_model
from prism.validation import refits


@pytest.fixture(scope="module")
def process():
    return pipeline(stages=2, replicas=2, microbatches=2)


@pytest.fixture(scope="module")
def truth(process):
    return float(np.quantile(record(process, 100_000, 999, coupled=True).step_time, 0.95))


def test_guarantee_with_fit_is_wider_than_that_of_draws_and_covers(process, truth):
    """40 measured steps: the error of the fit is the larger one. Too few repetitions for a rate."""
    n, covered = 3, 0
    for seed in range(n):
        observed = record(process, 40, seed, coupled=True)
        again = refits.refit_resamples(observed, resamples=40, draws=400, block=1, seed=seed)
        bound = refits.guarantee_with_fit(again)
        runs = simulate(fit_model(observed), 1000, seed=seed)
        assert bound > stats.guarantee(runs.step_time)
        covered += bound >= truth
    assert covered >= n - 1


def test_bad_input_is_refused(process):
    observed = record(process, 40, 7, coupled=False)
    again = refits.refit_resamples(observed, resamples=3, draws=100)
    with pytest.raises(ValueError, match="at least 40 resamples, got 3"):
        refits.guarantee_with_fit(again)


@pytest.mark.parametrize("coupled", [True, False])
def test_planned_steps_and_draws_give_the_wanted_width_against_theory(process, coupled):
    """The scatter of p90 over profiles of the planned length is what was asked for, or less."""

    def p90(seed, steps, draws):
        model = fit_model(record(process, steps, seed, coupled=coupled))
        return float(np.quantile(simulate(model, draws, seed=seed).step_time, 0.9))

    observed = record(process, 60, 1, coupled=coupled)
    again = refits.refit_resamples(observed, q=0.9, resamples=40, draws=1000, block=1)
    runs = simulate(fit_model(observed), 4000)
    wanted = 1.96 * float(again.quantile_value.std()) / 1.5
    plan = refits.measurement_plan(again, runs.step_time, wanted)
    assert 100 < plan.steps == 60 + plan.more_steps < 1200
    again = [p90(100 + k, plan.steps, plan.draws) for k in range(16)]
    scatter = 1.96 * np.std(again, ddof=1)
    assert scatter < wanted * np.sqrt(_chi2_factor(15))
    assert plan.half_width > wanted


def _chi2_factor(degrees: int) -> float:
    """Upper 99 % point of chi2 / degrees: what a sample variance of so many may show."""
    from scipy.stats import chi2

    return float(chi2.ppf(0.99, degrees)) / degrees


def test_a_narrower_interval_needs_more(process):
    observed = record(process, 40, 1, coupled=True)
    again = refits.refit_resamples(observed, resamples=40, draws=400, block=1)
    runs = simulate(fit_model(observed), 1000)
    wide, narrow = (refits.measurement_plan(again, runs.step_time, w) for w in (0.1, 0.001))
    assert wide.more_steps == 0 and wide.draws == stats.min_draws()
    assert narrow.steps > 1000 and narrow.draws > 10_000
    with pytest.raises(ValueError, match="positive number of seconds"):
        refits.measurement_plan(again, runs.step_time, 0.0)
    with pytest.raises(ValueError, match="40 refits and 1000 draws, got 40 and 500"):
        refits.measurement_plan(again, runs.step_time[:500], 0.1)
