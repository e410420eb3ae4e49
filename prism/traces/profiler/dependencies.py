"""Dependencies of the device ops and host work of one rank.

Recorded: the launch of each op, stream waits on events, synchronising calls. Inferred, and marked so, where
the profiler does not say: a collective waits for the compute launched before it, as c10d makes it; an op
that starts late, at the end of an op of another stream, waits for that one; a host call that returns when
an op ends waits for it. An inferred dependency has to hold in every measured step.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from prism.traces.profiler.device_ops import (
    PROMPT,
    ROUNDING,
    DeviceOps,
    RankSteps,
    Times,
    Windows,
    times_of,
)
from prism.traces.profiler.events import Events, Kind
from prism.traces.profiler.host_work import add_host_work

#: part of the run from which work of a step that is hidden behind the one before is worth a word
LEAST_CUT = 0.001
#: a graph does not leave its stream idle so long, ns
UNRECORDED = 500_000
#: an op that starts this long after its launch, and so long after all ops that it is known to wait for,
#: waits for something else, ns
LATE_AFTER_LAUNCH, LATE = 20_000, 10_000


def assemble(
    events: Events,
    rank: int,
    windows: Windows,
    ops: DeviceOps,
    chosen: np.ndarray,
    member: np.ndarray,
    notes: Counter,
) -> RankSteps:
    """Put host work and device ops of the steps together; see `rank_steps`.

    Parameters
    ----------
    chosen : ndarray (step,)
        Windows that are used.
    member : ndarray (step, op)
        Rows of `ops`, by start in a usual step.
    """
    origin = _origins(events, windows, ops, chosen)
    times = times_of(events, ops, member)
    usual = len(chosen) // 2
    texts = events.texts
    names = [texts[c] for c in ops.name[member[usual]]]
    shapes = [texts[c] for c in ops.shape[member[usual]]]
    # transfers of gloo have no stream
    streams = [f"{s}" if s >= 0 else "" for s in ops.stream[member[usual]]]
    communication = {
        i: ops.communication[int(r)]
        for i, r in enumerate(member[usual])
        if int(r) in ops.communication
    }
    edges = [
        *_recorded_waits(events, ops, member[usual], times, usual),
        *_inferred_waits(times, streams, communication),
    ]
    edges += _late_starts(times, streams, edges, communication)
    idle = _idle_in_graphs(ops, member, times, usual)
    if idle > UNRECORDED:
        notes["idle inside of graph launches (kernels not recorded), us a step"] = idle // 1000
    out = RankSteps(
        rank=rank,
        world_size=events.world_size,
        steps=windows.number[chosen],
        origin=origin,
        start=times.start,
        end=times.end,
        name=names,
        shape=shapes,
        stream=streams,
        communication=communication,
        edges=edges,
        notes=notes,
    )
    add_host_work(out, events, windows, ops, chosen, member, times)
    _cut(out, origin, len(names))
    return out


def _cut(out: RankSteps, origin: np.ndarray, device_ops: int) -> None:
    """Let no op begin before the origin: what it did earlier ran beside the step before. Counted, since
    the durations that are cut are those that pools will see."""
    device = np.arange(out.start.shape[1]) < device_ops
    hidden = np.minimum(out.end, origin[:, None]) - out.start
    total = int(np.sum(np.where(device & (hidden > 0), hidden, 0)))
    if total > LEAST_CUT * max(int(np.sum(out.end.max(axis=1) - origin)), 1):
        out.notes["device work that ran beside the step before, cut off, us a step"] = total // (
            1000 * origin.size
        )
    out.start = np.maximum(out.start, origin[:, None])
    out.end = np.maximum(out.end, out.start)


def _origins(events: Events, windows: Windows, ops: DeviceOps, chosen: np.ndarray) -> np.ndarray:
    """When the rank was free for each step: the host's mark, or the end of what was launched earlier."""
    origin = windows.start[chosen].copy()
    if not windows.marked:
        return origin
    # an op without a known launch that belongs to no step was launched before the first one
    launch = np.where(ops.call >= 0, events.start[np.maximum(ops.call, 0)], windows.start[0] - 1)
    launch = np.where((ops.call < 0) & (ops.step >= 0), windows.start[ops.step], launch)
    for i, w in enumerate(chosen):
        earlier = ops.end[launch < windows.start[w]]
        if earlier.size:
            origin[i] = max(origin[i], int(earlier.max()))
    return origin


