"""Pipeline schedules as data: ordered ops of every rank."""

from collections.abc import Callable

from prism.schedules.dualpipe import dualpipe, dualpipev
from prism.schedules.generators import (
    gpipe,
    gpipe_lifo,
    interleaved,
    one_f_one_b,
    zb_h1,
    zb_h2,
    zbv,
)
from prism.schedules.schedule import Op, Schedule, ScheduleError, read_schedule

#: name -> function of (ranks, microbatches, chunks)
SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "gpipe_lifo": gpipe_lifo,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zbv": zbv,
    "dualpipe": dualpipe,
    "dualpipev": dualpipev,
}

__all__ = [
    "SCHEDULES",
    "Op",
    "Schedule",
    "ScheduleError",
    "dualpipe",
    "dualpipev",
    "gpipe",
    "gpipe_lifo",
    "interleaved",
    "one_f_one_b",
    "read_schedule",
    "zb_h1",
    "zb_h2",
    "zbv",
]
