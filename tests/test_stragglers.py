"""Slow-downs by group against those that the authors of the measure published for the same traces."""

from __future__ import annotations

import json

import numpy as np
import pytest

import prism
from prism import traces
from prism.traces.stragglers import slowdown_by_group


@pytest.fixture(scope="module", params=["ST", "SE"])
def job(request, prism_data):
    folder = prism_data / "traces/straggler_analysis"
    trace = prism.read_trace(folder / f"trace-{request.param}.parquet")
    published = json.loads((folder / f"result-{request.param}.json").read_text())
    return traces.measure_steps(trace), published


def test_the_whole_job_against_published(job):
    observed, published = job
    found = slowdown_by_group(observed)
    assert float(found["slowdown_all"]) == pytest.approx(published["blocking_slowdown"], rel=1e-3)


#: theirs have a name for both directions of the pipeline's transfers
NAMES = {"forward-pp-comm": "forward-send-recv", "backward-pp-comm": "backward-send-recv"}


@pytest.mark.parametrize(
    ("by", "key"), [("kind", "optype"), ("stage", "stage"), ("replica", "dp_rank")]
)
def test_by_group_against_published(job, by, key):
    """To 0.1 %, a tenth of what the replay of a step is off."""
    observed, published = job
    found = slowdown_by_group(observed, by=by)
    ours = dict(zip(map(str, found["signature"].values), found["slowdown"].values, strict=True))
    theirs = published[f"blocking_decompose_by_{key}"]
    assert len(theirs) >= 2
    for name, value in theirs.items():
        own = NAMES.get(name, name) if by == "kind" else f"{by} {name}"
        assert ours[own] == pytest.approx(value, rel=1e-3), name


def test_intervals_hold_the_estimate_and_the_largest_comes_first(job):
    observed, _ = job
    found = slowdown_by_group(observed, by="rank")
    low, high = found["slowdown_interval"].values.T
    x = found["slowdown"].values
    assert np.all((low <= x) & (x <= high)) and np.all(np.diff(x) <= 0)
    with pytest.raises(ValueError, match="by 'rack' is not one of"):
        slowdown_by_group(observed, by="rack")
