"""The cluster against queueing theory and conservation."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from prism.base import schema
from prism.base.specs import SpecError
from prism.cluster import (
    ESTIMATES,
    OVERRUNS,
    POLICIES,
    Checkpoint,
    Cluster,
    Flat,
    JobsError,
    Overrun,
    Quantile,
    Queue,
    Speed,
    compare_estimates,
    offered_load,
    pack,
    ratios,
    read_jobs,
    run_cluster,
    select_jobs,
    with_cv,
)
from prism.cluster.policies import fcfs, srtf
from prism.cluster.runtimes import RunTimes, run_times

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


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    policy=st.sampled_from(list(POLICIES)),
    overrun=st.sampled_from(list(OVERRUNS)),
    estimate=st.sampled_from(list(ESTIMATES)),
    graceful=st.booleans(),
    failures=st.sampled_from([0.0, 2.0]),
    events=st.booleans(),
    write=st.floats(0.0, 600.0),
    interval=st.floats(10.0, 5000.0),
    restart=st.floats(0.0, 2000.0),
)
def test_ledger_sums_and_work_is_conserved_invariant(
    seed, policy, overrun, estimate, graceful, failures, events, write, interval, restart
):
    checkpoint = Checkpoint(interval, write, restart, graceful, failures)
    jobs = random_log(seed, n=30 if events else 60)
    run = run_cluster(
        jobs, Cluster(12, rounds=300, events=events), policy, estimate=estimate, overrun=Overrun(overrun), checkpoint=checkpoint, seed=seed
    )  # fmt: skip
    found = ledger(run)
    allocated = found.pop("allocated")
    assert sum(found.values()) == pytest.approx(allocated, rel=1e-9)
    assert min(found.values()) >= -1e-6
    done = np.isfinite(run.finish.values)
    finished_work = float(run.run_time.values[done] @ jobs.gpus.values[done])
    # on more GPUs than asked for, work takes more GPU-seconds, on fewer less
    assert finished_work <= found["useful"] * (1.2 if policy == "Arena*" else 1 + 1e-9)
    if policy == "Arena*":  # it may run faster than was asked for
        return
    # nobody finishes sooner than its work, its restart and the checkpoints of an undisturbed run take
    least = checkpoint.time_for(run.run_time.values, np.array([interval])) + restart
    if policy != "FCFS" or failures:  # what is stopped starts a new cycle, which may save a write
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
    own = found.sel(policy="FCFS")
    np.testing.assert_array_equal(own.jct.sel(scenario="p95"), own.jct.sel(scenario="point"))


def test_no_spread_makes_estimates_equal_exactly():
    found = compare_estimates(random_log(4), Cluster(8, rounds=400), cv=0.0, seeds=[0])
    np.testing.assert_array_equal(found.jct.sel(scenario="p95"), found.jct.sel(scenario="point"))


def test_overruns_happen_as_often_as_stated_against_theory():
    jobs = log(np.arange(20_000), np.ones(20_000), np.full(20_000, 1000.0))
    real = run_times(jobs, 0.2).drawn(5)
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
    c, every = Checkpoint(interval, write, 0.0), np.array([interval])
    at = np.array([cycles * (interval + write)])
    assert c.worked(at, every)[0] == pytest.approx(cycles * interval, rel=1e-9, abs=1e-6)
    assert c.unsaved(at, every)[0] == pytest.approx(0.0, abs=1e-6)
    work = np.array([cycles * interval])
    expected = work[0] + max(cycles - 1, 0) * write
    assert c.time_for(work, every)[0] == pytest.approx(expected, rel=1e-9, abs=1e-6)


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

    run = run_cluster(
        jobs, Cluster(8, rounds=100), smallest_first, estimate=lambda known: 2 * known.times.point
    )
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
    with pytest.raises(ValueError, match="unknown policy 'LIFO'; one of FCFS, EASY, SJF, SRTF"):
        run_cluster(jobs, Cluster(8), "LIFO")
    with pytest.raises(ValueError, match="cv must lie between 0 and"):
        run_cluster(jobs, Cluster(8), "FCFS", cv=-1.0)
    with pytest.raises(ValueError, match="in order of submission"):
        run_cluster(jobs.isel(job=slice(None, None, -1)), Cluster(8), "FCFS")
    with pytest.raises(ValueError, match=r"estimates: .* NaN"):
        run_cluster(jobs, Cluster(8), "FCFS", estimate=lambda k: k.times.point * np.nan)
    with pytest.raises(ValueError, match="gives out"):
        run_cluster(jobs, Cluster(8), lambda q: np.ones(q.gpus.size, bool))
    with pytest.raises(ValueError, match="must be whole and positive"):
        Cluster(0)
    with pytest.raises(JobsError, match="no such file"):
        read_jobs(tmp_path / "none.csv")
    (tmp_path / "jobs.yaml").write_text("kind: jobs\n")
    with pytest.raises(SpecError, match="kind"):
        read_jobs(tmp_path / "jobs.yaml")


EVERY = [(p, o) for p in POLICIES for o in OVERRUNS]


@pytest.mark.parametrize(("policy", "overrun"), EVERY)
def test_no_spread_and_no_plan_make_estimates_equal_exactly(policy, overrun):
    """cv 0: every estimator plans the same. A policy that does not plan: whatever the cv."""
    plans = getattr(POLICIES[policy], "plans", True)
    found = compare_estimates(
        random_log(5), Cluster(8, rounds=400), policies=[policy], overruns=[overrun], cv=0.0 if plans else 0.3,
        estimates=["point", "p95", "oracle"], seeds=[0, 1], drain=True,
    )  # fmt: skip
    first = found["jct"].sel(scenario="point")
    for other in ("p95", "oracle"):
        np.testing.assert_array_equal(first, found["jct"].sel(scenario=other))


def test_one_common_cv_makes_p95_a_flat_factor_exactly():
    found = compare_estimates(
        random_log(6), Cluster(8, rounds=400), policies=["SRTF", "EASY", "Arena*"], overruns=["killable", "requeue"],
        estimates=["p95", "flat"], seeds=range(3),
    )  # fmt: skip
    np.testing.assert_allclose(found["jct"].sel(scenario="p95"), found["jct"].sel(scenario="flat"), rtol=1e-9)  # fmt: skip


def test_mm1_by_events_against_theory():
    """No rounds: mean time in system is 1 / (mu - lambda), with nothing to correct for."""
    rng = np.random.default_rng(11)
    n, rho = 6_000, 0.7
    jobs = log(np.cumsum(rng.exponential(1000.0 / rho, n)), np.ones(n), rng.exponential(1000.0, n))
    cluster = Cluster(1, rounds=10**6, round_s=100.0, events=True)
    run = run_cluster(jobs, cluster, "FCFS", cv=0.0, checkpoint=FREE, drain=True)
    jct = run.jct.values[500:]
    blocks = jct[: jct.size // 20 * 20].reshape(20, -1).mean(axis=1)
    expected = 1000.0 / (1 - rho)
    assert abs(jct.mean() - expected) < 4 * blocks.std(ddof=1) / np.sqrt(20)
    # the same jobs by Lindley's recursion, exactly
    free, exact = 0.0, []
    for submit, service in zip(jobs.submit.values, jobs.estimate.values, strict=True):
        free = max(free, submit) + service
        exact.append(free - submit)
    np.testing.assert_allclose(run.jct, exact, rtol=1e-6, atol=1e-3)


def test_fewer_seconds_a_round_come_to_event_time():
    jobs = random_log(6, n=40, gpus=(1, 2))
    given = {"cv": 0.2, "checkpoint": Checkpoint(600.0, 10.0, 60.0), "overrun": "requeue"}
    exact = run_cluster(jobs, Cluster(4, rounds=10**6, round_s=1.0, events=True), "SRTF", drain=True, **given)  # fmt: skip
    errors = []
    for round_s in (300.0, 30.0, 3.0):
        cluster = Cluster(4, rounds=int(300_000 / round_s), round_s=round_s)
        run = run_cluster(jobs, cluster, "SRTF", drain=True, **given)
        errors.append(abs(float(run.jct.mean()) / float(exact.jct.mean()) - 1))
    assert errors[2] < errors[1] < errors[0] and errors[2] < 0.01


def scripted(plan):
    """A policy that gives one job so many GPUs, round by round."""
    rounds = iter(plan)

    def policy(queue):
        return np.array([next(rounds, plan[-1])])

    policy.plans = False
    return policy


def test_scaling_up_does_not_rewrite_history():
    """Arena's first bug: 10 rounds at 10 s an iteration, then one at 5 s, leave 640 of 1000 iterations, not 340."""
    jobs = log([0.0], [2], [10_000.0])
    twice = Speed((1.0, 2.0), (1.0, 2.0))
    run = run_cluster(
        jobs,
        Cluster(8, rounds=100),
        scripted([2] * 10 + [4] * 90),
        cv=0.0,
        checkpoint=FREE,
        speed=twice,
    )
    assert float(run.finish[0]) == pytest.approx(3300 + 640 * 5)
    found = ledger(run)
    assert found["useful"] == pytest.approx(2 * 3000 + 4 * (300 + 640 * 5))


