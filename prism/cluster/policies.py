"""Policies and estimators. A policy decides who runs in the next round; an estimator decides which
run time it plans with. Planning with a p95 is the same policy with another estimator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.stats import norm


@dataclass(frozen=True, eq=False)
class Queue:
    """What a policy sees: every job that has been submitted and is not finished.

    Attributes
    ----------
    submit : ndarray (job,), seconds
    gpus : ndarray (job,)
    remaining : ndarray (job,), seconds
        Planned run time minus progress; 0 for a job that has outlived its estimate.
    running : ndarray (job,), bool
        Whether the job held its GPUs in the last round.
    capacity : int
        GPUs of the cluster.
    """

    submit: np.ndarray
    gpus: np.ndarray
    remaining: np.ndarray
    running: np.ndarray
    capacity: int


Policy = Callable[[Queue], np.ndarray]


def pack(order: np.ndarray, gpus: np.ndarray, capacity: int) -> np.ndarray:
    """Give GPUs in this order, passing over whatever does not fit. Returns bool (job,).

    Examples
    --------
    >>> pack(np.array([0, 1, 2]), np.array([3, 4, 1]), 4).tolist()
    [True, False, True]
    """
    run = np.zeros(gpus.size, bool)
    free = capacity
    left = order[gpus[order] <= free]
    while left.size:
        used = np.cumsum(gpus[left])
        n = int(np.searchsorted(used, free, side="right"))
        run[left[:n]] = True
        free -= int(used[n - 1])
        left = left[n:]
        left = left[gpus[left] <= free]
    return run


def fcfs(queue: Queue) -> np.ndarray:
    """First come, first served: nobody is preempted, nobody overtakes. Uses no estimate."""
    order = np.lexsort((queue.submit, ~queue.running))
    run = np.zeros(order.size, bool)
    run[order] = np.cumsum(queue.gpus[order]) <= queue.capacity
    return run


def srtf(queue: Queue) -> np.ndarray:
    """Shortest remaining time first, preemptive, by planned remaining time; what does not fit is
    passed over.
    """
    order = np.lexsort((queue.submit, queue.remaining))
    return pack(order, queue.gpus, queue.capacity)


POLICIES: dict[str, Policy] = {"FCFS": fcfs, "SRTF": srtf}

Estimate = Callable[[np.ndarray, float], np.ndarray]

#: point estimate N and cv of the run time -> run time to plan with
ESTIMATES: dict[str, Estimate] = {
    "point": lambda n, cv: n,
    "p95": lambda n, cv: n * (1 + norm.ppf(0.95) * cv),
}
