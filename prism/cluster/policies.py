"""Policies: who gets how many GPUs next. Planning with a p95 is the same policy with another estimator.

A policy is a function from a `Queue` to the GPUs of each job: whole numbers, or bool for all that it asked for or none. One that does
not look at ``remaining`` plans with no estimate, and says so (``plans = False``): no overrun rule applies to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Queue:
    """What a policy sees: every job that has been submitted and is not finished, in order of submission.

    Attributes
    ----------
    now : float
        Seconds.
    submit : ndarray (job,), seconds
    gpus : ndarray (job,)
        Asked for.
    given : ndarray (job,)
        Held in the last round.
    remaining : ndarray (job,), seconds
        Planned run time minus progress; 0 for a job that has outlived its estimate, or infinite where it has to
        yield then (`prism.cluster.OVERRUNS`).
    attained : ndarray (job,)
        GPU-seconds so far.
    held_s : ndarray (job,)
        Seconds since it got the GPUs that it has now.
    capacity : int
        GPUs of the cluster, or of the type that these jobs ask for.
    """

    now: float
    submit: np.ndarray
    gpus: np.ndarray
    given: np.ndarray
    remaining: np.ndarray
    attained: np.ndarray
    held_s: np.ndarray
    capacity: int

    @property
    def running(self) -> np.ndarray:
        """Whether a job held GPUs in the last round, bool (job,)."""
        return self.given > 0


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


fcfs.plans = False


def easy(queue: Queue) -> np.ndarray:
    """FCFS with EASY backfill (Lifka 1995): the first that does not fit gets a reservation at the planned time at which enough GPUs
    are free, and later jobs start now if by plan they delay it by nothing. Nobody is preempted."""
    run = fcfs(queue)
    waiting = np.flatnonzero(~run)
    free = queue.capacity - int(queue.gpus[run].sum())
    if waiting.size == 0 or free == 0:
        return run
    head = waiting[np.argmin(queue.submit[waiting])]
    by_end = np.flatnonzero(run)[np.argsort(queue.remaining[run], kind="stable")]
    released = free + np.cumsum(queue.gpus[by_end])
    enough = int(np.searchsorted(released, queue.gpus[head]))
    shadow = queue.remaining[by_end[enough]] if enough < by_end.size else np.inf
    spare = int(released[min(enough, released.size - 1)] - queue.gpus[head]) if by_end.size else 0
    ends = queue.remaining <= shadow
    could = waiting[
        (waiting != head)
        & (queue.gpus[waiting] <= free)
        & (ends[waiting] | (queue.gpus[waiting] <= spare))
    ]
    for j in could[np.argsort(queue.submit[could], kind="stable")]:
        need = int(queue.gpus[j])
        if need > free or not (ends[j] or need <= spare):
            continue
        run[j] = True
        free -= need
        spare -= 0 if ends[j] else need
        if free == 0:
            break
    return run


def sjf(queue: Queue) -> np.ndarray:
    """Shortest planned job first, nobody is preempted; what does not fit is passed over."""
    order = np.lexsort((queue.submit, queue.remaining, ~queue.running))
    return pack(order, queue.gpus, queue.capacity)


def srtf(queue: Queue) -> np.ndarray:
    """Shortest remaining time first, preemptive, by planned remaining time; what does not fit is passed over."""
    order = np.lexsort((queue.submit, queue.remaining))
    return pack(order, queue.gpus, queue.capacity)


#: seconds for which a job keeps its GPUs under policies that take turns: less would be restarts and nothing else
TURN = 3600.0


def _in_turn(queue: Queue) -> np.ndarray:
    """False first: jobs whose turn is not over."""
    return ~(queue.running & (queue.held_s < TURN))


def las(queue: Queue) -> np.ndarray:
    """Least attained service first, preemptive after a turn (Gu et al., NSDI 2019, without queues). Uses no estimate."""
    order = np.lexsort((queue.submit, queue.attained, _in_turn(queue)))
    return pack(order, queue.gpus, queue.capacity)


las.plans = False

#: GPU-seconds at which a job leaves the first queue of `tiresias`: an hour of eight GPUs
FIRST_QUEUE = 8 * 3600.0


def tiresias(queue: Queue) -> np.ndarray:
    """Two queues by attained service, first come first served in each, preemptive (Gu et al., NSDI 2019, discretised two-dimensional
    LAS). Uses no estimate."""
    order = np.lexsort((queue.submit, queue.attained >= FIRST_QUEUE))
    return pack(order, queue.gpus, queue.capacity)


tiresias.plans = False


def fair(queue: Queue) -> np.ndarray:
    """Max-min fairness by rounds, as Gavel's least-attained-service policy gives it on one type of GPU (Narayanan et al., OSDI
    2020): who has had the smallest part of the time since its submission goes next, for a turn. Uses no estimate."""
    age = np.maximum(queue.now - queue.submit, 1.0)
    order = np.lexsort((queue.submit, queue.attained / (queue.gpus * age), _in_turn(queue)))
    return pack(order, queue.gpus, queue.capacity)


fair.plans = False

#: of `arena`: seconds that a job keeps what it got, and how much longer one must have left to make room
KEEPS, LONGER = 1800.0, 2.0
#: of `arena`: smallest and largest share of what was asked for; waiting jobs that are looked at in a round
SMALLEST, LARGEST, LOOKED_AT = 0.5, 2.0, 64


def arena(queue: Queue) -> np.ndarray:
    """Elastic, by planned ends: an Arena* of our own (the PRISM paper does not give its own; Arena: Xue et al., EuroSys 2026).

    Shortest planned remaining time first. Who waits takes free GPUs, all or at least half of what it asked for. If there are
    too few, it waits where planned ends free enough within `KEEPS`; else running jobs that have held theirs for as long, and have
    at least `LONGER` times as long to go, shrink to half, the longest first, and those that have outlived their estimate and must yield
    stop. What is left over expands jobs to at most twice,
    those that end first foremost.
    """
    given = queue.given.copy()
    free = queue.capacity - int(given.sum())
    waiting = np.flatnonzero(given == 0)
    order = waiting[np.lexsort((queue.submit[waiting], queue.remaining[waiting]))][:LOOKED_AT]
    movable = queue.running & (queue.held_s >= KEEPS)
    runners = np.flatnonzero(queue.running)
    by_end = runners[np.argsort(queue.remaining[runners], kind="stable")]
    released = np.cumsum(given[by_end])
    for j in order:
        need = int(queue.gpus[j])
        half = max(1, int(np.ceil(SMALLEST * need)))
        if free < half:
            soon = int(np.searchsorted(released, need - free))
            if soon < by_end.size and queue.remaining[by_end[soon]] <= KEEPS:
                continue
            free += _shrunk(queue, given, movable, queue.remaining[j], half - free)
        if free >= half:
            given[j] = min(need, free)
            free -= int(given[j])
    if free > 0:
        _expand(queue, given, free)
    return given


def _shrunk(
    queue: Queue, given: np.ndarray, movable: np.ndarray, remaining: float, wanted: int
) -> int:
    """Shrink the longest running jobs to half, and stop those that have to yield, until enough is free, or do nothing. Returns
    GPUs freed."""
    floor = np.maximum(1, np.ceil(SMALLEST * queue.gpus)).astype(np.int64)
    floor[np.isinf(queue.remaining)] = 0
    could = np.flatnonzero(movable & (given > floor) & (queue.remaining > LONGER * remaining))
    could = could[np.argsort(-queue.remaining[could], kind="stable")]
    freed = np.cumsum(given[could] - floor[could])
    enough = int(np.searchsorted(freed, wanted))
    if enough >= could.size:
        return 0
    chosen = could[: enough + 1]
    given[chosen] = floor[chosen]
    return int(freed[enough])


def _expand(queue: Queue, given: np.ndarray, free: int) -> None:
    """Give what is left to those that end first; a job that has just changed keeps what it has."""
    most = np.minimum(LARGEST * queue.gpus, queue.capacity).astype(np.int64)
    settled = (queue.held_s >= KEEPS) & queue.running & (given == queue.given)
    # a job that ends before a restart pays for itself gains nothing
    could = np.flatnonzero(
        settled & (given < most) & (queue.remaining > KEEPS) & np.isfinite(queue.remaining)
    )
    for j in could[np.argsort(queue.remaining[could], kind="stable")]:
        # to what it asked for, or to twice of that: not by single GPUs, which are not worth a restart
        step = int(queue.gpus[j] if given[j] < queue.gpus[j] else most[j]) - int(given[j])
        if step <= free:
            given[j] += step
            free -= step
        if free == 0:
            return


POLICIES: dict[str, Policy] = {
    "FCFS": fcfs, "EASY": easy, "SJF": sjf, "SRTF": srtf, "LAS": las, "Tiresias": tiresias, "fair": fair, "Arena*": arena,
}  # fmt: skip
