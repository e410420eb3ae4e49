"""Real multi-step traces: the graph returns measured step times; damaged ones are refused."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pandas as pd
import pytest

from prism import traces
from prism.base import stats
from prism.model.engine.montecarlo import simulate
from prism.model.step_model import StepModel
from prism.traces import (
    MeasuredSteps,
    TraceError,
    build_graph,
    fit_pools,
    observe,
    read_trace,
    replay,
)


def test_replay_returns_measured_step_times_against_published(straggler_trace):
    """Within 0.1 % with idle gaps and 2.1 % without, every step; ops per step as published."""
    trace = read_trace(straggler_trace)
    graph = build_graph(trace)
    observed = observe(trace, graph)
    assert trace.sizes["op"] == {"ST": 212, "SE": 2496}[straggler_trace.stem[-2:]]
    with_gaps = replay(observed)
    without = replay(observed, gaps=False)
    assert np.max(np.abs(with_gaps.relative_error)) < 0.001
    assert np.max(np.abs(without.relative_error)) < 0.021
    # a graph without gaps can only be early
    assert np.all(without.replayed <= with_gaps.replayed)


@pytest.mark.parametrize("into", ["forward-compute", "forward-send-recv", "optimizer"])
def test_replay_without_an_edge_is_early_negative_control(prism_data, into):
    """Leave out the dependencies of one kind of op: the check above fails. Without gaps, that is:
    with them the wait has become a gap, and the replay cannot tell."""
    trace = read_trace(prism_data / "traces/straggler_analysis/trace-ST.parquet")
    graph = build_graph(trace)
    dag = graph.dag
    owner = np.repeat(np.arange(dag.n_ops), np.diff(dag.pred_ptr))
    kinds = np.array([s.op for s in dag.signatures])[dag.signature]
    kept = kinds[owner] != into
    counts = np.bincount(owner[kept], minlength=dag.n_ops)
    cut = dataclasses.replace(
        dag, pred=dag.pred[kept], pred_ptr=np.concatenate([[0], np.cumsum(counts)])
    )
    observed = observe(trace, dataclasses.replace(graph, dag=cut))
    assert np.max(np.abs(replay(observed, gaps=False).relative_error)) > 0.021
    assert np.max(np.abs(replay(observed).relative_error)) < 0.001


def test_replay_with_a_wait_that_was_not_is_late_negative_control(prism_data):
    """Half a second before one op that the step did not have: the check with gaps fails."""
    trace = read_trace(prism_data / "traces/straggler_analysis/trace-ST.parquet")
    graph = build_graph(trace)
    observed = observe(trace, graph)
    late = observed.steps.copy(deep=True)
    late["gap"][:, graph.dag.n_ops // 2] += 0.5
    assert np.max(replay(MeasuredSteps(graph.dag, late)).relative_error) > 0.01


def test_measured_quantiles_against_published(straggler_trace):
    published = {"ST": (2.139, 2.213, 2.294), "SE": (8.078, 9.050, 10.082)}
    trace = read_trace(straggler_trace)
    step_time = observe(trace, build_graph(trace)).step_time
    np.testing.assert_allclose(
        np.quantile(step_time, [0.05, 0.5, 0.95]), published[straggler_trace.stem[-2:]], atol=6e-4
    )


def test_members_of_an_op_end_together(straggler_trace):
    """The check of the join: ends lie within milliseconds, starts up to seconds apart."""
    trace = read_trace(straggler_trace)
    joined = observe(trace, build_graph(trace)).provenance
    assert joined["end_spread_p50"] < 2e-4
    assert joined["end_spread_max"] < 5e-3


def test_transfer_time_is_not_the_raw_duration(prism_data):
    trace = read_trace(prism_data / "traces/straggler_analysis/trace-ST.parquet")
    graph = build_graph(trace)
    clip = np.array([s.op == "optimizer-clip-main-grad" for s in graph.dag.signatures])
    transfer = observe(trace, graph).duration[:, clip[graph.dag.signature]].mean()
    raw = trace.duration[:, trace.name == "optimizer-clip-main-grad"].mean()
    assert transfer < 0.2 * raw


def test_independent_draws_do_not_give_the_measured_distribution(straggler_trace):
    """The known failure of independence, as a figure: KS 0.76 in the literature's rendezvous form."""
    trace = read_trace(straggler_trace)
    measured = observe(trace, build_graph(trace)).step_time
    graph = build_graph(trace)
    pools = fit_pools(observe(trace, graph))
    alone = simulate(StepModel(graph.dag, pools), 1000).step_time
    assert stats.ks_distance(alone, measured) == pytest.approx(0.76, abs=0.03)
    # and with the coupling, still without gaps: 0.74 (ST) and 0.26 (SE)
    coupled = simulate(traces.fit_model(observe(trace, graph), gaps={}), 1000).step_time
    expected = {"ST": 0.73, "SE": 0.26}[straggler_trace.stem[-2:]]
    assert stats.ks_distance(coupled, measured) == pytest.approx(expected, abs=0.04)


