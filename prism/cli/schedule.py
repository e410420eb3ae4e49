"""The command line of cluster scheduling: ``prism schedule JOBS``."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import xarray as xr

from prism import cluster
from prism.base.files import write_atomically, write_dataset
from prism.base.runner import cores, process_pool
from prism.cluster.runtimes import ESTIMATES

HOUR = 3600.0


def add_command(commands) -> None:
    """Add ``schedule`` to a parser's commands."""
    s = commands.add_parser(
        "schedule",
        help="compare point, p95 and other run-time estimates under scheduling policies, on a job log",
        description="Run scheduling policies on a job log whose run times are uncertain, planning with several estimators over the same "
        "real run times, and print completion times, their ratios with intervals over seeds, and what else tells whether a ratio "
        "is to be believed.",
    )
    s.add_argument(
        "jobs", help="job log: a table, the logs that others publish, or a synthetic one (.yaml)"
    )
    s.add_argument("--gpus", type=int, required=True, help="GPUs in the cluster")
    s.add_argument(
        "--policy",
        nargs="+",
        default=["FCFS", "SRTF", "Arena*"],
        metavar="NAME",
        help=", ".join(cluster.POLICIES),
    )
    s.add_argument("--estimate", nargs="+", default=["point", "p95"], metavar="NAME", help=f"run-time estimates, the first one the baseline: {', '.join(ESTIMATES)}")  # fmt: skip
    s.add_argument("--overrun", nargs="+", default=["killable"], choices=list(cluster.OVERRUNS), help="rule for a job that outlives its estimate")  # fmt: skip
    s.add_argument(
        "--growth",
        type=float,
        default=1.5,
        help="factor on the limit of a job that was stopped at it (default 1.5)",
    )
    s.add_argument(
        "--cv",
        type=float,
        default=0.2,
        help="coefficient of variation of run time around its estimate (default 0.2)",
    )
    s.add_argument(
        "--cv-from", metavar="FILE", help="a table of cvs (cv, cov_p50), one drawn for each job"
    )
    s.add_argument(
        "--rounds", type=int, default=2000, help="scheduling rounds to simulate (default 2000)"
    )
    s.add_argument("--round-s", type=float, default=300.0, help="seconds of a round (default 300)")
    s.add_argument(
        "--events", action="store_true", help="decide when something happens, not in rounds"
    )
    s.add_argument(
        "--drain", action="store_true", help="simulate until all jobs that arrived in time are done"
    )
    s.add_argument(
        "--seeds", type=int, default=5, help="simulations with seeds of their own (default 5)"
    )
    s.add_argument(
        "--compress", type=float, default=1.0, help="divide the times between arrivals (default 1)"
    )
    s.add_argument("--start-day", type=float, default=0.0, help="day of the log at which to begin")
    s.add_argument(
        "--interval",
        default="1800",
        help="seconds of work between checkpoints, or young-daly (default 1800)",
    )
    s.add_argument(
        "--write", type=float, default=30.0, help="seconds that a checkpoint stalls (default 30)"
    )
    s.add_argument(
        "--restart", type=float, default=300.0, help="seconds to start or resume (default 300)"
    )
    s.add_argument(
        "--failures",
        type=float,
        default=0.0,
        help="node failures per node and day (default 0; published 0.0023 to 0.0065)",
    )
    s.add_argument(
        "--abrupt", action="store_true", help="stopped jobs go back to their last checkpoint"
    )
    s.add_argument("--json", action="store_true", help="machine-readable output")
    s.add_argument("--out", metavar="FILE.nc", help="also save the result as a Dataset")
    s.add_argument("--latex", metavar="FILE.tex", help="also save the table for a paper")
    s.set_defaults(run=_schedule)


