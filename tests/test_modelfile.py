"""Models survive being stored."""

from __future__ import annotations

import numpy as np
import pytest

from prism import study, traces
from prism.context import analytic_model
from prism.context.context import read_context
from prism.model.engine.montecarlo import simulate
from prism.model.model_file import from_dataset, to_dataset
from prism.model.pools import (
    Bimodal,
    Empirical,
    Gamma,
    HeavyTail,
    LogNormal,
    MaxOf,
    Normal,
    Scaled,
    Shifted,
)
from prism.whatif.scenarios import HotNode


def models(root):
    ctx = read_context(root / "inputs/small_step.yaml")
    for shape in (
        None,
        LogNormal.from_moments(1.0, 0.1),
        Normal(1.0, 0.05),
        Shifted(Scaled(Gamma(9.0, 0.05), 2.0), 0.1),
        Empirical((0.9, 1.0, 1.1)),
        Bimodal(-0.1, 0.02, 0.1, 0.05, 0.7),
        Scaled(MaxOf(HeavyTail(0.0, 0.1, 1.2, 0.05, 0.3, 0.5), 8), 0.7),
    ):
        yield analytic_model.model_from_context(ctx, variability=shape)


def test_stored_model_draws_the_same_bytes(root):
    for model in models(root):
        again = from_dataset(to_dataset(model))
        assert again.source == model.source
        a, b = (simulate(m, 200, seed=4).step_time.values for m in (model, again))
        np.testing.assert_allclose(a, b, rtol=1e-14)


def test_trace_model_draws_the_same_bytes(prism_data):
    file = prism_data / "traces/straggler_analysis/trace-ST.parquet"
    model = traces.model_from_trace(traces.read_trace(file), family="best")
    again = from_dataset(to_dataset(model))
    a, b = (simulate(m, 100).step_time.values for m in (model, again))
    np.testing.assert_array_equal(a, b)
    assert set(again.pools) == set(model.pools)


def test_equal_models_give_equal_files(root, tmp_path, monkeypatch):
    monkeypatch.setenv("PRISM_ROOT", str(tmp_path))
    model = next(models(root))
    for name in ("a", "b"):
        study.save(name, model)
    assert (tmp_path / "a.nc").read_bytes() == (tmp_path / "b.nc").read_bytes()


def test_a_scenario_is_not_stored(root):
    with pytest.raises(ValueError, match="store the one before it"):
        to_dataset(HotNode(0)(next(models(root))))
