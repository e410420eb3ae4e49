"""The fields of Kineto's events that are read, and what they say.

Names and types are those of libkineto's writer, of all versions in use: keys in either case, streams as
numbers or text, ranks as lists or text that is cut short.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import NamedTuple

import msgspec

HIGHEST_RANK = 1 << 22
_DIGITS = re.compile(r"-?\d{1,18}")

Number = int | float | None
#: what a raw field is that an event does not have
ABSENT = msgspec.Raw()


class Args(msgspec.Struct, gc=False):
    """The arguments of an event that are read; everything else is skipped."""

    correlation: int | None = None
    external: int | None = msgspec.field(default=None, name="External id")
    external_old: int | None = msgspec.field(default=None, name="external id")
    stream: int | str | None = None
    dims: msgspec.Raw = msgspec.field(default=ABSENT, name="Input Dims")
    dims_old: msgspec.Raw = msgspec.field(default=ABSENT, name="Input dims")
    inputs: msgspec.Raw = msgspec.field(default=ABSENT, name="Concrete Inputs")
    device: int | str | None = None
    grid: msgspec.Raw = ABSENT
    block: msgspec.Raw = ABSENT
    bytes: int | float | None = None
    graph_node: int | None = msgspec.field(default=None, name="graph node id")
    collective: str | None = msgspec.field(default=None, name="Collective name")
    dtype: str | None = None
    elements_in: int | None = msgspec.field(default=None, name="In msg nelems")
    elements_out: int | None = msgspec.field(default=None, name="Out msg nelems")
    group_size: int | None = msgspec.field(default=None, name="Group size")
    group_ranks: str | list | None = msgspec.field(default=None, name="Process Group Ranks")
    group_text: str | None = msgspec.field(default=None, name="Process Group Description")
    group_name: str | int | None = msgspec.field(default=None, name="Process Group Name")
    seq: int | None = msgspec.field(default=None, name="Seq")
    src: int | None = msgspec.field(default=None, name="Src Rank")
    dst: int | None = msgspec.field(default=None, name="Dst Rank")
    wait_stream: int | None = msgspec.field(default=None, name="wait_on_stream")
    wait_record: int | None = msgspec.field(default=None, name="wait_on_cuda_event_record_corr_id")


class Event(msgspec.Struct, gc=False):
    """One event of the file, times in microseconds."""

    ph: str | None = None
    cat: str | None = None
    name: str | int | None = None
    tid: int | str | None = None
    ts: Number = None
    dur: Number = None
    args: Args | None = None


class ExactEvent(Event, gc=False):
    """The same with times as decimal text, for files whose times no float can hold."""

    ts: Decimal | None = None
    dur: Decimal | None = None


class Communication(NamedTuple):
    """Facts that a collective or transfer records about itself; None where it does not."""

    name: str
    dtype: str
    elements: int
    group_size: int | None
    ranks: tuple[int, ...] | None
    about: str
    seq: int | None
    src: int | None
    dst: int | None
    group_name: str = ""


class Wait(NamedTuple):
    """A stream's wait on what another stream had been given before an event was recorded."""

    stream: int | None
    record: int | None


def stream_of(stream: int | str | None, tid: int | str | None) -> int:
    """A device op's stream: as told, else its thread."""
    found = digits(stream)
    return found if found != -1 else digits(tid)


def digits(text: int | str | None) -> int:
    """A number, or the first in a text (``stream 7``); -1 for none."""
    if isinstance(text, str):
        found = _DIGITS.search(text)
        return int(found.group()) if found else -1
    return -1 if text is None or text == 4294967295 else text


def communication_of(a: Args) -> Communication:
    """Read the facts of a collective from the arguments of an event."""
    return Communication(
        name=a.collective or "",
        dtype=a.dtype or "",
        elements=max(a.elements_in or 0, a.elements_out or 0),
        group_size=a.group_size,
        ranks=ranks_of(a.group_ranks),
        about=a.group_text or "",
        seq=a.seq,
        src=a.src,
        dst=a.dst,
        group_name="" if a.group_name is None else str(a.group_name),
    )


def ranks_of(ranks: str | list | None) -> tuple[int, ...] | None:
    """Ranks of a group; None where they are not told, or cut short by the profiler."""
    if not isinstance(ranks, str | list):
        return None
    if isinstance(ranks, str):
        if "..." in ranks:
            return None
        ranks = [int(r) for r in _DIGITS.findall(ranks)]
    if not ranks or not all(type(r) is int and 0 <= r < HIGHEST_RANK for r in ranks):
        return None
    return tuple(sorted(set(ranks)))
