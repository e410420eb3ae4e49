"""PRISM: the run time of large distributed training as a random quantity.

Everything random is a `DurationPool`; every question is a `Scenario` or a `Policy`; every answer is
a Dataset.
"""

import importlib
from typing import Any

#: where each public name lives; a name is imported when it is first used, since scipy.stats, numba and
#: xarray together take more than a second
_HOME = {
    "prism.cluster": (
        "Checkpoint",
        "Cluster",
        "read_jobs",
        "run_cluster",
    ),
    "prism.context": (
        "Context",
        "Link",
        "Parallelism",
        "Topology",
        "Workload",
    ),
    "prism.coupling": (
        "Coupling",
        "Loading",
    ),
    "prism.crossvalidation": ("validate",),
    "prism.dag": ("WorkloadDAG",),
    "prism.dagbuilder": ("DagBuilder",),
    "prism.fleet": (
        "read_fleet",
        "variability",
    ),
    "prism.model": ("StepModel",),
    "prism.montecarlo": ("simulate",),
    "prism.pools": (
        "DurationPool",
        "Bimodal",
        "Empirical",
        "Fixed",
        "Gamma",
        "HeavyTail",
        "LogNormal",
        "MaxOf",
        "Normal",
        "Scaled",
        "Shifted",
    ),
    "prism.attribution": ("ablate",),
    "prism.placement": ("optimise_placement",),
    "prism.scenarios": ("HotNode",),
    "prism.sweeping": ("sweep",),
    "prism.signature": (
        "PoolKey",
        "Signature",
    ),
    "prism.stats": (
        "guarantee",
        "min_draws",
    ),
    "prism.traces": (
        "breakdown",
        "model_from_trace",
        "read_trace",
    ),
    "prism.validation": (
        "compare",
        "require",
    ),
    "prism.workload": ("model_from_context",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'prism' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