def test_scope_follows_the_placement(prism_data):
    trace = read_trace(prism_data / "traces/straggler_analysis/trace-ST.parquet")
    one_node = build_graph(trace, gpus_per_node=8).dag
    assert not one_node.is_inter_node.any()
    assert {s.scope for s in one_node.signatures} == {"local", "intra_node"}
    per_stage = build_graph(trace, gpus_per_node=2).dag
    roles = {
        s.role
        for s, i in zip(per_stage.signatures, range(99), strict=False)
        if s.scope == "inter_node"
    }
    assert roles == {"pp", "embedding", "world"}


def test_borrowing_is_told_pool_by_pool(prism_data):
    """32 steps: with 40 samples asked for, one place of a rank borrows from all of its places."""
    trace = read_trace(prism_data / "traces/straggler_analysis/trace-ST.parquet")
    graph = build_graph(trace)
    observed = observe(trace, graph)
    pools = fit_pools(observed, min_samples=40)
    told = traces.borrowing(observed, pools)
    forward = told.sel(pool=[p for p in told.pool.values if p.startswith("forward-compute")])
    assert np.all(forward["count"] == 32)
    assert np.all(forward.borrowed == 1) and np.all(forward.samples_used == 4 * 32)
    optimizer = told.sel(pool=[p for p in told.pool.values if p.startswith("optimizer stage")])
    assert np.all(optimizer.borrowed == 2) and np.all(optimizer.samples_used == 2 * 32)
    own = traces.borrowing(observed, fit_pools(observed))
    assert np.all(own.borrowed == 0) and np.all(own.samples_used == own["count"])


def test_small_pools_borrow(prism_data):
    trace = read_trace(prism_data / "traces/straggler_analysis/trace-ST.parquet")
    graph = build_graph(trace)
    observed = observe(trace, graph)
    fine = fit_pools(observed, min_samples=10)
    coarse = fit_pools(observed.select(slice(0, 5)), min_samples=10)
    assert all(k in fine for k in graph.dag.pool_keys)
    compute = [k for k in graph.dag.pool_keys if k.position >= 0 and k.signature.role == "compute"]
    assert not any(k in coarse for k in compute)
    # the four microbatches of a stage and rank together are enough
    assert all(next(k.parents()) in coarse for k in compute)
    assert all(k.fleet in coarse for k in graph.dag.pool_keys)


# a small made-up trace: 2 stages, 1 replica, 2 microbatches


def rows(steps=(0, 1)) -> pd.DataFrame:
    out = []

    def add(stage, optype, seq, start, duration, mb=-1):
        for step in steps:
            out.append((0, stage, stage, step, optype, start, duration, seq, 0, mb))

    for stage in (0, 1):
        add(stage, "params-all-gather", 0, 0.0, 0.1)
    for m in (0, 1):
        add(0, "forward-compute", m, 0.1 + m, 1.0, m)
        add(0, "forward-send", m, 1.1 + m, 0.1)
        add(1, "forward-recv", m, 0.5 + m, 0.7)
        add(0, "backward-recv", m, 3.0 + m, 1.0 + m)
        add(0, "backward-compute", m, 5.0 + m, 1.0, m)
        add(1, "backward-send", m, 3.9 + m, 0.1 + m)
    for m in (0, 1):
        add(1, "forward-compute", m, 1.2 + 2 * m, 0.5, m)
        add(1, "backward-compute", m, 1.9 + 2 * m, 1.0, m)
    for stage in (0, 1):
        for i, name in enumerate(
            ["gc", "layernorm-grads-all-reduce", "embedding-grads-all-reduce",
             "grads-reduce-scatter", "optimizer-clip-main-grad", "optimizer"]
        ):  # fmt: skip
            add(stage, name, 0, 7.0 + 0.1 * i, 0.1)
    columns = ["dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc",
               "mb_id"]  # fmt: skip
    return pd.DataFrame(out, columns=columns)


