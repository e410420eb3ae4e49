"""Policies: who gets how many GPUs next. Planning with a p95 is the same policy with another estimator.

A policy is a function from a `Queue` to the GPUs of each job: whole numbers, or bool for all that it asked for or none. One that does
not look at ``remaining`` plans with no estimate, and says so (``plans = False``): no overrun rule applies to it. One that
depends on how long something has lasted says ``timed = True``, and is asked again after each round also where time goes by events.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Queue:
    """View of a policy: jobs that are submitted and not finished, in order of submission.

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
        Planned work that is left, at the speed of what was asked for. Of a job that has outlived its estimate: 0, or what the
        overrun rule makes of it (`prism.cluster.OVERRUNS`).
    ends_in : ndarray (job,), seconds
        The same as time until the planned end if it runs from now on: at the speed of what it has, with checkpoints, and with a
        restart where it waits.
    late : ndarray (job,), bool
        Whether it has outlived its estimate, under a rule by which it may be stopped for others.
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
    ends_in: np.ndarray
    late: np.ndarray
    attained: np.ndarray
    held_s: np.ndarray
    capacity: int

    @property
    def running(self) -> np.ndarray:
        """Jobs that held GPUs in the last round, bool (job,)."""
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
    are free, and later jobs start now if by plan they do not delay it. Only overdue jobs are
    preempted; they run on GPUs that are otherwise idle."""
    run = np.zeros(queue.gpus.size, bool)
    own = np.flatnonzero(~queue.late)
    in_order = own[np.lexsort((queue.submit[own], ~queue.running[own]))]
    run[in_order] = np.cumsum(queue.gpus[in_order]) <= queue.capacity
    free = queue.capacity - int(queue.gpus[run].sum())
    waiting = in_order[~run[in_order]]
    if waiting.size and free:
        free -= _backfill(queue, run, waiting, free)
    late = np.flatnonzero(queue.late)
    run[late[pack(np.argsort(queue.submit[late], kind="stable"), queue.gpus[late], free)]] = True
    return run


def _backfill(queue: Queue, run: np.ndarray, waiting: np.ndarray, free: int) -> int:
    """Start jobs that do not delay the first that waits. Returns GPUs that they take."""
    head, taken = waiting[0], 0
    by_end = np.flatnonzero(run)[np.argsort(queue.ends_in[run], kind="stable")]
    ends, released = queue.ends_in[by_end], free + np.cumsum(queue.gpus[by_end])
    enough = int(np.searchsorted(released, queue.gpus[head]))
    shadow, spare = np.inf, 0
    if enough < by_end.size:
        shadow = ends[enough]
        # all that are free by then, also those that end at the same time
        spare = int(released[np.searchsorted(ends, shadow, side="right") - 1] - queue.gpus[head])
    in_time = queue.ends_in <= shadow
    could = waiting[1:]
    could = could[(queue.gpus[could] <= free) & (in_time[could] | (queue.gpus[could] <= spare))]
    for j in could:
        need = int(queue.gpus[j])
        if need > free - taken or not (in_time[j] or need <= spare):
            continue
        run[j] = True
        taken += need
        spare -= 0 if in_time[j] else need
        if taken == free:
            break
    return taken


def sjf(queue: Queue) -> np.ndarray:
    """Shortest planned job first; nobody is stopped but those that are late. What does not fit is passed over."""
    order = np.lexsort((queue.submit, queue.remaining, ~queue.running, queue.late))
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


las.plans, las.timed = False, True

#: GPU-seconds at which a job leaves the first queue of `tiresias`: an hour of eight GPUs
FIRST_QUEUE = 8 * 3600.0


def tiresias(queue: Queue) -> np.ndarray:
    """Two queues by attained service, first come first served in each, preemptive (Gu et al., NSDI 2019, discretised two-dimensional
    LAS). Uses no estimate."""
    order = np.lexsort((queue.submit, queue.attained >= FIRST_QUEUE))
    return pack(order, queue.gpus, queue.capacity)


tiresias.plans, tiresias.timed = False, True


def fair(queue: Queue) -> np.ndarray:
    """Max-min fairness by rounds, as Gavel's least-attained-service policy gives it on one type of GPU (Narayanan et al., OSDI
    2020): who has had the smallest part of the time since its submission goes next, for a turn. Uses no estimate."""
    age = np.maximum(queue.now - queue.submit, 1.0)
    order = np.lexsort((queue.submit, queue.attained / (queue.gpus * age), _in_turn(queue)))
    return pack(order, queue.gpus, queue.capacity)


fair.plans, fair.timed = False, True

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
    by_end = runners[np.argsort(queue.ends_in[runners], kind="stable")]
    released = np.cumsum(given[by_end])
    for j in order:
        need = int(queue.gpus[j])
        half = max(1, int(np.ceil(SMALLEST * need)))
        if free < half:
            soon = int(np.searchsorted(released, need - free))
            if soon < by_end.size and queue.ends_in[by_end[soon]] <= KEEPS:
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
    floor[queue.late] = 0
    longer = queue.late | (queue.remaining > LONGER * remaining)
    could = np.flatnonzero(movable & (given > floor) & longer)
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


arena.timed = True

POLICIES: dict[str, Policy] = {
    "FCFS": fcfs, "EASY": easy, "SJF": sjf, "SRTF": srtf, "LAS": las, "Tiresias": tiresias, "fair": fair, "Arena*": arena,
}  # fmt: skip