def test_a_suspended_job_is_credited_once():
    """Arena's second bug: 11 rounds of work with a suspension between leave 670 of 1000 iterations of 10 s."""
    jobs = log([0.0], [2], [10_000.0])
    run = run_cluster(
        jobs, Cluster(8, rounds=100), scripted([2] * 10 + [0, 2]), cv=0.0, checkpoint=FREE
    )
    assert float(run.finish[0]) == pytest.approx(300 + 10_000)
    assert int(run.preemptions[0]) == 1 and ledger(run)["useful"] == pytest.approx(20_000)


def test_restart_from_scratch_halves_what_is_left_against_theory():
    """Half the jobs outlive their point estimate and lose all of it: goodput 1 / (1 + 0.5); with p95 one in twenty does."""
    jobs = log(np.arange(4000) * 100.0, np.ones(4000), np.full(4000, 1000.0))
    cluster = Cluster(64, rounds=10**5, round_s=10.0, events=True)
    never = Checkpoint(np.inf, 0.0, 0.0)
    goodput = {}
    for estimate in ("point", "p95"):
        run = run_cluster(jobs, cluster, "SJF", estimate=estimate, cv=0.2, overrun=Overrun("restart", 2.0), checkpoint=never, drain=True)  # fmt: skip
        found = ledger(run)
        goodput[estimate] = found["useful"] / (found["useful"] + found["lost"])
    assert goodput["point"] == pytest.approx(1 / 1.5, abs=0.02)
    assert goodput["p95"] == pytest.approx(1 / (1 + 0.05 * 1.329), abs=0.01)


