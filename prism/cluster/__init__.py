"""A GPU cluster that schedules jobs whose run times are uncertain.

`read_jobs` gives a job log, `run_cluster` one run of a policy on it, `compare_estimates` policies, overrun rules and
estimators over the same real run times.
"""

from prism.cluster.comparing import compare_estimates, mean_jct_of_first, ratios
from prism.cluster.jobs import JobsError, read_jobs, selected, with_cv
from prism.cluster.machine import Checkpoint, Cluster, Speed, arena_cluster
from prism.cluster.overrun import OVERRUNS, Overrun
from prism.cluster.policies import POLICIES, Queue, pack
from prism.cluster.runtimes import ESTIMATES, Flat, Known, Quantile
from prism.cluster.simulator import offered_load, run_cluster
from prism.cluster.speeds import speed_from_context

__all__ = [
    "ESTIMATES", "OVERRUNS", "POLICIES", "Checkpoint", "Cluster", "Flat", "JobsError", "Known", "Overrun", "Quantile", "Queue", "Speed",
    "arena_cluster", "compare_estimates", "mean_jct_of_first", "offered_load", "pack", "ratios", "read_jobs", "run_cluster", "selected", "speed_from_context",
    "with_cv",
]  # fmt: skip
