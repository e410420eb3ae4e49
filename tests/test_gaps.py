"""Idle gaps: the effective part leaves step times as they are, waiting is not drawn, the choice is recovered."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import pipeline, record

from prism import simulate, traces
from prism.base import stats
from prism.model.dag_builder import DagBuilder
from prism.model.engine.montecarlo import propagate
from prism.model.signature import Signature
from prism.traces import MeasuredSteps
from prism.traces.fitting import gaps


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_effective_gaps_leave_step_times_as_they_are_invariant(seed):
    rng = np.random.default_rng(seed)
    b = DagBuilder()
    for i in range(40):
        b.add(Signature(f"k{i % 3}"), [int(rng.integers(3))],
              after=rng.choice(i, min(i, 3), replace=False).tolist() if i else [])  # fmt: skip
    dag = b.build([0, 0, 0])
    duration = rng.gamma(2, 1, (40, 5))
    gap = rng.gamma(1, 1, (40, 5)) * (rng.random((40, 5)) < 0.5)
    observed = MeasuredSteps.from_arrays(dag, duration, gap)
    effective = observed.effective_gaps.T
    assert np.all(effective <= gap + 1e-12)
    assert np.allclose(propagate(dag, duration, effective)[1].max(axis=0), observed.step_time)
    again = observed.with_gaps({"k0": "effective", "k1": "whole", "k2": "effective"})
    assert np.allclose(traces.replay(again, gaps=False).replayed, observed.step_time)
    back = traces.remove_gaps(again.dag)
    for field in ("pred_ptr", "pred", "signature", "key", "member", "rank"):
        assert np.array_equal(getattr(back, field), getattr(dag, field)), field
    assert back.signatures == dag.signatures


def two_branches():
    """A long branch decides; the short one waits in its shadow for something that the graph lacks."""
    b = DagBuilder()
    long = b.add(Signature("long"), [0])
    short = b.add(Signature("short"), [1])
    b.add(Signature("join", role="world", scope="intra_node"), [0, 1], after=[long, short])
    return b.build([0, 0])


def test_waiting_in_the_shadow_is_no_gap_and_delay_is():
    dag = two_branches()
    duration = np.array([[10.0, 10.0], [1.0, 1.0], [1.0, 1.0]])
    # the short branch idles 5 s before it starts, which delays nothing; the join is launched 2 s late
    gap = np.array([[0.0, 0.0], [5.0, 6.0], [2.0, 3.0]])
    observed = MeasuredSteps.from_arrays(dag, duration, gap)
    # had it idled 4 s (3 s) less, it could still have been that much later: 1 s (3 s) is not explained
    assert observed.effective_gaps.tolist() == [[0.0, 1.0, 2.0], [0.0, 3.0, 3.0]]
    assert list(gaps.kept_kinds(observed)) == ["join"]
    shifts = gaps.gap_shifts(observed)
    assert shifts["short"] == 0.0 and shifts["join"] == pytest.approx(2.5 / 13.5)


def test_gaps_that_hide_each_other_are_kept():
    """Four branches of different kinds stall together: without any one of them nothing moves."""
    b = DagBuilder()
    branches = [b.add(Signature(f"k{i}"), [i]) for i in range(4)]
    b.add(Signature("join", role="world", scope="intra_node"), [0, 1, 2, 3], after=branches)
    dag = b.build([0] * 4)
    rng = np.random.default_rng(0)
    duration = np.full((5, 40), 10.0)
    gap = np.zeros_like(duration)
    gap[:4] = 2 * rng.random(40)
    observed = MeasuredSteps.from_arrays(dag, duration, gap)
    assert max(gaps.gap_shifts(observed).values()) == 0.0
    kept = gaps.kept_kinds(observed)
    assert len(kept) >= 1
    steps = observed.with_gaps(dict.fromkeys(kept, "effective"))
    assert np.allclose(traces.replay(steps, gaps=False).relative_error, 0, atol=1e-9)


def test_gaps_of_unknown_kinds_are_refused():
    dag = two_branches()
    observed = MeasuredSteps.from_arrays(dag, np.ones((3, 4)), np.ones((3, 4)))
    for wrong in ({"long": "half"}, {"longer": "whole"}):
        with pytest.raises(ValueError, match="give kinds of op of the graph, effective or whole"):
            observed.with_gaps(wrong)
    spoilt = observed.steps.copy(deep=True)
    spoilt["gap"][1, 1] = np.nan
    with pytest.raises(ValueError, match="gap: 1 of 12 durations is negative, NaN or infinite"):
        MeasuredSteps(dag, spoilt)


def hidden_gaps(dag, observed, rng):
    """The same steps, with the planted ops of class gap taken for idle time that nothing explains, and waits
    in the shadow of forward ops beside them."""
    is_gap = np.array([s.role == "gap" for s in dag.signatures])[dag.signature]
    owner = np.repeat(np.arange(dag.n_ops), np.diff(dag.pred_ptr))
    follows = {int(p): int(o) for o, p in zip(owner, dag.pred, strict=True) if is_gap[p]}
    named = dataclasses.replace(
        dag,
        signatures=tuple(
            Signature(f"gap before {s.op}", s.shape, role="gap") if s.role == "gap" else s
            for s in dag.signatures
        ),
    )
    bare = traces.remove_gaps(named)
    kept = np.flatnonzero(~is_gap)
    duration = observed.duration.values[:, kept].T
    gap = np.zeros_like(duration)
    place = {int(op): i for i, op in enumerate(kept)}
    for before, op in follows.items():
        gap[place[op]] = observed.duration.values[:, before]
    return MeasuredSteps.from_arrays(bare, duration, gap)


def test_planted_gaps_are_kept_and_predicted_against_theory():
    """The process of the coupling tests, whose gaps of 1 ms before forwards the graph no longer knows."""
    process = pipeline()
    rng = np.random.default_rng(0)
    distances = {"with": [], "without": []}
    for seed in range(3):
        train = hidden_gaps(process, record(process, 200, seed, coupled=True), rng)
        test = hidden_gaps(process, record(process, 1000, 100 + seed, coupled=True), rng)
        # they wait for nothing, so they have to be drawn whole
        assert traces.choose_gaps(train) == {"forward": "whole"}
        with_gaps = traces.fit_model(train)
        no_gaps = MeasuredSteps(train.dag, train.steps.assign(gap=train.gap * 0))
        without = traces.fit_model(no_gaps)
        for name, model in (("with", with_gaps), ("without", without)):
            x = simulate(model, 4000, seed=seed).step_time
            distances[name].append(stats.ks_distance(x, test.step_time))
    assert np.mean(distances["with"]) < 0.06
    assert np.mean(distances["without"]) > 2 * np.mean(distances["with"])


def test_real_traces_keep_what_the_research_found(straggler_trace):
    """ST: forwards, their transfers, reduce-scatter and all-gather; SE: forwards and their transfers. In SE
    the layernorm all-reduce idles a second on average, and matters by 0.02 %: it waits."""
    trace = traces.read_trace(straggler_trace)
    observed = traces.measure_steps(trace)
    kept = set(gaps.kept_kinds(observed))
    both = {"forward-compute", "forward-send-recv"}
    more = (
        {"grads-reduce-scatter", "params-all-gather"}
        if straggler_trace.stem.endswith("ST")
        else set()
    )
    assert kept == both | more
    chosen = traces.choose_gaps(observed)
    assert chosen["forward-send-recv"] == "effective"
    steps = observed.with_gaps(chosen)
    error = traces.replay(steps, gaps=False).relative_error
    assert np.max(np.abs(error)) < 0.005
    model = traces.fit_model(observed)
    x = simulate(model, 4000).step_time
    # accepted at the 5 % level of a one-sample test
    assert stats.ks_distance(x, observed.step_time) < 1.36 / np.sqrt(observed.n_steps)
