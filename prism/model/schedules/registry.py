"""The pipeline schedules by name."""

from collections.abc import Callable

from prism.model.schedules.bidirectional import dualpipe, dualpipev
from prism.model.schedules.generators import (
    gpipe,
    gpipe_lifo,
    interleaved,
    one_f_one_b,
    zb_h1,
    zb_h2,
    zbv,
)
from prism.model.schedules.schedule import Schedule

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
