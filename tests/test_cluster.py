"""The cluster against queueing theory and conservation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from prism import schema
from prism.cluster import (
    Checkpoint,
    Cluster,
    JobsError,
    compare_estimates,
    pack,
    read_jobs,
    run_cluster,
)
from prism.cluster.simulator import draw_run_times
from prism.specs import SpecError

FREE = Checkpoint(interval_s=1e9, write_s=0.0, restart_s=0.0)


def log(submit, gpus, duration):
    return schema.dataset(
        {
            "submit": ("job", np.asarray(submit, float)),
            "gpus": ("job", np.asarray(gpus, np.int64)),
            "estimate": ("job", np.asarray(duration, float)),
        },
        coords={"job": np.arange(len(submit)).astype(str)},
        made_by="test",
        source="synthetic",
    )


def random_log(seed, n=60, gpus=(1, 2, 4, 8)):
    rng = np.random.default_rng(seed)
    return log(
        np.cumsum(rng.exponential(500.0, n)), rng.choice(gpus, n), rng.lognormal(8.0, 1.0, n)
    )


def ledger(run) -> dict[str, float]:
    return dict(zip(run.scenario.values.tolist(), run.gpu_seconds.values.tolist(), strict=True))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    policy=st.sampled_from(["FCFS", "SRTF"]),
    estimate=st.sampled_from(["point", "p95"]),
    write=st.floats(0.0, 600.0),
    interval=st.floats(10.0, 5000.0),
    restart=st.floats(0.0, 2000.0),
)
def test_ledger_sums_and_work_is_conserved_invariant(
    seed, policy, estimate, write, interval, restart
):
    checkpoint = Checkpoint(interval, write, restart)
    jobs = random_log(seed)
    run = run_cluster(
        jobs, Cluster(12, rounds=300), policy, estimate=estimate, checkpoint=checkpoint, seed=seed
    )
    found = ledger(run)
    allocated = found.pop("allocated")
    assert sum(found.values()) == pytest.approx(allocated, rel=1e-9)
    assert min(found.values()) >= -1e-6
    done = np.isfinite(run.finish.values)
    finished_work = float(run.run_time.values[done] @ jobs.gpus.values[done])
    assert finished_work <= found["useful"] * (1 + 1e-9)
    # nobody finishes sooner than its work, its restart and the checkpoints of an undisturbed run take
    least = checkpoint.time_for(run.run_time.values) + restart
    if policy == "SRTF":  # a preemption starts a new cycle, which may save a write
        least = run.run_time.values + restart
    assert np.all(run.jct.values[done] >= least[done] - 1e-6)


def test_drained_run_does_exactly_the_work():
    jobs = random_log(1)
    run = run_cluster(jobs, Cluster(16, rounds=5000), "SRTF")
    assert np.all(np.isfinite(run.finish))
    assert ledger(run)["useful"] == pytest.approx(float(run.run_time.values @ jobs.gpus.values))


def test_mm1_fcfs_against_theory():
    """One server, Poisson arrivals, exponential service: mean time in system 1 / (mu - lambda)."""
    rng = np.random.default_rng(7)
    n, rho = 4_000, 0.7
    submit = np.cumsum(rng.exponential(1000.0 / rho, n))
    jobs = log(submit, np.ones(n), rng.exponential(1000.0, n))
    rounds = 130_000
    run = run_cluster(
        jobs, Cluster(1, rounds=rounds, round_s=50.0), "FCFS", cv=0.0, checkpoint=FREE
    )
    jct = run.jct.values[500:]
    # a start waits for the next round, half a round on average, and so does everyone behind it
    service = 1000.0 + 25.0
    expected = service / (1 - service * rho / 1000.0)
    blocks = jct[: jct.size // 20 * 20].reshape(20, -1).mean(axis=1)
    assert abs(jct.mean() - expected) < 4.5 * blocks.std(ddof=1) / np.sqrt(20) + 0.03 * expected


def test_srtf_is_optimal_on_one_server_against_theory():
    """All jobs present, one GPU: shortest first minimises the mean; no order does better."""
    jobs = log(np.zeros(5), np.ones(5), [3000.0, 600.0, 1200.0, 300.0, 2400.0])
    run = run_cluster(jobs, Cluster(1, rounds=100), "SRTF", cv=0.0, checkpoint=FREE)
    ordered = np.sort(jobs.estimate.values)
    assert float(run.jct.mean()) == pytest.approx(np.cumsum(ordered).mean())


def test_fcfs_ignores_the_estimate_exactly():
    jobs = random_log(3)
    found = compare_estimates(jobs, Cluster(8, rounds=400), seeds=range(3))
    fcfs = found.sel(policy="FCFS")
    np.testing.assert_array_equal(fcfs.jct.sel(scenario="p95"), fcfs.jct.sel(scenario="point"))


def test_no_spread_makes_estimates_equal_exactly():
    found = compare_estimates(random_log(4), Cluster(8, rounds=400), cv=0.0, seeds=[0])
    np.testing.assert_array_equal(found.jct.sel(scenario="p95"), found.jct.sel(scenario="point"))


def test_overruns_happen_as_often_as_stated_against_theory():
    jobs = log(np.arange(20_000), np.ones(20_000), np.full(20_000, 1000.0))
    real = draw_run_times(jobs, 0.2, seed=5)
    assert np.mean(real > 1000.0) == pytest.approx(0.5, abs=0.016)
    assert np.mean(real > 1000.0 * (1 + 0.2 * stats.norm.ppf(0.95))) == pytest.approx(
        0.05, abs=0.007
    )


def test_checkpoints_stall_as_computed_against_theory():
    """3000 s of work, a checkpoint of 60 s every 1000 s of work but none at the very end."""
    jobs = log([0.0], [2], [3000.0])
    costs = Checkpoint(interval_s=1000.0, write_s=60.0, restart_s=100.0)
    run = run_cluster(jobs, Cluster(2, rounds=20), "FCFS", cv=0.0, checkpoint=costs)
    assert float(run.finish[0]) == pytest.approx(100 + 3000 + 2 * 60)
    found = ledger(run)
    assert found["stall"] == pytest.approx(2 * 120)
    assert found["restart"] == pytest.approx(2 * 100)
    assert found["tail"] == pytest.approx(2 * (11 * 300 - 3220))


def test_preemption_costs_and_loses_nothing():
    """A short job interrupts a long one, which writes a checkpoint, restarts and does its work."""
    jobs = log([0.0, 600.0], [1, 1], [3000.0, 300.0])
    costs = Checkpoint(interval_s=1e9, write_s=50.0, restart_s=70.0)
    run = run_cluster(jobs, Cluster(1, rounds=40), "SRTF", cv=0.0, checkpoint=costs)
    assert float(run.finish[1]) == pytest.approx(600 + 70 + 300)
    # rounds 2 and 3 belong to the short job; then 50 + 70 owed and 2470 of work left
    assert float(run.finish[0]) == pytest.approx(1200 + 50 + 70 + 3000 - 530)
    assert ledger(run)["useful"] == pytest.approx(3300.0)


def test_restart_begun_anew_costs_one_restart():
    """Preempted in the middle of its restart: 300 s of it are lost, 1000 s are due again, no write."""
    jobs = log([0.0, 300.0], [1, 1], [5000.0, 300.0])
    costs = Checkpoint(interval_s=1e9, write_s=50.0, restart_s=1000.0)
    run = run_cluster(jobs, Cluster(1, rounds=60), "SRTF", cv=0.0, checkpoint=costs)
    short_ends = 300 + 1000 + 300
    assert float(run.finish[1]) == pytest.approx(short_ends)
    # the round in which the short job ends is its own
    assert float(run.finish[0]) == pytest.approx(1800 + 1000 + 5000)
    assert ledger(run)["stall"] == 0.0


@given(
    interval=st.integers(1, 30_000).map(lambda i: i / 10),
    write=st.integers(0, 3000).map(lambda i: i / 10),
    cycles=st.integers(0, 400),
)
def test_checkpoint_arithmetic_on_boundaries_invariant(interval, write, cycles):
    """Decimal intervals that no float holds: whole cycles give whole intervals, and back."""
    c = Checkpoint(interval, write, 0.0)
    at = np.array([cycles * (interval + write)])
    assert c.worked(at)[0] == pytest.approx(cycles * interval, rel=1e-9, abs=1e-6)
    work = np.array([cycles * interval])
    expected = work[0] + max(cycles - 1, 0) * write
    assert c.time_for(work)[0] == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_no_checkpoints_is_an_infinite_interval():
    jobs = random_log(2)
    never = Checkpoint(interval_s=np.inf, write_s=30.0, restart_s=0.0)
    run = run_cluster(jobs, Cluster(16, rounds=3000), "FCFS", checkpoint=never)
    assert ledger(run)["stall"] == pytest.approx(0.0, abs=1e-6)
    assert np.all(np.isfinite(run.finish))


def test_rounds_converge_to_event_time():
    jobs = random_log(6, n=40, gpus=(1,))
    waits = []
    for round_s in (300.0, 30.0, 3.0):
        cluster = Cluster(4, rounds=int(200_000 / round_s), round_s=round_s)
        waits.append(float(run_cluster(jobs, cluster, "FCFS", cv=0.0, checkpoint=FREE).jct.mean()))
    exact = event_time_fcfs(jobs, 4)
    errors = np.abs(np.array(waits) - exact)
    assert errors[2] < errors[1] < errors[0]
    assert errors[2] < 0.2 * errors[1]
    assert errors[2] < 0.002 * exact


def event_time_fcfs(jobs, servers: int) -> float:
    """Mean completion time of one-GPU jobs on several servers, by events."""
    free = np.zeros(servers)
    jct = []
    for submit, service in zip(jobs.submit.values, jobs.estimate.values, strict=True):
        server = int(np.argmin(free))
        free[server] = max(free[server], submit) + service
        jct.append(free[server] - submit)
    return float(np.mean(jct))


def test_philly_arrivals_against_published(prism_data):
    """The job log that Arena simulates, 1,280 GPUs, 2000 rounds: 986 arrivals, and FCFS finishing
    622 to 626 at 23.3 to 23.5 h as an independent simulator did."""
    jobs = read_jobs(prism_data / "workloads/arena_philly.csv")
    assert int((jobs.submit < 2000 * 300).sum()) == 986
    run = run_cluster(jobs, Cluster(1280), "FCFS")
    assert 615 <= int(np.isfinite(run.finish).sum()) <= 632
    assert 22.8 <= float(run.jct.mean()) / 3600 <= 24


@given(
    st.lists(st.integers(1, 16), min_size=1, max_size=30), st.integers(1, 32), st.integers(0, 99)
)
def test_pack_equals_a_loop_invariant(gpus, capacity, seed):
    gpus = np.array(gpus)
    order = np.random.default_rng(seed).permutation(gpus.size)
    expected, free = np.zeros(gpus.size, bool), capacity
    for j in order:
        if gpus[j] <= free:
            expected[j] = True
            free -= gpus[j]
    np.testing.assert_array_equal(pack(order, gpus, capacity), expected)


def test_own_policy_and_estimator_are_callables():
    jobs = random_log(8)

    def smallest_first(queue):
        return pack(np.argsort(queue.gpus, kind="stable"), queue.gpus, queue.capacity)

    run = run_cluster(jobs, Cluster(8, rounds=100), smallest_first, estimate=lambda n, cv: 2 * n)
    assert np.isfinite(run.finish).any()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("job_id,submit_s,gpus\na,0,1\n", "columns duration_s are missing"),
        ("job_id,submit_s,gpus,duration_s\n", "holds no rows"),
        ("job_id,submit_s,gpus,duration_s\na,0,1,10\nb,x,1,10\n", "submit_s must be a number, 1 rows are not .first: 'x' in data row 2"),
        ("job_id,submit_s,gpus,duration_s\na,0,0,10\n", "gpus must be a whole number >= 1"),
        ("job_id,submit_s,gpus,duration_s\na,0,1.5,10\n", "gpus must be a whole number >= 1"),
        ("job_id,submit_s,gpus,duration_s\na,0,1e20,1\n", "gpus must be a whole number >= 1"),
        ("job_id,submit_s,gpus,duration_s\nj1,0,1,100,5\n", "more cells than the header"),
        ("job_id,submit_s,gpus,duration_s\n,0,1,100\n", "job_id is empty"),
        ("job_id,submit_s,gpus,duration_s\na,0,1,5\nb,1e308,1,5\n", "within 1e12 s"),
        ("job_id,submit_s,gpus,duration_s\na,0,1,-1\n", "duration_s must be a number > 0"),
        ("job_id,submit_s,gpus,duration_s\na,0,1,1\na,0,1,1\n", "job_id must not repeat"),
    ],
)  # fmt: skip
def test_bad_job_logs_are_refused_in_one_line(tmp_path, content, message):
    file = tmp_path / "jobs.csv"
    file.write_text(content)
    with pytest.raises(JobsError, match=message):
        read_jobs(file)


def test_bad_runs_are_refused(tmp_path):
    jobs = random_log(9)
    with pytest.raises(ValueError, match="need more than the cluster's 4 GPUs"):
        run_cluster(jobs, Cluster(4), "FCFS")
    with pytest.raises(ValueError, match="unknown policy 'LIFO'; one of FCFS, SRTF"):
        run_cluster(jobs, Cluster(8), "LIFO")
    with pytest.raises(ValueError, match="cv must lie between 0 and"):
        run_cluster(jobs, Cluster(8), "FCFS", cv=-1.0)
    with pytest.raises(ValueError, match="in order of submission"):
        run_cluster(jobs.isel(job=slice(None, None, -1)), Cluster(8), "FCFS")
    with pytest.raises(ValueError, match=r"estimates: .* NaN"):
        run_cluster(jobs, Cluster(8), "FCFS", estimate=lambda n, cv: n * np.nan)
    with pytest.raises(ValueError, match="gives out"):
        run_cluster(jobs, Cluster(8), lambda q: np.ones(q.gpus.size, bool))
    with pytest.raises(ValueError, match="must be whole and positive"):
        Cluster(0)
    with pytest.raises(JobsError, match="no such file"):
        read_jobs(tmp_path / "none.csv")
    (tmp_path / "jobs.yaml").write_text("kind: jobs\n")
    with pytest.raises(SpecError, match="kind"):
        read_jobs(tmp_path / "jobs.yaml")
