"""Measurements of one's own machine."""

from prism.bench.collective import CollectiveError, measure_collectives
from prism.bench.gemm import measure_gemm
from prism.bench.telemetry import measure_telemetry
from prism.bench.training import CONDITIONS, Layout, TrainingError, record_training

__all__ = [
    "CONDITIONS", "CollectiveError", "Layout", "TrainingError", "measure_collectives", "measure_gemm", "measure_telemetry",
    "record_training",
]  # fmt: skip
