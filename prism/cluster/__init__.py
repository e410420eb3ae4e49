"""A GPU cluster that schedules jobs whose run times are uncertain.

`read_jobs` gives a job log, `run_cluster` one run of a policy on it, `compare_estimates` the same
policies planning with a point estimate and with a p95, over the same real run times.
"""

from prism.cluster.jobs import JobsError, read_jobs
from prism.cluster.policies import ESTIMATES, POLICIES, Queue, fcfs, pack, srtf
from prism.cluster.simulator import (
    Checkpoint,
    Cluster,
    compare_estimates,
    mean_jct_of_first,
    offered_load,
    run_cluster,
)

__all__ = [
    "ESTIMATES",
    "POLICIES",
    "Checkpoint",
    "Cluster",
    "JobsError",
    "Queue",
    "compare_estimates",
    "fcfs",
    "mean_jct_of_first",
    "offered_load",
    "pack",
    "read_jobs",
    "run_cluster",
    "srtf",
]
