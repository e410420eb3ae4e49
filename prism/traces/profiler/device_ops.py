"""One rank's profiler events as the ops of its steps: who launched what, in which step, after what.

Ops are those of the device (kernels, copies) and the stretches of host work between launches. A device op
belongs to the step in which it was *launched*: the device runs behind the host, and its annotations lie.
Steps are cut where the rank was free for the next one: at the later of the host's mark and the end of the
step before. Thus step times add up to the time of the run, and a step that starts on a busy device does
not pay for the one before.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from prism.traces.profiler.events import Events, Kind
from prism.traces.profiler.fields import Communication
from prism.traces.profiler.nesting import innermost
from prism.traces.records import TraceError

STEP = re.compile(r"ProfilerStep#?\s*(\d{1,15})$")
COLLECTIVE = re.compile(r"nccl|rccl", re.IGNORECASE)
#: overlaps of ops on one stream below this are rounding or programmatic launches, ns
ROUNDING = 5_000
#: what waits for an op goes on so soon after its end, ns
PROMPT = 30_000


@dataclass
class RankSteps:
    """Ops of one rank, the same in each step.

    Attributes
    ----------
    rank : int
    world_size : int or None
    steps : ndarray (step,)
        Step numbers.
    origin : ndarray (step,), int64, ns
        When the rank was free for the step.
    start, end : ndarray (step, op), int64, ns
        Not before the origin.
    name, shape, stream : list of str (op,)
    communication : dict of op to Communication
        Every collective or transfer, with what it says of itself.
    edges : list of (earlier op, later op, why)
    notes : Counter
        What was left out, and how well steps align, for the provenance.
    """

    rank: int
    world_size: int | None
    steps: np.ndarray
    origin: np.ndarray
    start: np.ndarray
    end: np.ndarray
    name: list[str]
    shape: list[str]
    stream: list[str]
    communication: dict[int, Communication]
    edges: list[tuple[int, int, str]] = field(default_factory=list)
    notes: Counter = field(default_factory=Counter)


@dataclass(frozen=True)
class Windows:
    """Steps as the host marked them, by start."""

    number: np.ndarray
    start: np.ndarray
    end: np.ndarray
    marked: bool

    def of(self, time: np.ndarray) -> np.ndarray:
        """Index of the step that holds each moment, -1 for none."""
        at = np.searchsorted(self.start, time, side="right") - 1
        inside = (at >= 0) & (time < self.end[np.maximum(at, 0)])
        return np.where(inside, at, -1)


def step_windows(events: Events) -> Windows:
    """Steps marked by the profiler; the whole file as step 0 where there are none.

    Raises
    ------
    TraceError
        If marks overlap or a number comes back: then the file holds two runs.
    """
    rows = np.concatenate([events.of(Kind.NOTE), events.of(Kind.OP)])
    found = {}
    for row, name in zip(rows, events.text(events.name[rows]), strict=True):
        match = STEP.match(name)
        if match and int(match.group(1)) in found:
            earlier = found[int(match.group(1))]
            if abs(int(events.start[row]) - int(events.start[earlier])) > 1_000_000:
                raise TraceError(
                    f"{events.path}: step {match.group(1)} is marked twice, so the file holds more than one "
                    "run"
                )
        elif match:
            found[int(match.group(1))] = row
    if not found:
        ends = events.start + events.duration
        first, last = int(events.start.min(initial=0)), int(ends.max(initial=0))
        if events.start.size:
            first = int(events.start.min())
        return Windows(np.zeros(1, np.int64), np.array([first]), np.array([last + 1]), False)
    numbers = np.array(list(found))
    rows = np.array(list(found.values()))
    order = np.argsort(events.start[rows], kind="stable")
    numbers, rows = numbers[order], rows[order]
    if np.any(np.diff(numbers) < 0):
        raise TraceError(
            f"{events.path}: step numbers go back ({numbers[:8].tolist()}), so the file holds more than one run"
        )
    start, end = events.start[rows], events.start[rows] + events.duration[rows]
    if np.any(start[1:] < end[:-1] - 1_000_000):
        at = int(np.flatnonzero(start[1:] < end[:-1] - 1_000_000)[0])
        raise TraceError(
            f"{events.path}: steps {numbers[at]} and {numbers[at + 1]} overlap, so the file holds more "
            "than one run"
        )
    return Windows(numbers, start, end, True)


@dataclass(frozen=True)
class DeviceOps:
    """Device ops of a file, one row each, by start."""

    row: np.ndarray
    call: np.ndarray
    step: np.ndarray
    stream: np.ndarray
    start: np.ndarray
    end: np.ndarray
    name: np.ndarray
    shape: np.ndarray
    communication: dict[int, Communication]

    @property
    def launched(self) -> np.ndarray:
        """Whether the launch is known."""
        return self.call >= 0


def device_ops(events: Events, windows: Windows) -> DeviceOps:
    """Device ops with their launches, steps and shapes."""
    row = events.of(Kind.DEVICE)
    row = row[np.argsort(events.start[row], kind="stable")]
    call = _launches(events, row)
    step = _steps(events, row, call, windows)
    shape, communication = _described(events, row, call)
    start = events.start[row]
    return DeviceOps(
        row=row,
        call=call,
        step=step,
        stream=events.stream[row],
        start=start,
        end=start + events.duration[row],
        name=events.name[row],
        shape=shape,
        communication=communication,
    )


def _launches(events: Events, row: np.ndarray) -> np.ndarray:
    """The call that launched each device op, -1 where it is not known."""
    calls = events.of(Kind.CALL)
    out = np.full(row.size, -1, np.int64)
    if calls.size == 0:
        return out
    by_id = [(events.correlation, row[events.correlation[row] >= 0])]
    by_id.append((events.external, row[events.correlation[row] < 0]))
    place = {int(r): i for i, r in enumerate(row)}
    for key, asked in by_id:
        if asked.size == 0:
            continue
        order = calls[np.argsort(key[calls], kind="stable")]
        order = order[key[order] >= 0]
        # the last call of this id that began before the op
        at = np.searchsorted(key[order], key[asked], side="left")
        ends = np.searchsorted(key[order], key[asked], side="right")
        for op, a, b in zip(asked[at < ends], at[at < ends], ends[at < ends], strict=True):
            begun = order[a:b]
            if b - a > 1:
                begun = begun[events.start[begun] <= events.start[op]]
            if begun.size:
                out[place[int(op)]] = begun[-1]
    return out


def _steps(events: Events, row: np.ndarray, call: np.ndarray, windows: Windows) -> np.ndarray:
    """Step of each op: of its launch; without a launch, of the op before it on its stream."""
    known = call >= 0
    if not known.any():
        return windows.of(events.start[row])
    step = np.where(known, windows.of(events.start[call]), -2)
    for stream in np.unique(events.stream[row]):
        own = np.flatnonzero(events.stream[row] == stream)
        have = np.flatnonzero(step[own] != -2)
        if have.size == 0:
            # a stream without any launch record: by time
            step[own] = windows.of(events.start[row[own]])
            continue
        last = np.searchsorted(have, np.arange(own.size), side="right") - 1
        filled = np.where(last >= 0, step[own[have[np.maximum(last, 0)]]], -1)
        step[own] = np.where(step[own] == -2, filled, step[own])
    return step


def _described(
    events: Events, row: np.ndarray, call: np.ndarray
) -> tuple[np.ndarray, dict[int, Communication]]:
    """Shapes (codes) and what collectives say, from the op itself or from the CPU op around its launch."""
    shape = events.shape[row].copy()
    cpu = events.of(Kind.OP)
    known = np.flatnonzero(call >= 0)
    # several kernels of one launch (a graph) are not described by what launched them
    _, index, count = np.unique(call[known], return_inverse=True, return_counts=True)
    single = known[count[index] == 1]
    shaped = cpu[events.shape[cpu] > 0]
    at = events.start[call[single]]
    around = innermost(
        events.thread[shaped],
        events.start[shaped],
        events.start[shaped] + events.duration[shaped],
        events.thread[call[single]],
        at,
    )
    inside = around >= 0
    shape[single[inside]] = events.shape[shaped[around[inside]]]
    _by_external_id(events, row, shape, shaped, np.setdiff1d(np.arange(row.size), single[inside]))
    return shape, _communications(events, row, call, cpu)


def _by_external_id(events: Events, row, shape, shaped, ops) -> None:
    """Shapes of ops whose launch lies in no CPU op: by External id, where it is not the op's own
    correlation and names one CPU op only."""
    own = events.external[row]
    ops = ops[(own[ops] >= 0) & (own[ops] != events.correlation[row[ops]])]
    ids, first, count = np.unique(events.external[shaped], return_index=True, return_counts=True)
    by_id = {int(i): int(events.shape[shaped[k]])
             for i, k, n in zip(ids, first, count, strict=True) if n == 1}  # fmt: skip
    for i in ops:
        shape[i] = by_id.get(int(own[i]), shape[i])


def _communications(events: Events, row, call, cpu) -> dict[int, Communication]:
    """Find the communication record of each device op: its own, or the one before its launch."""
    texts = events.texts
    out: dict[int, Communication] = {}
    records = np.array([r for r in cpu if r in events.communication
                        and events.communication[r].name != "wait"], np.int64)  # fmt: skip
    used: set[int] = set()
    for i, r in enumerate(row):
        said = events.communication.get(int(r))
        name = texts[events.name[r]]
        described = said is not None and bool(said.name)
        if not described and not COLLECTIVE.search(name):
            continue
        before = -1
        if call[i] >= 0:
            same = records[events.thread[records] == events.thread[call[i]]]
            k = np.searchsorted(events.start[same], events.start[call[i]], side="right") - 1
            before = int(same[k]) if k >= 0 else -1
        if described:
            out[i] = said
            used.add(before)  # its record describes no other kernel
        else:
            if before >= 0 and before not in used:
                used.add(before)
                out[i] = events.communication[before]
            else:
                out[i] = said or Communication("", "", 0, None, None, "", None, None, None)
    return out


@dataclass(frozen=True)
class Times:
    """Device ops that every step has: ns, (step, op); -1 where a launch is not known.

    Attributes
    ----------
    start, end : ndarray
    launch, returned : ndarray
        When the call that launched the op began and returned.
    """

    start: np.ndarray
    end: np.ndarray
    launch: np.ndarray
    returned: np.ndarray


def times_of(events: Events, ops: DeviceOps, member: np.ndarray) -> Times:
    """Times of rows of `ops`, (step, op)."""
    call = ops.call[member]
    known = call >= 0
    at = np.where(known, events.start[np.maximum(call, 0)], -1)
    returned = np.where(known, at + events.duration[np.maximum(call, 0)], -1)
    return Times(ops.start[member], ops.end[member], at, returned)
