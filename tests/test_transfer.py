"""What was measured in one place predicts another, and what differs there is lost."""

from __future__ import annotations

import numpy as np
import pytest

import prism
from prism import traces
from prism.base import stats
from prism.model.dag_builder import DagBuilder
from prism.model.engine.montecarlo import simulate
from prism.model.signature import Signature
from prism.traces import MeasuredSteps, transfer


def job(replicas: int, stages: int = 3, microbatches: int = 2, *, slow: dict | None = None, steps: int = 200, seed: int = 0):  # fmt: skip
    """A forward pipeline in every replica, then a reduction of all; durations made up, a factor a step."""
    builder = DagBuilder()
    ends = []
    for d in range(replicas):
        before = {}
        for m in range(microbatches):
            last = None
            for s in range(stages):
                rank = d * stages + s
                after = [x for x in (before.get(s), last) if x is not None]
                last = before[s] = builder.add(
                    Signature("forward", f"stage {s}"), [rank], stage=s, microbatch=m, dp=d,
                    position=m, after=after,
                )  # fmt: skip
        ends += list(before.values())
    builder.add(Signature("all-reduce", role="world"), range(replicas * stages), after=ends)
    dag = builder.build(np.zeros(replicas * stages, int))
    rng = np.random.default_rng(seed)
    duration = rng.lognormal(0, 0.1, (dag.n_ops, steps)) * rng.lognormal(0, 0.1, steps)
    for stage, factor in (slow or {}).items():
        duration[dag.stage == stage] *= factor
    return MeasuredSteps.from_arrays(dag, duration)


def predicted(model) -> np.ndarray:
    return simulate(model, 4000)["step_time"].values


def assert_like(x: np.ndarray, y: np.ndarray) -> None:
    """At the noise of the measured side: Kolmogorov's 1 % level, the mean to four standard errors."""
    assert stats.ks_distance(x, y) < 1.63 / np.sqrt(y.size)
    assert abs(x.mean() - y.mean()) < 4 * y.std() / np.sqrt(y.size)


def test_two_replicas_predict_eight_against_theory():
    observed = job(8)
    assert_like(predicted(transfer.predict_replicas(observed, [0, 1])), observed.step_time.values)


def test_replicas_left_out_are_not_looked_at_negative_control():
    """A replica that is twice as slow and not measured is missed by what it costs."""
    observed = job(4)
    dag = observed.dag
    slow = observed.duration.values.copy()
    slow[:, dag.dp == 3] *= 2
    steps = MeasuredSteps.from_arrays(dag, slow.T)
    blind = predicted(transfer.predict_replicas(steps, [0, 1, 2]))
    assert_like(blind, predicted(transfer.predict_replicas(observed, [0, 1, 2]))[:200])
    assert blind.mean() < 0.7 * float(steps.step_time.mean())


def test_a_stage_is_predicted_from_a_sibling_and_only_from_one_that_is_alike():
    observed = job(4, slow={2: 1.5})
    assert_like(predicted(transfer.predict_stage(observed, 0, like=1)), observed.step_time.values)
    wrong = predicted(transfer.predict_stage(observed, 2, like=1))
    assert wrong.mean() < 0.9 * float(observed.step_time.mean())


def test_another_number_of_microbatches_and_of_replicas():
    """Fitted on two microbatches of two replicas, carried to six of four."""
    observed = job(2, microbatches=2)
    truth = job(4, microbatches=6, seed=1)
    model = transfer.apply_to(traces.fit_model(observed), truth.dag)
    assert_like(predicted(model), truth.step_time.values)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda o: transfer.predict_stage(o, 7, like=1), "there is no stage 7; the graph has 0, 1, 2"),
        (lambda o: transfer.predict_stage(o, 1, like=1), "cannot stand in for itself"),
        (lambda o: transfer.predict_replicas(o, [5]), "there is no replica 5"),
        (lambda o: transfer.predict_replicas(o, []), "no replica is kept"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(job(2, steps=30))


def test_operations_never_seen_are_named():
    observed = job(2, stages=2, steps=30)
    other = job(2, stages=3, steps=30)
    with pytest.raises(ValueError, match="forward stage 2"):
        transfer.apply_to(traces.fit_model(observed), other.dag)


@pytest.fixture(scope="module")
def measured(prism_data):
    def read(name: str):
        trace = prism.read_trace(prism_data / f"traces/straggler_analysis/trace-{name}.parquet")
        return traces.measure_steps(trace)

    return read


def test_two_of_32_replicas_of_a_real_job_predict_it(measured):
    """SE: p95 to 2 %, and the distribution accepted at the 5 % level for its 43 steps."""
    observed = measured("SE")
    x = predicted(transfer.predict_replicas(observed, [0, 1]))
    y = observed.step_time.values
    assert abs(np.quantile(x, 0.95) / np.quantile(y, 0.95) - 1) < 0.02
    assert stats.ks_distance(x, y) < 0.203


def test_a_middle_stage_of_a_real_job_is_like_its_neighbour_and_the_last_is_not(measured):
    """ST, four stages: the middle ones stand in for each other; the last holds the loss as well."""
    observed = measured("ST")
    y = observed.step_time.values
    like = predicted(transfer.predict_stage(observed, 1, like=2))
    assert stats.ks_distance(like, y) < 0.234
    unlike = predicted(transfer.predict_stage(observed, 3, like=2))
    assert stats.ks_distance(unlike, y) > 0.5
