"""Guarantees that cover the fit."""

from __future__ import annotations

import numpy as np
import pytest
from processes import pipeline, record

from prism import stats, uncertainty
from prism.montecarlo import simulate
from prism.traces import fit_model


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
        refits = uncertainty.refitted(
            process, observed, resamples=40, draws=400, block=1, seed=seed
        )
        bound = uncertainty.guarantee_with_fit(refits)
        runs = simulate(fit_model(process, observed), 1000, seed=seed)
        assert bound > stats.guarantee(runs.step_time)
        covered += bound >= truth
    assert covered >= n - 1


def test_bad_input_is_refused(process):
    observed = record(process, 40, 7, coupled=False)
    refits = uncertainty.refitted(process, observed, resamples=3, draws=100)
    with pytest.raises(ValueError, match="at least 40 resamples, got 3"):
        uncertainty.guarantee_with_fit(refits)