def test_overruns_are_of_the_rule_that_was_asked_for():
    """One job that takes twice its estimate, one that waits: what happens to the first at its limit."""
    jobs = log([0.0, 400.0], [1, 1], [1000.0, 5000.0])
    cluster = Cluster(1, rounds=200, round_s=100.0)
    costs = Checkpoint(interval_s=300.0, write_s=0.0, restart_s=0.0)

    def ends(rule: str):
        # jobs of 2000 and 5000 s, planned as 1000 and 5000
        run = run_cluster(
            jobs.assign(estimate=jobs["estimate"] * [2.0, 1.0]), cluster, "SRTF", cv=0.0,
            estimate=lambda k: np.array([1000.0, 5000.0]), overrun=Overrun(rule, 1.5), checkpoint=costs,
        )  # fmt: skip
        return run.finish.values.tolist(), int(run.kills.sum()), ledger(run)["lost"]

    assert ends("clamp") == ([2000.0, 7000.0], 0, 0.0)
    # it yields to the job that waits, and loses nothing
    assert ends("demote") == ([7000.0, 6000.0], 0, 0.0)
    # with its limit extended it is still the shorter one: nobody needs its GPUs more
    assert ends("killable") == ([2000.0, 7000.0], 0, 0.0)
    # here nobody asks whether somebody waits; and then it is the shorter one by plan again
    assert ends("requeue") == ([2100.0, 7100.0], 2, 100.0)
    # 1000 and 1500 s are lost; the third limit is enough
    assert ends("restart") == ([4500.0, 9500.0], 2, 2500.0)
    # one cv of 0: what is left of a job beyond its plan is taken to be nothing
    assert ends("reestimate") == ([2000.0, 7000.0], 0, 0.0)


def test_a_killable_job_yields_to_what_goes_before_it_and_stays_away():
    """At 800 s, late, it is planned with 1400 s more; the job that waits needs 450 and is done undisturbed."""
    jobs = log([0.0, 400.0], [1, 1], [2000.0, 450.0])
    costs = Checkpoint(interval_s=300.0, write_s=0.0, restart_s=100.0)
    planned = {"estimate": lambda k: np.array([700.0, 450.0]), "overrun": Overrun("killable", 3.0)}
    run = run_cluster(
        jobs, Cluster(1, rounds=400, round_s=100.0), "SRTF", cv=0.0, checkpoint=costs, **planned
    )
    assert int(run.kills[0]) == 1 and float(run.finish[1]) == 1350.0
    # 600 of 700 s were saved
    assert ledger(run)["lost"] == 100.0 and float(run.finish[0]) == 1400.0 + 100 + 1400
    events = run_cluster(
        jobs,
        Cluster(1, rounds=400, round_s=100.0, events=True),
        "SRTF",
        cv=0.0,
        checkpoint=costs,
        **planned,
    )
    assert events.finish.values.tolist() == [2850.0, 1350.0] and int(events.kills[0]) == 1


