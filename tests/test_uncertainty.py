"""Guarantees that cover the fit, at their rate."""

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


def test_guarantee_with_fit_covers_where_that_of_draws_does_not(process, truth):
    """40 measured steps: the bound from draws alone misses the true p95 far more often than stated."""
    n = 6
    covered = {"draws": 0, "fit": 0}
    for seed in range(n):
        observed = record(process, 40, seed, coupled=True)
        refits = uncertainty.refitted(
            process, observed, resamples=40, draws=400, block=1, seed=seed
        )
        covered["fit"] += uncertainty.guarantee_with_fit(refits) >= truth
        runs = simulate(fit_model(process, observed), 1000, seed=seed)
        covered["draws"] += stats.guarantee(runs.step_time) >= truth
    assert covered["draws"] < covered["fit"]
    assert covered["fit"] / n >= 0.95 - 3 * np.sqrt(0.0475 / n)


def test_bad_input_is_refused(process):
    observed = record(process, 40, 7, coupled=False)
    refits = uncertainty.refitted(process, observed, resamples=3, draws=100)
    with pytest.raises(ValueError, match="at least 40 resamples, got 3"):
        uncertainty.guarantee_with_fit(refits)
