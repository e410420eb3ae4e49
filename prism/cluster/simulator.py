"""Round-based simulation of a cluster, with a ledger that must sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr

from prism import schema
from prism.cluster.policies import ESTIMATES, POLICIES, Estimate, Policy, Queue

#: shortest real run time, as a share of the point estimate: where the Normal is cut off
FLOOR = 0.1
LARGEST_CV = 0.5
ROUNDING = 1e-9
LEDGER = ("useful", "stall", "restart", "tail")
COMPLETIONS = (0.25, 0.5, 0.75, 0.9, 1.0)


@dataclass(frozen=True)
class Cluster:
    """`gpus` GPUs that are given out anew every `round_s` seconds, for `rounds` rounds."""

    gpus: int
    rounds: int = 2000
    round_s: float = 300.0

    def __post_init__(self) -> None:
        whole = all(isinstance(v, int | np.integer) for v in (self.gpus, self.rounds))
        if not whole or self.gpus < 1 or self.rounds < 1 or not 0 < self.round_s < np.inf:
            raise ValueError(
                f"{self}: gpus and rounds must be whole and positive, round_s positive and finite"
            )


@dataclass(frozen=True)
class Checkpoint:
    """What stopping and going on costs.

    A running job writes a checkpoint every `interval_s` of work (infinite: never), which stalls it for
    `write_s`. A preempted job that has worked since its last one writes one more, so no work is lost;
    that write is charged when the job resumes, since GPUs change hands between rounds. Whoever starts
    or resumes spends `restart_s` first. Defaults: 30 min, 30 s, 300 s, within published practice.
    """

    interval_s: float = 1800.0
    write_s: float = 30.0
    restart_s: float = 300.0

    def __post_init__(self) -> None:
        if not (
            self.interval_s > 0 and 0 <= self.write_s < np.inf and 0 <= self.restart_s < np.inf
        ):
            raise ValueError(f"{self}: interval_s must be positive, costs finite and not negative")

    def worked(self, at: np.ndarray) -> np.ndarray:
        """Work done by cycle time `at`: a cycle is `interval_s` of work and `write_s` of stall."""
        if self.interval_s == np.inf:
            return at
        cycle = self.interval_s + self.write_s
        # a cycle that is over but for rounding counts as over
        whole = np.floor(at / cycle + ROUNDING)
        return whole * self.interval_s + np.clip(at - whole * cycle, 0.0, self.interval_s)

    def time_for(self, work: np.ndarray) -> np.ndarray:
        """Earliest cycle time by which `work` is done (inverse of `worked`)."""
        if self.interval_s == np.inf:
            return work
        whole = np.maximum(np.ceil(work / self.interval_s - ROUNDING) - 1, 0)
        return work + whole * self.write_s


def offered_load(jobs: xr.Dataset, cluster: Cluster) -> float:
    """GPU-seconds asked for by jobs that are submitted in time, over those that the cluster has.

    Above 1 the queue grows for as long as the run lasts.
    """
    horizon = cluster.rounds * cluster.round_s
    asked = (jobs["estimate"] * jobs["gpus"]).values[jobs["submit"].values < horizon]
    return float(asked.sum() / (cluster.gpus * horizon))


def draw_run_times(jobs: xr.Dataset, cv: float, seed: int) -> np.ndarray:
    """Real run times: ``Normal(N, cv N)`` cut off below `FLOOR` N, seconds, (job,).

    A pure function of seed and log, so every policy and estimator meets the same run times. The cut
    moves the mean: by 0.01 % at cv 0.3, by 0.7 % at 0.5, beyond which a Normal is no run time.
    """
    if not 0 <= cv <= LARGEST_CV:
        raise ValueError(f"cv must lie between 0 and {LARGEST_CV}, got {cv}")
    n = jobs["estimate"].values
    z = np.random.default_rng(seed).standard_normal(n.size)
    return n * np.maximum(1 + cv * z, FLOOR)


def run_cluster(
    jobs: xr.Dataset,
    cluster: Cluster,
    policy: Policy | str,
    *,
    estimate: Estimate | str = "point",
    cv: float = 0.2,
    checkpoint: Checkpoint | None = None,
    seed: int = 0,
) -> xr.Dataset:
    """Run a policy on a job log.

    Each round the policy picks among the submitted, unfinished jobs; a running job pays what it owes
    (checkpoint write, restart), then works. A job that ends within a round holds its GPUs to the end
    of it. A job that outlives its estimate keeps a planned remaining time of 0 (the overrun rule
    *clamp*); no estimate is enforced.

    Parameters
    ----------
    jobs : Dataset of `read_jobs`
    cluster : Cluster
    policy : str or callable
        A name in `POLICIES` or any callable from `Queue` to a bool array of who runs.
    estimate : str or callable
        A name in `ESTIMATES` or any callable from (point estimate, cv) to run times, seconds.
    cv : float
        Coefficient of variation of the real run time around the point estimate.
    checkpoint : Checkpoint
    seed : int
        Of the real run times.

    Returns
    -------
    Dataset
        ``finish(job)``, ``jct(job)``, ``run_time(job)``, seconds, NaN where unfinished, and
        ``gpu_seconds(scenario)``: ``allocated``, counted by itself, and its parts ``useful, stall,
        restart, tail``.

    Raises
    ------
    ValueError
        Unknown names, a job larger than the cluster, a policy that gives out more than there is.
    """
    policy = _named(policy, POLICIES, "policy")
    estimate = _named(estimate, ESTIMATES, "estimate")
    too_large = jobs["gpus"].values > cluster.gpus
    if too_large.any():
        first = int(np.flatnonzero(too_large)[0])
        raise ValueError(
            f"{int(too_large.sum())} jobs need more than the cluster's {cluster.gpus} GPUs "
            f"(first: {jobs['job'].values[first]} with {int(jobs['gpus'].values[first])})"
        )
    run_time = draw_run_times(jobs, cv, seed)
    planned = schema.finite_durations(estimate(jobs["estimate"].values, cv), "estimates")
    if planned.shape != run_time.shape or np.any(np.diff(jobs["submit"].values) < 0):
        raise ValueError("needs one estimate a job, and jobs in order of submission")
    state = _Run(jobs, cluster, checkpoint or Checkpoint(), run_time, planned)
    for r in range(cluster.rounds):
        state.round(r * cluster.round_s, policy)
    return state.result(seed, {"cv": cv, "gpus": cluster.gpus, "rounds": cluster.rounds})


class _Run:
    """State of one run; `round` is the only thing that changes it."""

    def __init__(self, jobs, cluster: Cluster, checkpoint: Checkpoint, run_time, planned) -> None:
        self.jobs, self.cluster, self.checkpoint = jobs, cluster, checkpoint
        self.submit, self.gpus = jobs["submit"].values, jobs["gpus"].values
        self.run_time, self.planned = run_time, planned
        n = self.submit.size
        self.work, self.cycle = np.zeros(n), np.zeros(n)
        self.owed_stall, self.owed_restart = np.zeros(n), np.zeros(n)
        self.running = np.zeros(n, bool)
        self.finish = np.full(n, np.nan)
        self.ledger = dict.fromkeys(("allocated", *LEDGER), 0.0)

    def round(self, now: float, policy: Policy) -> None:
        arrived = int(np.searchsorted(self.submit, now, side="right"))
        active = np.flatnonzero(np.isnan(self.finish[:arrived]))
        if active.size == 0:
            return
        queue = Queue(
            self.submit[active],
            self.gpus[active],
            np.maximum(self.planned[active] - self.work[active], 0.0),
            self.running[active],
            self.cluster.gpus,
        )
        run = np.asarray(policy(queue), bool)
        if self.gpus[active[run]].sum() > self.cluster.gpus:
            given = int(self.gpus[active[run]].sum())
            raise ValueError(f"the policy gives out {given} of {self.cluster.gpus} GPUs")
        stopped = active[queue.running & ~run]
        self.owed_stall[stopped[self.cycle[stopped] > 0]] = self.checkpoint.write_s
        self.cycle[stopped] = 0.0  # it resumes from a fresh checkpoint
        self.owed_restart[active[~queue.running & run]] = self.checkpoint.restart_s
        self.running[active] = run
        self._advance(active[run], now)

    def _advance(self, j: np.ndarray, now: float) -> None:
        """Let jobs `j` use one round of their GPUs."""
        left = np.full(j.size, self.cluster.round_s)
        paid = {}
        for name, owed in (("stall", self.owed_stall), ("restart", self.owed_restart)):
            paid[name] = np.minimum(owed[j], left)
            owed[j] -= paid[name]
            left -= paid[name]
        c, before = self.checkpoint, self.cycle[j]
        done_at = c.time_for(c.worked(before) + self.run_time[j] - self.work[j])
        used = np.minimum(done_at - before, left)
        ends = done_at - before <= left
        worked = np.where(
            ends, self.run_time[j] - self.work[j], c.worked(before + used) - c.worked(before)
        )
        self.work[j] += worked
        self.cycle[j] += used
        self.finish[j[ends]] = now + (self.cluster.round_s - left + used)[ends]
        self.running[j[ends]] = False
        paid["stall"] += used - worked
        paid |= {"useful": worked, "tail": left - used}
        for name, seconds in paid.items():
            self.ledger[name] += float(seconds @ self.gpus[j])
        self.ledger["allocated"] += float(self.gpus[j].sum() * self.cluster.round_s)

    def result(self, seed: int, provenance: Mapping) -> xr.Dataset:
        return schema.dataset(
            {
                "finish": ("job", self.finish),
                "jct": ("job", self.finish - self.submit),
                "run_time": ("job", self.run_time),
                "gpu_seconds": ("scenario", list(self.ledger.values())),
            },
            coords={"job": self.jobs["job"].values, "scenario": list(self.ledger)},
            made_by="prism.run_cluster",
            source="synthetic" if self.jobs.attrs["source"] == "synthetic" else "simulated",
            seed=seed,
            provenance={**schema.provenance(self.jobs), **provenance},
        )


def mean_jct_of_first(run: xr.Dataset, jobs: int) -> float:
    """Mean completion time of the first `jobs` jobs to finish, seconds (NaN if none did)."""
    finish, jct = run["finish"].values, run["jct"].values
    first = np.argsort(finish, kind="stable")[:jobs]  # unfinished (NaN) sort last
    return float(np.mean(jct[first])) if first.size else np.nan


def compare_estimates(
    jobs: xr.Dataset,
    cluster: Cluster,
    *,
    policies: Sequence[str] = tuple(POLICIES),
    estimates: Sequence[str] = tuple(ESTIMATES),
    cv: float = 0.2,
    checkpoint: Checkpoint | None = None,
    seeds: Sequence[int] = range(5),
) -> xr.Dataset:
    """Policies x estimators over the same real run times, at several levels of completion.

    Level q is the first ``q x (smallest number of jobs that any estimator finished)`` completions of
    a policy, so that estimators are compared over equally many jobs; the finished share is beside it,
    since a mean over finished jobs flatters whoever finishes fewer.

    Returns
    -------
    Dataset
        ``jct(policy, scenario, trial, quantile)``, seconds, `scenario` being the estimator and `trial`
        the seed; ``share(policy, scenario, trial)`` of submitted jobs that finished;
        ``goodput(policy, scenario, trial)``: useful over allocated GPU-seconds.
    """
    shape = (len(policies), len(estimates), len(seeds))
    jct = np.full((*shape, len(COMPLETIONS)), np.nan)
    share, goodput = np.full(shape, np.nan), np.full(shape, np.nan)
    submitted = int(np.sum(jobs["submit"].values < cluster.rounds * cluster.round_s))
    for p, policy in enumerate(policies):
        for t, seed in enumerate(seeds):
            runs = [
                run_cluster(
                    jobs, cluster, policy, estimate=e, cv=cv, checkpoint=checkpoint, seed=seed
                )
                for e in estimates
            ]
            finished = [int(np.isfinite(r["finish"].values).sum()) for r in runs]
            for e, run in enumerate(runs):
                first = [int(q * min(finished)) for q in COMPLETIONS]
                jct[p, e, t] = [mean_jct_of_first(run, n) for n in first]
                share[p, e, t] = finished[e] / submitted
                ledger = run["gpu_seconds"]
                allocated = float(ledger.sel(scenario="allocated"))
                goodput[p, e, t] = float(ledger.sel(scenario="useful")) / allocated
    return schema.dataset(
        {
            "jct": (("policy", "scenario", "trial", "quantile"), jct),
            "share": (("policy", "scenario", "trial"), share),
            "goodput": (("policy", "scenario", "trial"), goodput),
        },
        coords={
            "policy": list(policies),
            "scenario": list(estimates),
            "trial": list(seeds),
            "quantile": list(COMPLETIONS),
        },
        made_by="prism.cluster.compare_estimates",
        source="synthetic" if jobs.attrs["source"] == "synthetic" else "simulated",
        provenance={**schema.provenance(jobs), "cv": cv, "overrun": "clamp"},
    )


def _named(value, table: Mapping, what: str):
    if not isinstance(value, str):
        return value
    if value not in table:
        raise ValueError(f"unknown {what} {value!r}; one of {', '.join(table)}")
    return table[value]