@pytest.mark.parametrize("rule", list(OVERRUNS))
def test_every_rule_comes_to_event_time(rule):
    jobs = random_log(6, n=40, gpus=(1, 2))
    given = {"cv": 0.2, "checkpoint": Checkpoint(600.0, 10.0, 60.0), "overrun": rule, "drain": True}
    exact = run_cluster(jobs, Cluster(4, rounds=10**4, round_s=100.0, events=True), "SRTF", **given)
    fine = run_cluster(jobs, Cluster(4, rounds=10**5, round_s=3.0), "SRTF", **given)
    assert float(fine.jct.mean()) == pytest.approx(float(exact.jct.mean()), rel=0.02)


@pytest.mark.parametrize("policy", ["LAS", "fair", "Tiresias", "Arena*"])
def test_policies_that_take_turns_do_so_in_event_time_too(policy):
    jobs = log([0.0, 300.0], [8, 8], [90_000.0, 900.0])
    rounds, events = (
        float(run_cluster(jobs, Cluster(8, rounds=600, events=e), policy, checkpoint=FREE, cv=0.0).jct[1]) for e in (False, True)
    )  # fmt: skip
    assert events == pytest.approx(rounds, abs=600)


def test_late_jobs_leave_a_reservation_alone_and_make_room():
    """Under EASY a late job does not end at a known time, and is stopped for the one that waits."""
    jobs = log([0.0, 10.0, 1100.0], [3, 4, 1], [1500.0, 500.0, 20_000.0])
    for rule in ("killable", "demote"):
        run = run_cluster(jobs, Cluster(4, rounds=500, round_s=100.0), "EASY", cv=0.0, checkpoint=FREE, overrun=rule, estimate=lambda k: np.array([1000.0, 500.0, 20_000.0]))  # fmt: skip
        assert float(run.delay[1]) == 990.0, rule
        assert int(run.kills.sum()) == (rule == "killable")


def test_several_failures_a_round_are_charged():
    n, rate = 200, 3.0
    jobs = log(np.zeros(n), np.full(n, 64), np.full(n, 200_000.0))
    costs = Checkpoint(60.0, 0.0, 0.0, failures_per_node_day=rate)
    found = [
        float(run_cluster(jobs, Cluster(64 * n, rounds=int(900_000 / r), round_s=r), "FCFS", cv=0.0, checkpoint=costs).failures.sum()) for r in (100.0, 3000.0)
    ]  # fmt: skip
    assert found[1] == pytest.approx(found[0], rel=0.02)


