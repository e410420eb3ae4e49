"""Pipeline schedules: pure functions from (stages, microbatches) to the ops of each stage in order.

An op is ``(kind, microbatch)``: ``F`` forward, ``BW`` the whole backward.
"""

from __future__ import annotations

from collections.abc import Callable

Op = tuple[str, int]


def gpipe(stages: int, microbatches: int) -> list[list[Op]]:
    """All forwards, then all backwards (Huang et al. 2019).

    Examples
    --------
    >>> gpipe(1, 2)
    [[('F', 0), ('F', 1), ('BW', 0), ('BW', 1)]]
    """
    order = [("F", m) for m in range(microbatches)] + [("BW", m) for m in range(microbatches)]
    return [list(order) for _ in range(stages)]


def one_f_one_b(stages: int, microbatches: int) -> list[list[Op]]:
    """One forward, one backward after a warm-up of ``stages - 1 - stage`` forwards
    (PipeDream-Flush, Narayanan et al. 2021).

    Examples
    --------
    >>> one_f_one_b(2, 2)[0]
    [('F', 0), ('F', 1), ('BW', 0), ('BW', 1)]
    """
    orders = []
    for stage in range(stages):
        warmup = min(stages - 1 - stage, microbatches)
        order: list[Op] = [("F", m) for m in range(warmup)]
        for m in range(microbatches - warmup):
            order += [("F", warmup + m), ("BW", m)]
        order += [("BW", m) for m in range(microbatches - warmup, microbatches)]
        orders.append(order)
    return orders


SCHEDULES: dict[str, Callable[[int, int], list[list[Op]]]] = {
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
}