def _schedule(arguments: argparse.Namespace) -> None:
    if arguments.seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {arguments.seeds}")
    for flag, name, end in (("out", arguments.out, ".nc"), ("latex", arguments.latex, ".tex")):
        if name and not name.endswith(end):
            raise ValueError(f"--{flag} {name}: give a name that ends in {end}")
        if name and not Path(name).resolve().parent.is_dir():
            raise ValueError(f"--{flag} {name}: there is no such folder")
    jobs = cluster.select_jobs(
        cluster.read_jobs(arguments.jobs),
        start=86_400 * arguments.start_day,
        compress=arguments.compress,
    )
    if arguments.cv_from:
        jobs = cluster.with_cv(jobs, Path(arguments.cv_from))
    machine = cluster.Cluster(arguments.gpus, arguments.rounds, arguments.round_s, arguments.events)
    checkpoint = cluster.Checkpoint(
        arguments.interval if arguments.interval == "young-daly" else _number(arguments.interval),
        arguments.write, arguments.restart, not arguments.abrupt, arguments.failures,
    )  # fmt: skip
    rules = [cluster.Overrun(o, arguments.growth) for o in arguments.overrun]
    cells = len(arguments.policy) * len(rules) * len(arguments.estimate) * arguments.seeds
    # starting workers takes longer than a few short runs
    many = cells * jobs.sizes["job"] > 50_000 and cores() > 1
    with process_pool() if many else nullcontext() as pool:
        found = cluster.compare_estimates(
            jobs, machine, policies=arguments.policy, estimates=arguments.estimate, overruns=rules, cv=arguments.cv,
            checkpoint=checkpoint, seeds=range(arguments.seeds), drain=arguments.drain, executor=pool, progress=sys.stderr.isatty(),
        )  # fmt: skip
    rows = _rows(found)
    if arguments.out:
        write_dataset(found, arguments.out)
    if arguments.latex:
        text = _latex(rows, found)
        write_atomically({Path(arguments.latex): lambda part: part.write_text(text, "utf-8")})
    load = cluster.offered_load(jobs, machine)
    came = int((jobs["submit"] < machine.horizon).sum())
    said = {
        "source": found.attrs["source"],
        "jobs": came,
        "gpus": arguments.gpus,
        "load": load,
        "seeds": arguments.seeds,
        "rows": rows,
    }
    print(json.dumps(_finite(said), indent=2) if arguments.json else _text(said))


def _finite(value):
    """JSON knows no NaN."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--interval {text}: needs seconds, or young-daly") from None


def _rows(found: xr.Dataset) -> list[dict]:
    """A row a policy, rule and estimator, compared with the first estimator."""
    names = found["scenario"].values.astype(str).tolist()
    rows = []
    for policy in found["policy"].values.astype(str):
        for rule in found["overrun"].values.astype(str):
            for name in names:
                one = found.sel(policy=policy, overrun=rule, scenario=name).mean("trial")
                row = {
                    "policy": policy, "overrun": rule, "estimate": name, "finished": float(one["share"]),
                    "jct_h": (one["jct"].values / HOUR).tolist(), "goodput": float(one["goodput"]),
                    "delay_h": float(one["delay_mean"]) / HOUR, "preempted": float(one["preempted"]),
                    "killed": float(one["killed"]), "failed": float(one["failed"]), "makespan_h": float(one["makespan"]) / HOUR,
                }  # fmt: skip
                if name != names[0]:
                    r = cluster.ratios(found, of=name, to=names[0]).sel(policy=policy, overrun=rule)
                    row["ratio"] = r["ratio"].values.tolist()
                    row["ratio_interval"] = [
                        None if np.isnan(v) else float(v) for v in r["ratio_interval"].values[-1]
                    ]
                rows.append(row)
    return rows


def _text(said: dict) -> str:
    lines = [
        f"{said['jobs']} jobs ({said['source']}) on {said['gpus']} GPUs, offered load {said['load']:.2f}, {said['seeds']} seeds",
        "mean completion time (h) over the first 25, 50, 75, 90 and 100 % of as many completions as every estimate reaches;",
        "ratio to the first estimate, 95 % interval over seeds",
        "",
        f"{'policy':<9} {'overrun':<13} {'estimate':<9} {'finished':>8} {'25':>7} {'50':>7} {'75':>7} {'90':>7} {'100 %':>7}  {'ratio':<22} {'goodput':>7} {'killed':>7}",
    ]
    for row in said["rows"]:
        ratio = ""
        if "ratio" in row:
            low, high = row["ratio_interval"]
            ratio = f"{row['ratio'][-1]:.3f}" + ("" if low is None else f" [{low:.3f}, {high:.3f}]")
        times = " ".join(f"{t:7.2f}" for t in row["jct_h"])
        lines.append(
            f"{row['policy']:<9} {row['overrun']:<13} {row['estimate']:<9} {100 * row['finished']:7.1f}% {times}  {ratio:<22} {row['goodput']:7.3f} {row['killed']:7.0f}"
        )
    return "\n".join(lines)


def _latex(rows: list[dict], found: xr.Dataset) -> str:
    """A booktabs table; numbers of generated logs say so in a comment and in the head."""
    head = r"policy & overrun & estimate & finished (\%) & JCT (h) & ratio & goodput \\"
    body = []
    for row in rows:
        ratio = "1" if "ratio" not in row else f"{row['ratio'][-1]:.3f}"
        if "ratio" in row and row["ratio_interval"][0] is not None:
            ratio += " [{:.3f}, {:.3f}]".format(*row["ratio_interval"])
        policy = row["policy"].replace("*", r"$^*$")
        body.append(
            f"{policy} & {row['overrun']} & {row['estimate']} & {100 * row['finished']:.1f} & {row['jct_h'][-1]:.2f} & {ratio} & {row['goodput']:.3f} \\\\"
        )
    return "\n".join(
        [
            f"% {found.attrs['source']} job log, {found.sizes['trial']} seeds",
            r"\begin{tabular}{lllrrrr}",
            r"\toprule",
            head,
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )
