"""The embedded recordings: half of the steps, in blocks, predicts the other half."""

from __future__ import annotations

import numpy as np
import pytest

import prism
from prism import traces
from prism.base import stats
from prism.model.engine.montecarlo import simulate
from prism.validation.comparison import ValidationError, compare, require

BLOCK = 50
CONDITIONS = ("steady", "slow-rank", "background")


@pytest.fixture(scope="module")
def halves(root):
    """By condition: steps fitted to, steps left out."""
    out = {}
    for condition in CONDITIONS:
        trace = prism.read_trace(root / "inputs/training" / condition)
        observed = traces.measure_steps(trace)
        half = np.arange(observed.n_steps) // BLOCK % 2
        out[condition] = tuple(observed.select(half == i) for i in (0, 1))
    return out


@pytest.fixture(scope="module")
def predictions(halves):
    """By condition: model, independent draws of its pools, and the steps left out, s."""
    out = {}
    for condition, (fitted, left) in halves.items():
        model = traces.fit_model(fitted)
        alone = model.replace(coupling=prism.Coupling.independent())
        out[condition] = (
            simulate(model, 10_000)["step_time"].values,
            simulate(alone, 10_000)["step_time"].values,
            left.step_time.values,
        )
    return out


@pytest.mark.parametrize("condition", CONDITIONS)
def test_the_graph_explains_the_steps(halves, condition):
    """Without idle gaps, half of the steps to 0.2 %; a rank that wakes late after a collective costs a few more."""
    fitted, _ = halves[condition]
    assert fitted.n_steps == 1000
    error = np.abs(traces.replay(fitted, gaps=False)["relative_error"].values)
    assert np.median(error) < 0.002
    assert np.quantile(error, 0.9) < 0.05


@pytest.mark.parametrize("condition", ["steady", "slow-rank"])
def test_half_of_the_steps_predicts_the_other(predictions, condition):
    """p95 to 1.5 %, KS near what two halves of the measured steps show (0.04 and 0.08)."""
    model, alone, left = predictions[condition]
    require(compare(model, left, block=BLOCK), ks=0.07, p95_error=0.015)
    assert stats.ks_distance(alone, left) > 2.5 * stats.ks_distance(model, left)


def test_a_load_that_comes_and_goes_is_half_understood(predictions):
    """Two humps: p95 is right, what lies between them is not. Independent draws are worse on both."""
    model, alone, left = predictions["background"]
    found = compare(model, left, block=BLOCK).isel(scenario=0)
    assert abs(float(found.relative_error.sel(quantile=0.95))) < 0.03
    assert 0.1 < float(found.ks_distance) < 0.25
    wrong = compare(alone, left, block=BLOCK).isel(scenario=0)
    assert float(wrong.ks_distance) > 0.35
    assert float(wrong.relative_error.sel(quantile=0.95)) < -0.1


def test_the_pools_of_another_condition_fail_negative_control(predictions):
    with pytest.raises(ValidationError, match="KS distance"):
        require(compare(predictions["slow-rank"][0], predictions["steady"][2]), ks=0.07)


def test_the_slowed_rank_computes_twice_as_long(halves):
    """The recording holds what it says it holds."""
    means = {}
    for condition in ("steady", "slow-rank"):
        fitted, _ = halves[condition]
        dag = fitted.dag
        name = np.array([s.op for s in dag.signatures])[dag.signature]
        took = fitted.duration.mean("step").values
        means[condition] = [took[(name == "forward") & (dag.rank == r)].mean() for r in (0, 1)]
    first, second = np.array(means["slow-rank"]) / np.array(means["steady"])
    assert 0.8 < first < 1.2
    assert 1.7 < second < 2.3