def _idle_in_graphs(ops: DeviceOps, member: np.ndarray, times: Times, usual: int) -> int:
    """Time between neighbours on a stream that one call launched, ns in a usual step. A graph keeps its
    stream busy: where it does not, its kernels are not in the trace."""
    stream, call = ops.stream[member[usual]], ops.call[member[usual]]
    total = 0
    for s in np.unique(stream):
        own = np.flatnonzero(stream == s)
        together = (call[own[1:]] == call[own[:-1]]) & (call[own[1:]] >= 0)
        between = times.start[usual, own[1:]] - times.end[usual, own[:-1]]
        total += int(between[together & (between > UNRECORDED)].sum())
    return total


def _obeyed(times: Times, before: int, after: int) -> bool:
    """Tell whether `after` started when `before` had ended, in every step."""
    return bool(np.all(times.start[:, after] >= times.end[:, before] - ROUNDING))


def _recorded_waits(
    events: Events, ops: DeviceOps, usual: np.ndarray, times: Times, step: int
) -> list[tuple[int, int, str]]:
    """Stream waits on events whose record is known: the next op of the waiting stream waits for the last
    one that its event's stream had been given when the event was recorded."""
    rows = [r for r in events.of(Kind.SYNC) if "wait" in events.texts[events.name[r]].lower()]
    rows = [r for r in rows if (events.wait[int(r)].record or -1) >= 0]
    if not rows:
        return []
    calls = events.of(Kind.CALL)
    called = {int(events.correlation[c]): int(events.start[c]) for c in calls}
    streams, launch = ops.stream[usual], times.launch[step]
    found = []
    for r in rows:
        wait = events.wait[int(r)]
        issued = called.get(int(events.correlation[r]), int(events.start[r]))
        recorded = called.get(int(wait.record or -1))
        if recorded is None:
            continue
        waiting = np.flatnonzero((streams == events.stream[r]) & (launch > issued))
        awaited = np.flatnonzero((streams == wait.stream) & (launch >= 0) & (launch < recorded))
        if waiting.size == 0 or awaited.size == 0:
            continue
        edge = int(awaited[np.argmax(launch[awaited])]), int(waiting[np.argmin(launch[waiting])])
        if _obeyed(times, *edge):
            found.append((*edge, "wait"))
    return list(dict.fromkeys(found))


def _inferred_waits(
    times: Times, streams: list[str], communication: dict
) -> list[tuple[int, int, str]]:
    """A collective waits for the compute that was launched before it, since c10d makes its stream wait."""
    stream = np.array(streams)
    compute = np.setdiff1d(np.arange(stream.size), list(communication))
    launch = np.median(times.launch, axis=0)
    compute = compute[launch[compute] >= 0]
    compute = compute[np.argsort(launch[compute], kind="stable")]
    found = []
    for op in communication:
        if launch[op] < 0:
            continue
        other = compute[stream[compute] != stream[op]]
        k = np.searchsorted(launch[other], launch[op]) - 1
        if k >= 0 and _obeyed(times, int(other[k]), op):
            found.append((int(other[k]), op, "inferred"))
    return found


def _late_starts(
    times: Times, streams: list[str], edges: list, communication: dict
) -> list[tuple[int, int, str]]:
    """Ops that start late, just when an op of another stream ends: they wait for it."""
    stream = np.array(streams)
    known = times.launch + (LATE_AFTER_LAUNCH - LATE)
    for s in set(streams) - {""}:
        own = np.flatnonzero(stream == s)
        known[:, own[1:]] = np.maximum(known[:, own[1:]], times.end[:, own[:-1]])
    for before, after, _ in edges:
        known[:, after] = np.maximum(known[:, after], times.end[:, before])
    # a first op without a launch waits for nothing that is known
    late = (np.mean((times.start - known > LATE) & (times.launch >= 0), axis=0) > 0.5) & (
        stream != ""
    )
    usual = times.start.shape[0] // 2
    order = np.argsort(times.end[usual], kind="stable")
    ends = times.end[usual][order]
    found = []
    for op in np.flatnonzero(late):
        begin = times.start[usual, op]
        a = np.searchsorted(ends, begin - PROMPT)
        b = np.searchsorted(ends, begin + ROUNDING, side="right")
        near = order[a:b][stream[order[a:b]] != stream[op]]
        near = [int(n) for n in near[::-1] if _obeyed(times, int(n), int(op))]
        if near:
            found.append((near[0], int(op), "inferred"))
    return found