def test_backfill_against_a_plain_reading_of_it():
    """Random queues: nobody starts who delays the head by plan, and everybody starts who does not, in order."""
    from prism.cluster.policies import easy

    rng = np.random.default_rng(5)
    for _ in range(300):
        n, capacity = int(rng.integers(3, 9)), 16
        gpus = rng.integers(1, 9, n)
        given = np.zeros(n, int)
        for j in range(n // 2):
            if given.sum() + gpus[j] <= capacity:
                given[j] = gpus[j]
        left = rng.integers(0, 5, n) * 100.0
        queue = Queue(0.0, np.arange(n, dtype=float), gpus, given, left, left, np.zeros(n, bool), np.zeros(n), np.zeros(n), capacity)  # fmt: skip
        run = given > 0
        waiting = [j for j in range(n) if not run[j]]
        while waiting and gpus[run].sum() + gpus[waiting[0]] <= capacity:
            run[waiting.pop(0)] = True
        if waiting:
            head = waiting[0]

            def free_at(t, busy, left=left, gpus=gpus, capacity=capacity):
                return capacity - gpus[busy & (left > t)].sum()

            shadow = min((t for t in sorted(set(left[run])) if free_at(t, run) >= gpus[head]), default=np.inf)  # fmt: skip
            for j in waiting[1:]:
                trial = run.copy()
                trial[j] = True
                if gpus[trial].sum() <= capacity and free_at(shadow, trial) >= gpus[head]:
                    run = trial
        np.testing.assert_array_equal(easy(queue), run)


def test_a_killable_job_runs_on_while_nobody_waits():
    jobs = log([0.0], [1], [1000.0])
    run = run_cluster(jobs, Cluster(1, rounds=100), "SRTF", cv=0.0, estimate=lambda k: k.times.point / 3, overrun="killable", checkpoint=FREE)  # fmt: skip
    assert float(run.finish[0]) == 1000.0 and int(run.kills[0]) == 0


def test_failures_come_at_their_rate_and_cost_what_they_cost_against_theory():
    """Jobs of four nodes: failures per node and time, and the share of the time that is of use (Kokolis et al.)."""
    n, rate = 300, 1.0
    jobs = log(np.zeros(n), np.full(n, 32), np.full(n, 400_000.0))
    costs = Checkpoint(1800.0, 30.0, 300.0, failures_per_node_day=rate)
    run = run_cluster(jobs, Cluster(32 * n, rounds=2500), "FCFS", cv=0.0, checkpoint=costs)
    seconds = float(np.nansum(run.finish))
    expected = 4 * rate / 86_400 * seconds
    assert float(run.failures.sum()) == pytest.approx(expected, abs=4.5 * np.sqrt(expected))
    found = ledger(run)
    useful = found["useful"] / (found["allocated"] - found["tail"])
    lost = 4 * rate / 86_400 * (300 + 1800 / 2)
    assert useful == pytest.approx((1 - lost) / (1 + 30 / 1800), abs=0.004)


def test_young_daly_is_the_best_interval_against_theory():
    n, rate = 400, 1.0
    jobs = log(np.zeros(n), np.full(n, 32), np.full(n, 200_000.0))

    def goodput(interval):
        costs = Checkpoint(interval, 120.0, 300.0, failures_per_node_day=rate)
        found = ledger(
            run_cluster(jobs, Cluster(32 * n, rounds=2000), "FCFS", cv=0.0, checkpoint=costs)
        )
        return found["useful"] / (found["allocated"] - found["tail"])

    best = np.sqrt(2 * 120 * 86_400 / (4 * rate))
    assert Checkpoint("young-daly", 120.0, 300.0, failures_per_node_day=rate).interval(np.array([4.0]))[0] == pytest.approx(best)  # fmt: skip
    at_best = goodput("young-daly")
    assert at_best > goodput(best / 4) + 0.005 and at_best > goodput(best * 4) + 0.005


def test_abrupt_preemption_loses_what_was_not_saved():
    jobs = log([0.0, 600.0], [1, 1], [3000.0, 300.0])
    kept, lost = (
        run_cluster(jobs, Cluster(1, rounds=60), "SRTF", cv=0.0, checkpoint=Checkpoint(450.0, 0.0, 0.0, graceful)) for graceful in (True, False)
    )  # fmt: skip
    assert ledger(kept)["lost"] == 0.0
    # 600 s were done, 450 saved
    assert ledger(lost)["lost"] == pytest.approx(150.0)
    assert float(lost.finish[0]) == pytest.approx(float(kept.finish[0]) + 150)


def test_easy_starts_what_delays_nobody_and_nothing_else():
    """4 GPUs: 3 are busy until 1000 s, the head needs 4. A short one may go ahead, a long one may not."""
    jobs = log([0.0, 1.0, 2.0, 3.0], [3, 4, 1, 1], [1000.0, 500.0, 5000.0, 600.0])
    run = run_cluster(jobs, Cluster(4, rounds=200, round_s=10.0), "EASY", cv=0.0, checkpoint=FREE)
    begin = run.delay.values + jobs.submit.values
    assert begin[3] == 10.0 and begin[1] == 1000.0 and begin[2] >= 1500.0
    fifo = run_cluster(jobs, Cluster(4, rounds=200, round_s=10.0), "FCFS", cv=0.0, checkpoint=FREE)
    assert float(fifo.finish[1]) == float(run.finish[1])


def test_least_attained_service_shares_and_tiresias_protects_the_short():
    jobs = log([0.0, 300.0], [1, 1], [90_000.0, 900.0])
    for policy in ("LAS", "Tiresias", "fair"):
        run = run_cluster(jobs, Cluster(1, rounds=600), policy, cv=0.0, checkpoint=FREE)
        fifo = run_cluster(jobs, Cluster(1, rounds=600), "FCFS", cv=0.0, checkpoint=FREE)
        if policy != "Tiresias":
            assert float(run.jct[1]) < float(fifo.jct[1])
        assert ledger(run)["useful"] == pytest.approx(90_900.0)


def test_arena_shrinks_expands_and_conserves():
    """A long job of 8 is alone: it expands to 16 after it has settled; a job that comes makes it shrink."""
    jobs = log([0.0, 9000.0], [8, 8], [100_000.0, 3000.0])
    run = run_cluster(
        jobs, Cluster(16, rounds=1000), "Arena*", cv=0.0, checkpoint=Checkpoint(np.inf, 0.0, 0.0)
    )
    alone = run_cluster(
        jobs.isel(job=[0]), Cluster(8, rounds=1000), "Arena*", cv=0.0, checkpoint=FREE
    )
    assert float(run.finish[0]) < float(alone.finish[0]) * 0.75
    assert float(run.delay[1]) == 0.0


def test_jobs_wait_for_their_own_type():
    jobs = log([0.0, 0.0, 0.0], [4, 4, 4], [600.0, 600.0, 600.0]).assign_coords(
        gpu_type=("job", ["a", "a", "b"])
    )
    run = run_cluster(
        jobs, Cluster(8, rounds=50, types={"a": 4, "b": 4}), "FCFS", cv=0.0, checkpoint=FREE
    )
    assert run.finish.values.tolist() == [600.0, 1200.0, 600.0]
    with pytest.raises(ValueError, match="no GPU is of type 'b'; the cluster has a"):
        run_cluster(jobs, Cluster(4, types={"a": 4}), "FCFS")
    with pytest.raises(ValueError, match="do not say theirs"):
        run_cluster(random_log(1), Cluster(8, types={"a": 8}), "FCFS")
    with pytest.raises(ValueError, match="types have 4 GPUs, the cluster 8"):
        Cluster(8, types={"a": 4})


def test_locality_slows_what_spans_nodes():
    jobs = log([0.0, 0.0, 0.0], [8, 16, 32], [1000.0] * 3)
    run = run_cluster(jobs, Cluster(64, rounds=10, locality=0.9), "FCFS", cv=0.0, checkpoint=FREE)
    np.testing.assert_allclose(run.finish, 1000 / np.array([1.0, 0.9, 0.81]))


def test_what_is_known_of_a_run_time_against_scipy():
    """Mean of what is left of a Normal, and of a pool."""
    times = RunTimes(np.full(3, 1000.0), np.full(3, 0.2))
    elapsed = np.array([500.0, 1000.0, 1800.0])
    a = elapsed / 1000
    expected = [1000 * stats.truncnorm((x - 1) / 0.2, np.inf, 1, 0.2).mean() for x in a]
    np.testing.assert_allclose(times.beyond(elapsed), expected, rtol=1e-4)
    from prism.model.pools import LogNormal

    pool = LogNormal.from_moments(1.0, 0.3)
    of_pool = RunTimes(np.full(2, 1000.0), np.full(2, 0.3), pool)
    x = 1000 * stats.lognorm(pool.sigma, scale=np.exp(pool.mu)).rvs(400_000, random_state=1)
    got = of_pool.beyond(np.array([800.0, 1500.0]))
    np.testing.assert_allclose(got, [x[x > e].mean() for e in (800.0, 1500.0)], rtol=0.01)
    np.testing.assert_allclose(of_pool.quantile(0.95), 1000 * float(pool.quantile(0.95)))
    with pytest.raises(ValueError, match="needs mean 1"):
        run_times(random_log(1), LogNormal.from_moments(2.0, 0.3))


def test_a_pool_of_steps_is_a_run_time():
    from prism.model.pools import Gamma

    jobs = random_log(2)
    run = run_cluster(jobs, Cluster(16, rounds=2000), "SRTF", cv=Gamma(25.0, 0.04), estimate="p95")
    relative = run.run_time.values / jobs.estimate.values
    assert relative.std() == pytest.approx(0.2, abs=0.06)


def test_jobs_may_have_a_cv_each(prism_data):
    jobs = with_cv(random_log(3, n=4000), [0.05, 0.4], seed=1)
    assert set(np.unique(jobs["cv"])) == {0.05, 0.4}
    times = run_times(jobs, 0.2)
    np.testing.assert_allclose(
        times.quantile(0.95) / times.point, 1 + 1.6448536 * jobs["cv"], rtol=1e-6
    )
    of_pai = with_cv(jobs, prism_data / "workloads/pai_minibatch_cov_by_job.csv")
    assert 0.05 < float(of_pai["cv"].median()) < 0.15
    with pytest.raises(ValueError, match="must be numbers that are not negative"):
        with_cv(jobs, [-1.0])


def test_estimators_plan_with_what_they_say():
    jobs = random_log(4)
    times = run_times(jobs, 0.2)
    from prism.cluster import Known

    known = Known(times, times.drawn(0))
    np.testing.assert_allclose(ESTIMATES["p95"](known), ESTIMATES["flat"](known))
    np.testing.assert_allclose(Flat(2.0)(known), 2 * times.point)
    assert (ESTIMATES["p75"](known) < ESTIMATES["p99"](known)).all()
    for bad in (
        lambda: Quantile(1.0),
        lambda: Flat(0.0),
        lambda: Overrun("shrug"),
        lambda: Overrun("requeue", 1.0),
    ):
        with pytest.raises(ValueError, match=r"quantile|factor|overrun rule|growth"):
            bad()


def test_workers_give_the_same_table(tmp_path):
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    given = {"policies": ["SRTF"], "estimates": ["point", "p95"], "seeds": [0, 1]}
    here = compare_estimates(random_log(7), Cluster(8, rounds=200), **given)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        there = compare_estimates(random_log(7), Cluster(8, rounds=200), executor=pool, **given)
    assert here.identical(there)


def test_the_papers_experiment_on_real_arrivals(prism_data):
    """Philly three times as dense, 27,000 jobs, load 0.92: what an independent simulator found on it (5 seeds there, 2 here)."""
    philly = read_jobs(prism_data / "workloads/philly.csv")
    assert philly.sizes["job"] == 82_247
    jobs = select_jobs(philly, start=20 * 86_400, compress=3, least=60, most_gpu_seconds=3.6e6)
    cluster = Cluster(1280)
    jobs = jobs.isel(job=np.flatnonzero(jobs["submit"].values < cluster.horizon))
    assert jobs.sizes["job"] == pytest.approx(26_980, rel=0.003)
    assert offered_load(jobs, cluster) == pytest.approx(0.92, abs=0.005)
    found = compare_estimates(
        jobs, cluster, policies=["FCFS", "SRTF"], overruns=["clamp", "demote", Overrun("requeue", 1.1)],
        checkpoint=Checkpoint(4 * 3600.0), seeds=range(2),
    )  # fmt: skip
    ratio = ratios(found)["ratio"].sel(quantile=1.0)
    assert (ratio.sel(policy="FCFS") == 1.0).all()
    srtf_row = ratio.sel(policy="SRTF")
    assert float(srtf_row.sel(overrun="clamp")) == pytest.approx(0.99, abs=0.015)
    assert float(srtf_row.sel(overrun="requeue x1.1")) == pytest.approx(0.77, abs=0.03)
    assert 0.3 < float(srtf_row.sel(overrun="demote")) < 0.75


def test_published_forms_are_the_tidy_ones(prism_data):
    """Units and names differ; jobs do not."""
    folder = prism_data / "workloads"
    for raw, tidy in (
        ("sia_philly", "philly"), ("muri_philly_trace1", "philly_muri_trace1"), ("muri_philly_trace4", "philly_muri_trace4"),
        ("elasticflow_philly_103959", "philly_vc103959"), ("arena_simulate_trace_row", "elasticflow_cluster_row"),
    ):  # fmt: skip
        a, b = read_jobs(folder / f"raw/{raw}.csv"), read_jobs(folder / f"{tidy}.csv")
        assert a.sizes["job"] == b.sizes["job"], raw
        np.testing.assert_allclose(np.sort(a["submit"]), np.sort(b["submit"]), atol=1.0)
        assert float((a["estimate"] * a["gpus"]).sum()) == pytest.approx(float((b["estimate"] * b["gpus"]).sum()), rel=1e-9)  # fmt: skip
    assert read_jobs(folder / "raw/tiresias_60_job.csv").sizes["job"] == 60
    blox = read_jobs(folder / "raw/blox_pal_workload-1-noheader.csv")
    assert (int(blox["gpus"][0]), float(blox["estimate"][0])) == (6, 854.0)
    with pytest.raises(JobsError, match="says iterations and no durations"):
        read_jobs(folder / "raw/arena_simulate_trace_philly.csv")
    types = read_jobs(folder / "arena_philly.csv")["gpu_type"].values
    assert set(types) == {"a100", "v100", "a40", "a10"}


def test_logs_that_are_not_here_by_their_description(tmp_path):
    """Philly's own JSON, Helios' table and PAI's tasks, as their owners describe them."""
    (tmp_path / "philly.json").write_text(
        json.dumps([
            {"jobid": "a", "status": "Pass", "submitted_time": "2017-10-09 07:01:00", "attempts": [
                {"start_time": "2017-10-09 07:02:00", "end_time": "2017-10-09 07:12:00", "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}]},
                {"start_time": "2017-10-09 07:20:00", "end_time": "2017-10-09 07:25:00", "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}, {"ip": "m2", "gpus": ["gpu0"]}]}]},
            {"jobid": "b", "status": "Killed", "submitted_time": "2017-10-09 07:00:00", "attempts": []},
        ])
    )  # fmt: skip
    ds = read_jobs(tmp_path / "philly.json")
    assert (
        ds["job"].values.tolist() == ["a"]
        and int(ds["gpus"][0]) == 3
        and float(ds["estimate"][0]) == 900.0
    )
    assert '"without_gpus_or_run": 1' in ds.attrs["provenance"]
    (tmp_path / "helios.csv").write_text(
        "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue\n"
        "1,u,v,8,64,1,COMPLETED,2020-04-01 00:00:10,2020-04-01 00:01:00,2020-04-01 01:01:00,3600,50\n"
        "2,u,v,0,4,1,COMPLETED,2020-04-01 00:00:00,2020-04-01 00:01:00,2020-04-01 01:01:00,3600,50\n"
    )
    ds = read_jobs(tmp_path / "helios.csv")
    assert ds.sizes["job"] == 1 and int(ds["gpus"][0]) == 8
    (tmp_path / "pai.csv").write_text(
        "j1,ps,1,Terminated,100,700,600,29,,MISC\nj1,worker,4,Terminated,110,700,600,29,50,T4\nj2,worker,1,Failed,50,,600,29,100,T4\n"
    )
    ds = read_jobs(tmp_path / "pai.csv")
    assert (
        ds["job"].values.tolist() == ["j1"]
        and int(ds["gpus"][0]) == 4
        and float(ds["estimate"][0]) == 600.0
    )
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(JobsError, match=r"holds no jobs|not a job log"):
        read_jobs(tmp_path / "broken.json")


def test_parts_of_a_log():
    jobs = random_log(9)
    half = select_jobs(jobs, compress=2.0)
    np.testing.assert_allclose(half["submit"], (jobs["submit"] - jobs["submit"][0]) / 2)
    assert select_jobs(jobs, least=float(jobs["estimate"].median())).sizes["job"] <= 31
    with pytest.raises(ValueError, match="no job of the log is left"):
        select_jobs(jobs, start=1e12)
    with pytest.raises(ValueError, match="compress must be positive"):
        select_jobs(jobs, compress=0.0)


def test_a_policy_that_never_settles_is_stopped():
    """Every round somebody else's turn, and a restart takes longer than a round: nobody gets on."""
    turns = iter(range(10**9))

    def restless(queue):
        return np.arange(queue.gpus.size) == next(turns) % queue.gpus.size

    with pytest.raises(ValueError, match="does not end"):
        run_cluster(log([0.0, 0.0], [1, 1], [1e4, 1e4]), Cluster(1, rounds=20), restless, checkpoint=Checkpoint(restart_s=1000.0), drain=True)  # fmt: skip
    with pytest.raises(ValueError, match=r"gives GPUs to nobody|does not end"):
        run_cluster(random_log(1), Cluster(8, events=True), lambda q: np.zeros(q.gpus.size, bool), drain=True)  # fmt: skip


def test_policies_of_old_still_work_beside_the_new():
    """Functions that are handed over, not named, and their attribute that says whether they plan."""
    jobs = random_log(2)
    for by_name, itself in (("FCFS", fcfs), ("SRTF", srtf)):
        a, b = (
            run_cluster(jobs, Cluster(8, rounds=300), p, overrun="requeue")
            for p in (by_name, itself)
        )
        np.testing.assert_array_equal(a["jct"], b["jct"])


@pytest.mark.parametrize("name", ["prints", "json", "files"])
def test_the_command_line_schedules(tmp_path, capsys, root, name):
    from prism.cli import main

    base = ["schedule", str(root / "inputs/reference_jobs.yaml"), "--gpus", "32", "--rounds", "200", "--seeds", "2", "--policy", "SRTF"]  # fmt: skip
    if name == "prints":
        assert main.main(base) == 0
        said = capsys.readouterr().out
        assert "synthetic" in said and "offered load" in said and "p95" in said
        assert main.main([*base, "--interval", "often"]) == 2
        assert "needs seconds, or young-daly" in capsys.readouterr().err
        assert main.main([*base, "--estimate", "guess"]) == 2
        assert "unknown estimate 'guess'" in capsys.readouterr().err
    elif name == "json":
        assert main.main([*base, "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["rows"]
        assert [r["estimate"] for r in rows] == ["point", "p95"] and len(
            rows[1]["ratio_interval"]
        ) == 2
    else:
        assert (
            main.main([*base, "--out", str(tmp_path / "x.nc"), "--latex", str(tmp_path / "x.tex")])
            == 0
        )
        assert (tmp_path / "x.nc").stat().st_size > 0
        assert "% synthetic job log" in (tmp_path / "x.tex").read_text()
        assert main.main([*base, "--latex", "x.pdf"]) == 2
