"""Measurements of one's own machine."""

from prism.bench.training import CONDITIONS, Layout, TrainingError, record_training

__all__ = ["CONDITIONS", "Layout", "TrainingError", "record_training"]
