"""Assertions whose tolerance is a standard error."""

from __future__ import annotations

import math

import numpy as np


def assert_mean_close(x: np.ndarray, truth: float, *, z: float = 4.5) -> None:
    """The mean of independent values lies within z standard errors of `truth`."""
    error = np.std(x, ddof=1) / math.sqrt(x.size)
    distance = abs(float(np.mean(x)) - truth)
    assert distance <= z * error, (
        f"mean {np.mean(x):.6g}, truth {truth:.6g}: {distance / error:.1f} s.e."
    )


def assert_share_close(hits: int, n: int, truth: float, *, z: float = 4.5) -> None:
    """A share of n independent trials lies within z standard errors of `truth`."""
    error = math.sqrt(truth * (1 - truth) / n)
    assert abs(hits / n - truth) <= z * error, (
        f"share {hits / n:.4f}, truth {truth:.4f} +- {error:.4f}"
    )
