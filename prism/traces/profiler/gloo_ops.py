"""Ranks without a device: collectives of gloo between stretches of work of the host.

The profiler writes the call (``c10d::allreduce_``) on the calling thread and the transfer
(``gloo:all_reduce``) where it runs, without group or number: they match by order, and the group is taken to
be every rank. A host that does nothing until a transfer ends, and goes on, has waited for it.
"""

from __future__ import annotations

import numpy as np

from prism.traces.profiler.device_ops import DeviceOps, Windows
from prism.traces.profiler.events import Events, Kind
from prism.traces.profiler.fields import Communication

TRANSFER, CALL = "gloo:", "c10d::"
#: a host idle for less than this did not wait, ns
LEAST_WAIT = 10_000


def has_device(events: Events) -> bool:
    """Tell whether anything ran on a device."""
    return bool(np.any(events.kind == Kind.DEVICE))


def gloo_ops(events: Events, windows: Windows) -> DeviceOps:
    """Transfers of gloo in the place of device ops, each with the call that asked for it."""
    names = events.text(events.name)
    row = np.array([i for i, n in enumerate(names) if n.startswith(TRANSFER)], np.int64)
    calls = np.array([i for i, n in enumerate(names) if n.startswith(CALL)], np.int64)
    call = _asked(events, row, calls)
    at = np.where(call >= 0, events.start[np.maximum(call, 0)], events.start[row])
    start = events.start[row]
    return DeviceOps(
        row=row,
        call=call,
        step=windows.of(at),
        stream=np.full(row.size, -1, np.int64),
        start=start,
        end=start + events.duration[row],
        name=events.name[row],
        shape=events.shape[row],
        communication={
            i: _said(events, int(r), int(c)) for i, (r, c) in enumerate(zip(row, call, strict=True))
        },
    )


def _asked(events: Events, row: np.ndarray, calls: np.ndarray) -> np.ndarray:
    """The call of each transfer: the first of its kind before it that nobody has taken."""
    place = {int(r): i for i, r in enumerate(row)}
    out = np.full(row.size, -1, np.int64)
    waiting: dict[str, list[int]] = {}
    order = sorted([*calls, *row], key=lambda e: (int(events.start[e]), e in place))
    for e in order:
        name = events.texts[events.name[e]]
        if name.startswith(CALL):
            waiting.setdefault(_kind(name, CALL), []).append(int(e))
        elif queue := waiting.get(_kind(name, TRANSFER)):
            out[place[e]] = queue.pop(0)
    return out


def _kind(name: str, prefix: str) -> str:
    """``c10d::allreduce_`` asks for ``gloo:all_reduce``."""
    return name.removeprefix(prefix).replace("_", "").removesuffix("base")


def _said(events: Events, row: int, call: int) -> Communication:
    name = events.texts[events.name[row]].removeprefix(TRANSFER)
    peer = events.peer.get(call)
    return Communication(
        name=name,
        dtype="",
        elements=0,
        group_size=None,
        ranks=None,
        about="",
        seq=None,
        src=peer if name == "recv" else None,
        dst=peer if name == "send" else None,
    )


def waits(
    events: Events, ops: DeviceOps, member: np.ndarray
) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """Transfers that the host waits for in every step: (op, idle since (step,), end (step,)), ns."""
    found = []
    busy = _busy(events)
    for op in range(member.shape[1]):
        rows = member[:, op]
        if np.any(ops.call[rows] < 0):
            continue
        thread = events.thread[ops.call[rows]]
        end = ops.end[rows]
        since = np.array([_idle_since(busy[t], e) for t, e in zip(thread, end, strict=True)])
        if np.all((since >= 0) & (end - since > LEAST_WAIT)):
            found.append((op, since, end))
    return found


def _busy(events: Events) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Per thread, when ops without ops inside began and ended."""
    out = {}
    names = events.text(events.name)
    work = np.array([not n.startswith(TRANSFER) for n in names])
    for thread in np.unique(events.thread):
        own = np.flatnonzero((events.thread == thread) & (events.kind == Kind.OP) & work)
        start, end = events.start[own], events.start[own] + events.duration[own]
        inner = np.ones(own.size, bool)
        inner[:-1] = start[1:] >= end[:-1]  # the next op begins after this one: nothing inside
        out[int(thread)] = (start[inner], end[inner])
    return out


def _idle_since(busy: tuple[np.ndarray, np.ndarray], moment: int) -> int:
    """When the thread's last op before a moment ended; -1 if one is running then, or there is none."""
    start, end = busy
    k = int(np.searchsorted(start, moment, side="right")) - 1
    if k < 0 or k + 1 >= start.size or end[k] > moment:
        return -1
    return int(end[k])
