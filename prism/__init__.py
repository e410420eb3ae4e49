"""PRISM: the run time of large distributed training as a random quantity.

Everything random is a `DurationPool`; every question is a `Scenario` or a `Policy`; every answer is
a Dataset.
"""

from prism.cluster import Checkpoint, Cluster, read_jobs, run_cluster
from prism.context import Context, Link, Parallelism, Topology, Workload
from prism.coupling import Coupling, Loading
from prism.dag import DagBuilder, WorkloadDAG
from prism.fleet import read_fleet, variability
from prism.model import StepModel
from prism.montecarlo import simulate
from prism.pools import DurationPool, Empirical, Fixed, Gamma, LogNormal, Normal, Scaled, Shifted
from prism.scenarios import HotNode, sweep
from prism.signature import PoolKey, Signature
from prism.stats import guarantee, min_draws
from prism.traces import model_from_trace, read_trace
from prism.validation import compare, require
from prism.workload import model_from_context

__all__ = [
    "Checkpoint",
    "Cluster",
    "Context",
    "Coupling",
    "DagBuilder",
    "DurationPool",
    "Empirical",
    "Fixed",
    "Gamma",
    "HotNode",
    "Link",
    "Loading",
    "LogNormal",
    "Normal",
    "Parallelism",
    "PoolKey",
    "Scaled",
    "Shifted",
    "Signature",
    "StepModel",
    "Topology",
    "Workload",
    "WorkloadDAG",
    "compare",
    "guarantee",
    "min_draws",
    "model_from_context",
    "model_from_trace",
    "read_fleet",
    "read_jobs",
    "read_trace",
    "require",
    "run_cluster",
    "simulate",
    "sweep",
    "variability",
]
