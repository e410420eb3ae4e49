"""What device ops and host work of one rank wait for.

Recorded: the launch of each op, stream waits on events, synchronising calls. Inferred, and marked so, where
the profiler does not say: a collective waits for the compute launched before it, as c10d makes it; an op
that starts late, at the end of an op of another stream, waits for that one; a host call that returns when
an op ends waits for it. An inferred dependency has to hold in every measured step.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import numpy as np

from prism.traces import cpu
from prism.traces.device import (
    ROUNDING,
    DeviceOps,
    RankSteps,
    Windows,
)
from prism.traces.kineto import Events, Kind

HOST = "host"
SYNCHRONISES = re.compile(r"Synchronize", re.IGNORECASE)
#: a launch that takes so long waits for room in the queue, ns
QUEUE_FULL = 100_000
#: part of the run from which work of a step that is hidden behind the one before is worth a word
LEAST_CUT = 0.001
#: a graph does not leave its stream idle so long, ns
UNRECORDED = 500_000
#: an op that starts this long after its launch, and so long after all ops that it is known to wait for,
#: waits for something else, ns
LATE_AFTER_LAUNCH, LATE = 20_000, 10_000
#: and it starts so soon after that has ended, ns
PROMPT = 30_000
#: a synchronising call has to return after what it waits for in so many of the steps
MOSTLY = 0.8
#: a blocking call returns so soon after what it waited for, ns
RETURNS = 100_000


@dataclass(frozen=True)
class _Times:
    """Device ops of the template over steps: ns, (step, op)."""

    start: np.ndarray
    end: np.ndarray
    launch: np.ndarray  # start of the launching call, -1 where it is not known
    returned: np.ndarray  # its end


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
    times = _times(events, ops, member)
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
    _add_host(out, events, windows, ops, chosen, member, times)
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


def _times(events: Events, ops: DeviceOps, member: np.ndarray) -> _Times:
    start, end = ops.start[member], ops.end[member]
    call = ops.call[member]
    known = call >= 0
    at = np.where(known, events.start[np.maximum(call, 0)], -1)
    returned = np.where(known, at + events.duration[np.maximum(call, 0)], -1)
    return _Times(start, end, at, returned)


def _idle_in_graphs(ops: DeviceOps, member: np.ndarray, times: _Times, usual: int) -> int:
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


def _obeyed(times: _Times, before: int, after: int) -> bool:
    """Whether `after` started when `before` had ended, in every step."""
    return bool(np.all(times.start[:, after] >= times.end[:, before] - ROUNDING))


def _recorded_waits(
    events: Events, ops: DeviceOps, usual: np.ndarray, times: _Times, step: int
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
    times: _Times, streams: list[str], communication: dict
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
    times: _Times, streams: list[str], edges: list, communication: dict
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


# host work


@dataclass(frozen=True)
class _Call:
    """A call of the host that every step has: when, (step,), and the ops it launches or waits for."""

    name: str
    start: np.ndarray
    end: np.ndarray
    launches: tuple[int, ...]
    awaits: tuple[tuple[int, str], ...]


def _add_host(
    out: RankSteps,
    events: Events,
    windows: Windows,
    ops: DeviceOps,
    chosen: np.ndarray,
    member: np.ndarray,
    times: _Times,
) -> None:
    """Append the stretches of host work between calls, and the calls that wait for the device."""
    launches = _launching_calls(out, ops, member, times)
    if not launches:
        return
    calls = launches + _waiting_calls(events, windows, chosen, times, out.stream)
    if "" in out.stream:
        calls += [
            _Call("wait", since, end, (), ((op, "inferred"),))
            for op, since, end in cpu.waits(events, ops, member)
        ]
    usual = len(chosen) // 2
    calls.sort(key=lambda c: int(c.start[usual]))
    n = len(out.name)
    free = out.origin.copy()
    starts, ends = [], []

    def add(name: str, shape: str, begin: np.ndarray, end: np.ndarray) -> int:
        starts.append(begin)
        ends.append(end)
        out.name.append(name)
        out.shape.append(shape)
        out.stream.append(HOST)
        return n + len(starts) - 1

    for call in calls:
        begin = np.maximum(call.start, free)
        # each stretch is a kind of its own: what comes next says nothing about how long it takes
        work = add("host", f"{len(starts)} before {call.name}", free, begin)
        out.edges += [(work, op, "launch") for op in call.launches]
        free = begin
        if call.awaits:
            ended = np.maximum.reduce([times.end[:, op] for op, _ in call.awaits])
            back = np.maximum(call.end, begin)
            # recorded ends may lie a little after the return
            wait = add(call.name, "", np.clip(ended, begin, back), back)
            out.edges += [(op, wait, why) for op, why in call.awaits]
            free = back
    if windows.marked:
        add("host", "to the end of the step", free, np.maximum(windows.end[chosen], free))
    out.start = np.column_stack([out.start, *starts])
    out.end = np.column_stack([out.end, *ends])


def _launching_calls(
    out: RankSteps, ops: DeviceOps, member: np.ndarray, times: _Times
) -> list[_Call]:
    """One call for the ops that one call launched; of a graph, the first on each stream."""
    usual = member.shape[0] // 2
    by_call: dict[int, list[int]] = {}
    for op, row in enumerate(member[usual]):
        call = int(ops.call[row])
        if call >= 0 and np.all(times.launch[:, op] >= 0):
            by_call.setdefault(call, []).append(op)
    found = []
    for group in by_call.values():
        first = {out.stream[op] or op: op for op in reversed(group)}
        op = group[0]
        blocking = len(group) == 1 and _blocks(out.name[op], times, op)
        awaits = ((op, "inferred"),) if blocking else _for_room(times, op)
        name = f"{_short(out.name[op])}"
        found.append(
            _Call(
                name=name,
                start=times.launch[:, op],
                end=times.returned[:, op],
                launches=tuple(first.values()),
                awaits=awaits,
            )
        )
    return found


def _blocks(name: str, times: _Times, op: int) -> bool:
    """A copy whose call returns after the copy has ended, in every step, blocks."""
    copies = "memcpy" in name.lower() or name.startswith("Copy")
    return bool(copies and np.all(times.returned[:, op] >= times.end[:, op]))


def _for_room(times: _Times, op: int) -> tuple[tuple[int, str], ...]:
    """What a launch that takes long waits for: the device works off its queue, and one op ends as the call
    returns."""
    long = times.returned[:, op] - times.launch[:, op]
    if np.mean(long > QUEUE_FULL) < MOSTLY:
        return ()
    start, end = times.launch[:, op], times.returned[:, op]
    found = _due(times, int(np.argmax(long)), start, end)
    return tuple(
        (o, "inferred") for o in found if np.mean(times.end[:, o] <= end + PROMPT) >= MOSTLY
    )


def _due(times: _Times, step: int, start: np.ndarray, end: np.ndarray) -> list[int]:
    """The op, launched before a call, that ends as the call returns in a step; none if there is none."""
    before = np.flatnonzero((times.launch[step] >= 0) & (times.launch[step] < start[step]))
    ended = times.end[step, before]
    due = before[(ended <= end[step] + ROUNDING) & (ended >= end[step] - RETURNS)]
    due = due[times.end[step, due] > start[step]]
    return [int(due[np.argmax(times.end[step, due])])] if due.size else []


def _waiting_calls(
    events: Events, windows: Windows, chosen: np.ndarray, times: _Times, streams: list[str]
) -> list[_Call]:
    """Synchronising calls that every step has, at the same place between launches."""
    calls = events.of(Kind.CALL)
    names = events.text(events.name[calls])
    calls = calls[[bool(SYNCHRONISES.search(n)) for n in names]]
    if calls.size == 0:
        return []
    window = windows.of(events.start[calls])
    keyed: list[dict[tuple, int]] = []
    for i, w in enumerate(chosen):
        order = np.argsort(times.launch[i], kind="stable")
        launched = times.launch[i][order]
        seen: Counter = Counter()
        own = {}
        for c in calls[window == w]:
            k = int(np.searchsorted(launched, events.start[c])) - 1
            place = (int(order[k]) if k >= 0 else -1, events.texts[events.name[c]])
            own[(*place, seen[place])] = int(c)
            seen[place] += 1
        keyed.append(own)
    common = [k for k in keyed[0] if all(k in own for own in keyed)]
    found = []
    for key in common:
        rows = np.array([own[key] for own in keyed])
        start, end = events.start[rows], events.start[rows] + events.duration[rows]
        awaits = _awaited(events, rows, start, end, times, np.array(streams))
        if awaits:
            found.append(_Call(key[1], start, end, (), awaits))
    return found


def _awaited(
    events: Events,
    rows: np.ndarray,
    start: np.ndarray,
    end: np.ndarray,
    times: _Times,
    stream: np.ndarray,
) -> tuple[tuple[int, str], ...]:
    """Ops that a synchronising call waits for: of its stream where that is known, of every stream for a
    device; else the op that ends as the call returns."""
    # the step in which the call took longest shows best what it waits for
    usual = int(np.argmax(end - start))
    row = rows[usual]
    before = np.flatnonzero((times.launch[usual] >= 0) & (times.launch[usual] < start[usual]))
    if before.size == 0:
        return ()
    last = {}
    for op in before[np.argsort(times.launch[usual, before], kind="stable")]:
        last[stream[op]] = int(op)
    same = events.correlation == events.correlation[row]
    told = np.flatnonzero(same & (events.kind == Kind.SYNC) & (events.correlation >= 0))
    on = {f"{s}" for s in events.stream[told] if s >= 0}
    name = events.texts[events.name[row]]
    if "Device" in name or "Ctx" in name or "Context" in name:
        candidates = [(op, "sync") for op in last.values()]
    elif on & last.keys():
        candidates = [(last[s], "sync") for s in sorted(on & last.keys())]
    else:
        candidates = [(op, "inferred") for op in _due(times, usual, start, end)]
    return tuple(
        (op, why) for op, why in candidates if np.mean(times.end[:, op] <= end + PROMPT) >= MOSTLY
    )


def _short(name: str) -> str:
    """Enough of a kernel's name to know it."""
    return name if len(name) <= 48 else name[:48]
