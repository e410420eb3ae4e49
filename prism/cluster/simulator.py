"""One run of a policy on a job log: progress integrated step by step, and a ledger of GPU-seconds that must sum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

import numpy as np
import xarray as xr

from prism.base import schema
from prism.cluster.machine import DAY, FAILURES, Checkpoint, Cluster, Speed
from prism.cluster.overrun import Overrun
from prism.cluster.policies import POLICIES, Policy, Queue
from prism.cluster.runtimes import ESTIMATES, Estimate, Known, RunTimes, run_times
from prism.model.pools import DurationPool

LEDGER = ("useful", "stall", "restart", "lost", "tail")
#: a step by events is at least this long, s: times that differ by rounding are one
INSTANT = 1e-6
#: steps by events, as a multiple of jobs, and drained runs, as a multiple of the horizon, beyond which a policy is
#: taken not to settle
MOST_EVENTS, LONGEST_DRAIN = 400, 50


def offered_load(jobs: xr.Dataset, cluster: Cluster) -> float:
    """GPU-seconds asked for by jobs that are submitted in time, over those that the cluster has.

    Above 1 the queue grows for as long as the run lasts.
    """
    asked = (jobs["estimate"] * jobs["gpus"]).values[jobs["submit"].values < cluster.horizon]
    return float(asked.sum() / (cluster.gpus * cluster.horizon))


def run_cluster(
    jobs: xr.Dataset,
    cluster: Cluster,
    policy: Policy | str,
    *,
    estimate: Estimate | str = "point",
    cv: float | DurationPool = 0.2,
    overrun: Overrun | str = "killable",
    checkpoint: Checkpoint | None = None,
    speed: Speed | None = None,
    drain: bool = False,
    seed: int = 0,
) -> xr.Dataset:
    """Run a policy on a job log.

    At every decision the policy gives GPUs to submitted, unfinished jobs. A running job pays what it owes (a checkpoint, a
    restart), then works, at the speed of the GPUs that it has. In rounds, a job that ends within one holds its GPUs to the end of
    it; a job that gets another number of GPUs writes a checkpoint and restarts.

    Parameters
    ----------
    jobs : Dataset of `read_jobs`
        With ``cv(job)`` where jobs have one each (`prism.cluster.with_cv`), and ``gpu_type`` where they need one.
    cluster : Cluster
    policy : str or callable
        A name in `POLICIES`, or a function from `Queue` to GPUs.
    estimate : str or callable
        A name in `ESTIMATES`, or a function from `Known` to run times, seconds.
    cv : float or DurationPool
        Of the real run time around the point estimate, where jobs have none of their own; or the pool of relative run times
        (mean 1).
    overrun : Overrun or str
        What happens to a job that outlives its estimate.
    checkpoint : Checkpoint
    speed : Speed
        For policies that give more or fewer GPUs than a job asked for.
    drain : bool
        Whether to go on after the horizon, without new jobs, until all that were submitted are done.
    seed : int
        Of real run times and failures: the same for every policy and estimator.

    Returns
    -------
    Dataset
        Per `job` ``finish``, ``jct``, ``run_time``, ``delay`` (first start minus submission), seconds, NaN where it has not
        happened; ``preemptions``, ``kills``, ``failures``. ``gpu_seconds(scenario)``: ``allocated``, counted by itself, and its
        parts ``useful, stall, restart, lost, tail``.

    Raises
    ------
    ValueError
        Unknown names, a job larger than the cluster or of a type that it lacks, a policy that gives out more than there is,
        or a run by events that does not end.
    """
    policy = named(policy, POLICIES, "policy")
    estimate = named(estimate, ESTIMATES, "estimate")
    overrun = Overrun(overrun) if isinstance(overrun, str) else overrun
    _check_fit(jobs, cluster)
    times = run_times(jobs, cv)
    real = times.drawn(seed)
    planned = schema.finite_durations(estimate(Known(times, real)), "estimates")
    if planned.shape != real.shape or np.any(np.diff(jobs["submit"].values) < 0):
        raise ValueError("needs one estimate a job, and jobs in order of submission")
    state = _Run(jobs, cluster, checkpoint or Checkpoint(), speed or Speed(), times, real, planned)
    state.simulate(policy, overrun, drain, seed)
    return state.result(
        seed, {"overrun": asdict(overrun), "gpus": cluster.gpus, "rounds": cluster.rounds}
    )


def _check_fit(jobs: xr.Dataset, cluster: Cluster) -> None:
    gpus = jobs["gpus"].values
    room = np.full(gpus.size, cluster.gpus)
    if cluster.types:
        if "gpu_type" not in jobs.coords:
            raise ValueError(
                "the cluster has types of GPUs, and the jobs do not say theirs (column gpu_type)"
            )
        of = jobs["gpu_type"].values.astype(str)
        unknown = sorted(set(of.tolist()) - set(cluster.types))
        if unknown:
            raise ValueError(
                f"no GPU is of type {unknown[0]!r}; the cluster has {', '.join(cluster.types)}"
            )
        room = np.array([cluster.types[t] for t in of])
    large = np.flatnonzero(gpus > room)
    if large.size:
        first = large[0]
        raise ValueError(
            f"{large.size} jobs need more than the cluster's {room[first]} GPUs "
            f"(first: {jobs['job'].values[first]} with {int(gpus[first])})"
        )


class _Run:
    """State of one run."""

    def __init__(
        self, jobs, cluster: Cluster, checkpoint: Checkpoint, speed: Speed, times: RunTimes, run_time, planned
    ) -> None:  # fmt: skip
        self.jobs, self.cluster, self.checkpoint, self.speed = jobs, cluster, checkpoint, speed
        self.submit, self.gpus = jobs["submit"].values, jobs["gpus"].values.astype(np.int64)
        self.times, self.run_time, self.limit = times, run_time, planned.copy()
        n = self.submit.size
        # seconds at full speed that are done; seconds since the checkpoint cycle began; what is owed
        self.work, self.cycle = np.zeros(n), np.zeros(n)
        self.owed_stall, self.owed_restart = np.zeros(n), np.zeros(n)
        self.given, self.rate = np.zeros(n, np.int64), np.ones(n)
        self.held, self.attained, self.useful = np.zeros(n), np.zeros(n), np.zeros(n)
        self.interval = checkpoint.interval(cluster.nodes(self.gpus))
        self.finish, self.begin = np.full(n, np.nan), np.full(n, np.nan)
        self.counts = {k: np.zeros(n, np.int64) for k in ("preemptions", "kills", "failures")}
        self.ledger = dict.fromkeys(("allocated", *LEDGER), 0.0)
        self.groups = self._types()
        self.open = np.zeros(0, np.int64)
        self.seen = 0

    def _types(self) -> list[tuple[np.ndarray | None, int]]:
        """Masks of jobs that compete for the same GPUs, with how many there are."""
        if not self.cluster.types:
            return [(None, self.cluster.gpus)]
        of = self.jobs["gpu_type"].values.astype(str)
        return [(of == name, count) for name, count in self.cluster.types.items()]

    def simulate(self, policy: Policy, overrun: Overrun, drain: bool, seed: int) -> None:
        """All rounds, or events."""
        self._failures(seed)
        rule = overrun if getattr(policy, "plans", True) else None
        now, end = 0.0, self.cluster.horizon
        last = int(np.searchsorted(self.submit, end, side="left"))
        most = MOST_EVENTS * (last + 10)
        while now < end - INSTANT or (drain and (self.seen < last or self.open.size)):
            self._admit(now, last)
            if self.seen == last and self.open.size == 0:
                break
            self._decide(now, policy, rule)
            dt = self.cluster.round_s
            if self.cluster.events:
                dt = self._next_event(now, last, end, drain, rule)
                timed = getattr(policy, "timed", False)
                if (
                    timed or (rule is not None and rule.rule == "reestimate")
                ) and dt > self.cluster.round_s:
                    dt = self.cluster.round_s
                else:
                    most -= 1
            if most < 0 or now > LONGEST_DRAIN * end:
                raise ValueError(
                    f"the run does not end: {self.open.size} jobs are left at {now:.3g} s. Either the load is far over 1, or the policy changes its mind too often for jobs to get on"
                )
            self._advance(now, dt)
            now += dt

    def _admit(self, now: float, last: int) -> None:
        arrived = min(int(np.searchsorted(self.submit, now + INSTANT, side="right")), last)
        if arrived > self.seen:
            self.open = np.concatenate([self.open, np.arange(self.seen, arrived)])
            self.seen = arrived

    def _decide(self, now: float, policy: Policy, rule: Overrun | None) -> None:
        if self.open.size == 0:
            return
        over = self.open[self.work[self.open] >= self.limit[self.open] * (1 - 1e-12)]
        if rule is not None and rule.rule in ("requeue", "restart"):
            self._stopped_at_limit(over[self.given[over] > 0], rule)
            over = over[:0]
        for mask, capacity in self.groups:
            j = self.open if mask is None else self.open[mask[self.open]]
            if j.size:
                self._give(now, policy, rule, j, over, capacity)

    def _queue(self, now: float, rule: Overrun | None, j, over, capacity: int) -> Queue:
        late = np.zeros(j.size, bool)
        if over.size and rule is not None:
            late = np.isin(j, over)
        remaining = self._remaining(j, late, rule)
        late &= rule is not None and rule.rule in ("killable", "demote")
        running = self.given[j] > 0
        c, interval = self.checkpoint, self.interval[j]
        known = np.isfinite(remaining)
        need = np.where(known, remaining, 0.0) / np.where(running, self.rate[j], 1.0)
        so_far = c.worked(self.cycle[j], interval)
        ahead = c.time_for(so_far + need, interval) - self.cycle[j]
        owed = np.where(running, self.owed_stall[j] + self.owed_restart[j], self.owed_stall[j] + c.restart_s)  # fmt: skip
        return Queue(
            now, self.submit[j], self.gpus[j], self.given[j], remaining, np.where(known, owed + ahead, np.inf), late, self.attained[j], self.held[j],
            capacity,
        )  # fmt: skip

    def _give(self, now, policy: Policy, rule: Overrun | None, j, over, capacity: int) -> None:
        queue = self._queue(now, rule, j, over, capacity)
        new = self._answer(policy(queue), queue)
        changed = new != queue.given
        if not changed.any():
            return
        held, ended = changed & (queue.given > 0), new == 0
        killed = np.zeros(j.size, bool)
        if rule is not None and rule.rule == "killable":
            killed = held & ended & queue.late
        if (held & ~killed).any():
            self._stop(j[held & ~killed])
        if killed.any():
            self._kill(j[killed], rule)
        self.counts["preemptions"][j[held & ended]] += 1
        begun = j[changed & ~ended]
        self.owed_restart[begun] = self.checkpoint.restart_s
        self.begin[begun] = np.where(np.isnan(self.begin[begun]), now, self.begin[begun])
        self.given[j] = new
        self.held[j[changed]] = 0.0
        at = self.given[begun]
        self.rate[begun] = self.speed(at / self.gpus[begun]) * self.cluster.compactness(at)

    @staticmethod
    def _answer(answer, queue: Queue) -> np.ndarray:
        """GPUs of each job, whole and no more than there are."""
        answer = np.asarray(answer)
        if answer.shape != queue.gpus.shape or answer.dtype.kind not in "biu":
            raise ValueError(
                f"a policy returns a bool or whole number for each of {queue.gpus.size} jobs, got {answer.dtype} of shape {answer.shape}"
            )
        new = np.where(answer, queue.gpus, 0) if answer.dtype == bool else answer.astype(np.int64)
        if (new < 0).any() or new.sum() > queue.capacity:
            raise ValueError(f"the policy gives out {int(new.sum())} of {queue.capacity} GPUs")
        return new

    def _remaining(self, j, late: np.ndarray, rule: Overrun | None) -> np.ndarray:
        """Planned work that is left; of those that are late, what the rule says."""
        left = np.maximum(self.limit[j] - self.work[j], 0.0)
        if not late.any() or rule is None or rule.rule == "clamp":
            return left
        at = j[late]
        if rule.rule == "reestimate":
            left[late] = self.times.beyond(self.work)[at] - self.work[at]
        elif rule.rule == "killable":
            # the limit that it would get, often enough extended to lie ahead
            times = np.ceil(np.log(self.work[at] / self.limit[at]) / np.log(rule.growth) + 1e-9)
            left[late] = self.limit[at] * rule.growth ** np.maximum(times, 1) - self.work[at]
        else:
            left[late] = np.inf
        return left

    def _stop(self, j: np.ndarray) -> None:
        """Take GPUs away, or give another number of them."""
        if not self.checkpoint.graceful:
            self._roll_back(j)
            return
        dirty = self.checkpoint.unsaved(self.cycle[j], self.interval[j]) > 0
        self.owed_stall[j[dirty]] = self.checkpoint.write_s
        self.cycle[j] = 0.0  # it resumes from a fresh checkpoint

    def _roll_back(self, j: np.ndarray) -> None:
        """To the last checkpoint."""
        wall = self.checkpoint.unsaved(self.cycle[j], self.interval[j])
        lost = np.minimum(wall * self.given[j], self.useful[j])
        self.work[j] = np.maximum(self.work[j] - wall * self.rate[j], 0.0)
        self._lose(j, lost)

    def _lose(self, j: np.ndarray, lost: np.ndarray) -> None:
        self.useful[j] -= lost
        self.ledger["useful"] -= float(lost.sum())
        self.ledger["lost"] += float(lost.sum())
        self.cycle[j] = 0.0
        self.owed_stall[j] = 0.0

    def _kill(self, j: np.ndarray, rule: Overrun) -> None:
        if rule.rule == "restart":
            self.work[j] = 0.0
            self._lose(j, self.useful[j].copy())
        else:
            self._roll_back(j)
        # also where it had gone far beyond it
        self.limit[j] = np.maximum(self.limit[j], self.work[j]) * rule.growth
        self.counts["kills"][j] += 1

    def _stopped_at_limit(self, over: np.ndarray, rule: Overrun) -> None:
        self._kill(over, rule)
        self.given[over] = 0
        self.held[over] = 0.0

    def _failures(self, seed: int) -> None:
        """Node-seconds that each job has until its next failure."""
        rate = self.checkpoint.failures_per_node_day / DAY
        n = self.submit.size
        self.fragile = rate > 0
        if self.fragile:
            rng = np.random.default_rng([seed, 1])
            self.budgets = rng.exponential(1 / rate, (n, FAILURES))
            self.budget = self.budgets[:, 0].copy()

    def _advance(self, now: float, dt: float) -> None:
        """Let running jobs use a step of their GPUs."""
        if self.open.size == 0:
            return
        j = self.open[self.given[self.open] > 0]
        if j.size == 0:
            return
        self.ledger["allocated"] += float(self.given[j].sum() * dt)
        done = self._work_and_fail(j, now, dt)
        self.held[j] += dt
        ended = j[done]
        if ended.size:
            self.ledger["tail"] += float(
                ((now + dt - self.finish[ended]) * self.given[ended]).sum()
            )
            self.given[ended] = 0
            self.open = self.open[np.isnan(self.finish[self.open])]

    def _work_and_fail(self, j: np.ndarray, now: float, dt: float) -> np.ndarray:
        """Let jobs use `dt` seconds, back to their last checkpoints as often as a node fails. Returns which ended."""
        done, at, left = np.zeros(j.size, bool), np.full(j.size, now), np.full(j.size, dt)
        if not self.fragile:
            return self._work(j, left, now)
        nodes = self.cluster.nodes(self.given[j])
        still = np.arange(j.size)
        while still.size:
            k = j[still]
            until = np.minimum(self.budget[k] / nodes[still], left[still])
            fails = until < left[still]
            self.budget[k] -= nodes[still] * until
            done[still] = self._work(k, until, at[still])
            at[still] += until
            left[still] -= until
            still = still[fails & ~done[still]]
            if still.size:
                self._fail(j[still])
        return done

    def _fail(self, j: np.ndarray) -> None:
        self._roll_back(j)
        self.owed_restart[j] = self.checkpoint.restart_s
        self.counts["failures"][j] += 1
        self.budget[j] = self.budgets[j, self.counts["failures"][j] % FAILURES]

    def _work(self, j: np.ndarray, left: np.ndarray, now) -> np.ndarray:
        """Let jobs use `left` seconds from `now`. Returns which of them ended."""
        began, gpus = left, self.given[j]
        for name, owed in (("stall", self.owed_stall), ("restart", self.owed_restart)):
            paid = np.minimum(owed[j], left)
            owed[j] -= paid
            left = left - paid
            self.ledger[name] += float((paid * gpus).sum())
        c, before, interval = self.checkpoint, self.cycle[j], self.interval[j]
        so_far = c.worked(before, interval)
        need = (self.run_time[j] - self.work[j]) / self.rate[j]
        ahead = c.time_for(so_far + need, interval) - before
        used = np.minimum(ahead, left)
        ends = ahead <= left + INSTANT * self.cluster.events
        wall = np.where(ends, need, c.worked(before + used, interval) - so_far)
        self.work[j] = np.where(ends, self.run_time[j], self.work[j] + wall * self.rate[j])
        self.cycle[j] += used
        self.ledger["useful"] += float((wall * gpus).sum())
        self.ledger["stall"] += float(((used - wall) * gpus).sum())
        self.useful[j] += wall * gpus
        self.attained[j] += (began - left + used) * gpus
        self.finish[j[ends]] = (now + began - left + used)[ends]
        return ends

    def _next_event(
        self, now: float, last: int, end: float, drain: bool, rule: Overrun | None
    ) -> float:
        """Seconds until an arrival, an end, a failure or a planned end."""
        soonest = [np.inf if drain else end - now]
        if self.seen < last:
            soonest.append(self.submit[self.seen] - now)
        j = self.open[self.given[self.open] > 0]
        if j.size:
            c, owed = self.checkpoint, self.owed_stall[j] + self.owed_restart[j]
            so_far = c.worked(self.cycle[j], self.interval[j])

            def until(target: np.ndarray) -> np.ndarray:
                need = (target - self.work[j]) / self.rate[j]
                return (
                    owed
                    + c.time_for(so_far + np.maximum(need, 0), self.interval[j])
                    - self.cycle[j]
                )

            soonest.append(until(self.run_time[j]).min())
            if rule is not None:
                ahead = self.limit[j] > self.work[j] * (1 + 1e-12)
                if ahead.any():
                    soonest.append(until(self.limit[j])[ahead].min())
            if self.fragile:
                soonest.append((self.budget[j] / self.cluster.nodes(self.given[j])).min() + INSTANT)
        dt = float(min(soonest))
        if not np.isfinite(dt):
            raise ValueError("jobs wait and none runs: the policy gives GPUs to nobody")
        return max(dt, INSTANT)

    def result(self, seed: int, provenance: dict) -> xr.Dataset:
        counts = {k: ("job", v) for k, v in self.counts.items()}
        return schema.dataset(
            {
                "finish": ("job", self.finish),
                "jct": ("job", self.finish - self.submit),
                "run_time": ("job", self.run_time),
                "delay": ("job", self.begin - self.submit),
                **counts,
                "gpu_seconds": ("scenario", np.array(list(self.ledger.values()))),
            },
            coords={"job": self.jobs["job"].values, "scenario": list(self.ledger)},
            made_by="prism.run_cluster",
            source=schema.derived_source(self.jobs.attrs["source"]),
            seed=seed,
            provenance={**schema.provenance(self.jobs), **provenance},
        )


def named(value, table: Mapping, what: str):
    """Look up a name case-insensitively; pass other values through."""
    if not isinstance(value, str):
        return value
    by_lower = {k.lower(): v for k, v in table.items()}
    if value.lower() not in by_lower:
        raise ValueError(f"unknown {what} {value!r}; one of {', '.join(table)}")
    return by_lower[value.lower()]
