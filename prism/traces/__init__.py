"""Measured steps in, step models out.

`read_trace` makes one Dataset of op records, `build_graph` finds what waits for what, `observe`
separates durations from waiting, `replay` checks the two against the measured step times, and
`model_from_trace` puts pools and their coupling on the graph.
"""

from prism.traces.breakdown import breakdown, compare_traces, extra_days
from prism.traces.dependence import CouplingFit, fit_coupling
from prism.traces.fitting import (
    MIN_STEPS,
    borrowing,
    choose_gaps,
    fit_model,
    fit_pools,
    model_from_trace,
)
from prism.traces.gaps import add_gaps, effective_gaps, kept_kinds, remove_gaps
from prism.traces.graph import TraceGraph, build_graph
from prism.traces.reading import read_trace
from prism.traces.recording import record
from prism.traces.records import TraceError, TraceWarning
from prism.traces.steps import observe, replay

__all__ = [
    "MIN_STEPS",
    "CouplingFit",
    "TraceError",
    "TraceGraph",
    "TraceWarning",
    "add_gaps",
    "borrowing",
    "breakdown",
    "build_graph",
    "choose_gaps",
    "compare_traces",
    "effective_gaps",
    "extra_days",
    "fit_coupling",
    "fit_model",
    "fit_pools",
    "kept_kinds",
    "model_from_trace",
    "observe",
    "read_trace",
    "record",
    "remove_gaps",
    "replay",
]