@pytest.fixture
def write(tmp_path):
    def _write(table: pd.DataFrame, name="trace.parquet"):
        table.to_parquet(tmp_path / name)
        return tmp_path / name

    return _write


def test_made_up_trace_is_fine(write):
    trace = read_trace(write(rows()))
    observed = observe(trace, build_graph(trace))
    assert observed.step_time.values == pytest.approx([7.6, 7.6])


def test_several_files_are_one_job(write):
    together = read_trace([write(rows((0,)), "a.parquet"), write(rows((1,)), "b.parquet")])
    assert together.sizes["step"] == 2
    with pytest.raises(TraceError, match="step 1 is also in"):
        read_trace([write(rows((0, 1)), "a.parquet"), write(rows((1,)), "b.parquet")])


def drop(table, **where):
    keep = np.ones(len(table), bool)
    for column, value in where.items():
        keep &= (table[column] == value).to_numpy()
    return table[~keep]


def with_value(table, column, value):
    table = table.copy()
    table[column] = table[column].astype(object if isinstance(value, str) else float)
    table.loc[3, column] = value
    return table


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.drop(columns="seq_id"), "columns seq_id are missing"),
        (lambda t: t.iloc[:0], "holds no rows"),
        (lambda t: with_value(t, "duration", -1.0), "duration must be a number >= 0, 1 rows are not .*row 4"),
        (lambda t: with_value(t, "start_ts", np.nan), "start_ts must be a number"),
        (lambda t: with_value(t, "duration", np.inf), "duration must be a number"),
        (lambda t: t.assign(duration="long"), "duration must be a number >= 0, 60 rows"),
        (lambda t: t.assign(step=t.step / 2), "step must be a whole number"),
        (lambda t: t.assign(start_ts=t.start_ts + 1.7e9), "seconds from the start of the step"),
        (lambda t: t.assign(rank=t["rank"] * 60_000_000), "rank goes up to"),
        (lambda t: t.assign(duration=pd.to_timedelta(t.duration, unit="s")), "holds timedelta"),
        (lambda t: t[~t.optype.str.contains("send|recv")], "stage 0 and stage 1"),
        (lambda t: t[t.optype.str.contains("compute") | (t.optype == "optimizer")], "communicates with none"),
        (lambda t: t.assign(mc=1), "2 model chunks"),
        (lambda t: drop(t, optype="forward-send", seq_id=1), "1 of 2 members"),
        (lambda t: drop(t, optype="embedding-grads-all-reduce", stage=1), "1 of 2 members"),
        (lambda t: drop(t, optype="optimizer"), "no optimizer op"),
        (lambda t: drop(t, optype="backward-compute", stage=0), "no forward or no backward"),
        (lambda t: drop(t, optype="gc", step=1), "present in 1 of 2 steps"),
        (lambda t: pd.concat([t, t.iloc[:1]]), "recorded twice"),
        (lambda t: t.assign(optype=t.optype.replace("gc", "mystery")), "op types mystery"),
    ],
)  # fmt: skip
def test_damaged_traces_are_refused_in_one_line(write, damage, message):
    with pytest.raises(TraceError, match=message) as fault:
        build_graph(read_trace(write(damage(rows()))))
    assert "\n" not in str(fault.value)


def test_what_is_no_trace_is_refused(tmp_path):
    with pytest.raises(TraceError, match="no such file"):
        read_trace(tmp_path / "none.parquet")
    junk = tmp_path / "junk.parquet"
    junk.write_bytes(b"PAR1 not really")
    with pytest.raises(TraceError, match=r"junk\.parquet: not readable as"):
        read_trace(junk)
    with pytest.raises(TraceError, match="no traceEvents in it"):
        read_trace(_text(tmp_path))
    with pytest.raises(TraceError, match="no trace given"):
        read_trace([])


def _text(folder):
    file = folder / "trace.json"
    file.write_text(json.dumps({}))
    return file
