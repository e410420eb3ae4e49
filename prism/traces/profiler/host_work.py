"""The host's part of a step: work between the calls that launch, and calls that wait for the device.

A host call that returns when an op ends waited for it: a synchronisation, a blocking copy, a launch into a
full queue. What is left between calls is taken for work, whatever it was: a chain, which replays exactly.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import numpy as np

from prism.traces.profiler import gloo_ops
from prism.traces.profiler.device_ops import PROMPT, ROUNDING, DeviceOps, RankSteps, Times, Windows
from prism.traces.profiler.events import Events, Kind

HOST = "host"
SYNCHRONISES = re.compile(r"Synchronize", re.IGNORECASE)
#: a launch that takes so long waits for room in the queue, ns
QUEUE_FULL = 100_000
#: a call has to return after what it waits for in so many of the steps
MOSTLY = 0.8
#: a blocking call returns so soon after what it waited for, ns
RETURNS = 100_000


@dataclass(frozen=True)
class _Call:
    """A call of the host that every step has: when, (step,), and the ops it launches or waits for."""

    name: str
    start: np.ndarray
    end: np.ndarray
    launches: tuple[int, ...]
    awaits: tuple[tuple[int, str], ...]


def add_host_work(
    out: RankSteps,
    events: Events,
    windows: Windows,
    ops: DeviceOps,
    chosen: np.ndarray,
    member: np.ndarray,
    times: Times,
) -> None:
    """Append the stretches of host work between calls, and the calls that wait for the device, to `out`."""
    launches = _launching_calls(out, ops, member, times)
    if not launches:
        return
    calls = launches + _waiting_calls(events, windows, chosen, times, out.stream)
    if "" in out.stream:
        calls += [
            _Call("wait", since, end, (), ((op, "inferred"),))
            for op, since, end in gloo_ops.waits(events, ops, member)
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
    out: RankSteps, ops: DeviceOps, member: np.ndarray, times: Times
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


def _blocks(name: str, times: Times, op: int) -> bool:
    """A copy whose call returns after the copy has ended, in every step, blocks."""
    copies = "memcpy" in name.lower() or name.startswith("Copy")
    return bool(copies and np.all(times.returned[:, op] >= times.end[:, op]))


def _for_room(times: Times, op: int) -> tuple[tuple[int, str], ...]:
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


def _due(times: Times, step: int, start: np.ndarray, end: np.ndarray) -> list[int]:
    """The op, launched before a call, that ends as the call returns in a step; none if there is none."""
    before = np.flatnonzero((times.launch[step] >= 0) & (times.launch[step] < start[step]))
    ended = times.end[step, before]
    due = before[(ended <= end[step] + ROUNDING) & (ended >= end[step] - RETURNS)]
    due = due[times.end[step, due] > start[step]]
    return [int(due[np.argmax(times.end[step, due])])] if due.size else []


def _waiting_calls(
    events: Events, windows: Windows, chosen: np.ndarray, times: Times, streams: list[str]
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
    times: Times,
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
