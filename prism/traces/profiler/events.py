"""Kineto and PyTorch profiler JSON of one rank: events as columns.

Categories come in either case, times as integers, decimals or text, relative to ``baseTimeNanoseconds`` or
not. Times become whole nanoseconds without passing through a float that cannot hold them.
"""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from prism.traces.profiler.fields import (
    ABSENT,
    HIGHEST_RANK,
    Args,
    Communication,
    Event,
    ExactEvent,
    Wait,
    communication_of,
    digits,
    ranks_of,
    stream_of,
)
from prism.traces.profiler.json_stream import EventStream
from prism.traces.profiler.times import LONGEST_NS, exact_ns, float_ns, integers, needs_exact
from prism.traces.records import TraceError


class Kind(enum.IntEnum):
    """Kind of a profiler event."""

    DEVICE = 0  # kernel, memcpy, memset
    CALL = 1  # runtime or driver call
    OP = 2  # CPU op
    NOTE = 3  # annotation
    SYNC = 4  # what a stream waits for


_KINDS = {
    "kernel": Kind.DEVICE, "gpu_memcpy": Kind.DEVICE, "gpu_memset": Kind.DEVICE,
    "memcpy": Kind.DEVICE, "memset": Kind.DEVICE, "concurrent_kernel": Kind.DEVICE,
    "cuda_runtime": Kind.CALL, "cuda_driver": Kind.CALL, "runtime": Kind.CALL,
    "hip_runtime": Kind.CALL, "hip_api": Kind.CALL, "xpu_runtime": Kind.CALL,
    "privateuse1_runtime": Kind.CALL,
    "cpu_op": Kind.OP, "operator": Kind.OP,
    "user_annotation": Kind.NOTE, "cuda_sync": Kind.SYNC,
}  # fmt: skip


@dataclass
class Events:
    """Events of one rank as columns, sorted by start.

    Attributes
    ----------
    kind : ndarray (event,), `Kind`
    name, shape : ndarray (event,), int32
        Index into `texts`. The shape of a CPU op is its input dims, of a kernel its grid and block.
    start, duration : ndarray (event,), int64, nanoseconds
    thread : ndarray (event,), int32
    stream, correlation, external : ndarray (event,), int64; -1 for none
    communication, wait : dict of event to what it says
    peer : dict of event to int
        The other rank of sends and receives of c10d.
    groups : dict of process group's name to its ranks
        As this process calls them.
    lost : Counter
        Events left out, by reason.
    """

    path: Path
    rank: int | None
    world_size: int | None
    texts: list[str]
    kind: np.ndarray
    name: np.ndarray
    shape: np.ndarray
    start: np.ndarray
    duration: np.ndarray
    thread: np.ndarray
    stream: np.ndarray
    correlation: np.ndarray
    external: np.ndarray
    communication: dict[int, Communication] = field(default_factory=dict)
    wait: dict[int, Wait] = field(default_factory=dict)
    peer: dict[int, int] = field(default_factory=dict)
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    lost: Counter = field(default_factory=Counter)

    def of(self, kind: Kind) -> np.ndarray:
        """Indices of events of one kind, by start."""
        return np.flatnonzero(self.kind == kind)

    def text(self, codes: np.ndarray) -> np.ndarray:
        """Texts of codes, as objects."""
        return np.array(self.texts, dtype=object)[codes]


def read_kineto(path: Path) -> Events:
    """Read one file.

    Raises
    ------
    TraceError
        Unreadable, empty, truncated or damaged file; an event whose fields have wrong types.
    """
    columns = _Columns(path)
    stream = EventStream(path, list[Event])
    for batch in stream:
        columns.add(batch)
        if columns.inexact:
            break
    if columns.inexact:
        columns = _Columns(path, exact=True)
        stream = EventStream(path, list[ExactEvent])
        for batch in stream:
            columns.add(batch)
    return columns.events(stream)


class _Columns:
    """Collects batches of events into columns."""

    def __init__(self, path: Path, *, exact: bool = False) -> None:
        self.path, self.exact, self.inexact = path, exact, False
        self._nanoseconds: Callable = exact_ns if exact else float_ns
        self._code: dict[str, int] = {"": 0}
        self._threads: dict[Any, int] = {}
        self._kind_of: dict[str | None, int] = {}
        self._tells: dict[Any, bool] = {}
        self._squeezed: dict[Any, str] = {}
        self._parts: list[dict[str, np.ndarray]] = []
        self._communication: dict[int, Communication] = {}
        self._wait: dict[int, Wait] = {}
        self._peer: dict[int, int] = {}
        self._devices: set[tuple[int, Any]] = set()
        self._size = 0
        self.lost: Counter = Counter()

    def add(self, batch: Sequence[Event]) -> None:
        for kind, events in self._by_kind(batch).items():
            if not self._timed(events):
                lost = len(events)
                events = [e for e in events if e.ts is not None and e.dur is not None]
                self.lost["no time, or not a number"] += lost - len(events)
            start = list(map(_TS, events))
            if not self.exact and needs_exact(start):
                self.inexact = True
                return
            if events:
                self._parts.append(self._part(kind, events, start))
                self._size += len(events)

    @staticmethod
    def _timed(events: Sequence[Event]) -> bool:
        return None not in map(_TS, events) and None not in map(_DUR, events)

    def _by_kind(self, batch: Sequence[Event]) -> dict[Kind, list[Event]]:
        """Complete events of the kinds that are read; anything else is skipped at once."""
        cats = list(map(_CAT, batch))
        for cat in set(cats) - self._kind_of.keys():
            self._kind_of[cat] = int(_KINDS.get((cat or "").lower(), -1))
        kinds = np.fromiter(map(self._kind_of.__getitem__, cats), np.int8, len(cats))
        out: dict[Kind, list[Event]] = {}
        for kind in Kind:
            of_kind = list(compress(batch, (kinds == kind).tolist()))
            events = [e for e in of_kind if e.ph in _COMPLETE]
            if len(events) < len(of_kind):
                pairs = sum(e.ph == "B" for e in of_kind)
                if pairs:
                    self.lost["begin-end pairs, which are not read"] += pairs
            if kind == Kind.CALL:
                events = self._telling(events)
            elif kind == Kind.OP:
                events = [e for e in events if _useful(e)]
            if events:
                out[kind] = events
        return out

    def _telling(self, calls: list[Event]) -> list[Event]:
        """Calls that may launch, copy, record, wait or synchronise."""
        names = list(map(_NAME, calls))
        for name in set(names) - self._tells.keys():
            self._tells[name] = not (isinstance(name, str) and _SILENT.search(name))
        return list(compress(calls, map(self._tells.__getitem__, names)))

    def _part(self, kind: Kind, events: list[Event], start: list) -> dict[str, np.ndarray]:
        code, threads, n = self._code, self._threads, len(events)
        args = list(map(_ARGS, events))
        if None in args:
            args = [_NONE if a is None else a for a in args]
        nothing, no_text = np.full(n, -1, np.int64), np.zeros(n, np.int32)
        part = {
            "kind": np.full(n, kind, np.int8),
            "name": _codes(_texts(list(map(_NAME, events))), code),
            "thread": _codes(list(map(_TID, events)), threads),
            "start": self._nanoseconds(start),
            "duration": self._nanoseconds(list(map(_DUR, events))),
            "shape": no_text,
            "stream": nothing,
            "correlation": nothing,
            "external": nothing,
        }
        if kind != Kind.NOTE:
            part["external"] = integers(
                [a.external if a.external is not None else a.external_old for a in args]
            )
        if kind in (Kind.DEVICE, Kind.OP):
            shapes = self._dims if kind == Kind.OP else self._shapes
            part["shape"] = _codes(shapes(args), code)
        if kind in (Kind.DEVICE, Kind.CALL, Kind.SYNC):
            part["correlation"] = integers([a.correlation for a in args])
        if kind == Kind.DEVICE:
            self._devices |= {(digits(a.stream), a.device) for a in args if a.device is not None}
            part["stream"] = integers(
                [stream_of(a.stream, e.tid) for a, e in zip(args, events, strict=True)]
            )
        elif kind == Kind.SYNC:
            part["stream"] = integers([digits(a.stream) for a in args])
        self._facts(kind, args)
        if kind == Kind.OP and not _PEERED.isdisjoint(map(_NAME, events)):
            self._peers(events, args)
        return part

    def _peers(self, events: Sequence[Event], args: Sequence[Args]) -> None:
        """``c10d::send`` and its like have their peer as third argument."""
        for i, (e, a) in enumerate(zip(events, args, strict=True), start=self._size):
            if e.name in _PEERED and a.inputs is not ABSENT:
                parts = bytes(a.inputs).decode().strip("[] ").split(",")
                if len(parts) > 2 and (peer := digits(parts[2])) >= 0:
                    self._peer[i] = peer

    def _dims(self, args: Sequence[Args]) -> list[str]:
        """Input dims of CPU ops, as text without spaces."""
        seen = self._squeezed
        keys = [bytes(a.dims if a.dims is not ABSENT else a.dims_old) for a in args]
        for key in set(keys) - seen.keys():
            seen[key] = _squeezed(key)
        return list(map(seen.__getitem__, keys))

    def _shapes(self, args: Sequence[Args]) -> list[str]:
        """Input dims, else grid and block, else bytes, as text without spaces."""
        seen = self._squeezed
        out = []
        for a in args:
            dims = a.dims if a.dims is not ABSENT else a.dims_old
            key = bytes(dims) if dims is not ABSENT else (bytes(a.grid), bytes(a.block))
            text = seen.get(key)
            if text is None:
                text = seen[key] = _squeezed(key)
            if a.graph_node is not None:
                text += f" node {a.graph_node}"
            out.append(text if text or a.bytes is None else f"{a.bytes:g}B")
        return out

    def _facts(self, kind: Kind, args: Sequence[Args]) -> None:
        if kind in (Kind.DEVICE, Kind.OP):
            if not any(map(_COLLECTIVE, args)) and not any(map(_GROUP, args)):
                return  # by far the most batches
            for i, a in enumerate(args, start=self._size):
                if a.collective is not None or a.group_ranks is not None:
                    self._communication[i] = communication_of(a)
        elif kind == Kind.SYNC:
            for i, a in enumerate(args, start=self._size):
                self._wait[i] = Wait(a.wait_stream, a.wait_record)

    def events(self, stream: EventStream) -> Events:
        header = stream.header
        streams = [s for s, _ in self._devices if s >= 0]
        if len(set(streams)) < len(streams):
            raise TraceError(
                f"{self.path}: streams of one number on several devices; a file is of one rank, and a rank has "
                "one device"
            )
        if stream.repaired:
            self.lost["pieces with tokens that are no JSON, repaired"] = stream.repaired
        info = header.get("distributedInfo")
        info = info if isinstance(info, dict) else {}
        world = _whole(info.get("world_size"))
        if world is not None and not 0 < world <= HIGHEST_RANK:
            raise TraceError(f"{self.path}: a world size of {world} is out of range")
        groups = _groups(info.get("pg_config"))
        base = _whole(header.get("baseTimeNanoseconds")) or 0
        if abs(base) > LONGEST_NS:
            raise TraceError(f"{self.path}: baseTimeNanoseconds {base} is no time")
        names = ("kind", "name", "thread", "start", "duration", "shape", "stream", "correlation",
                 "external")  # fmt: skip
        columns = {
            n: np.concatenate([p[n] for p in self._parts]) if self._parts else np.zeros(0, np.int64)
            for n in names
        }
        good = self._valid(columns)
        order = np.flatnonzero(good)
        order = order[np.argsort(columns["start"][order], kind="stable")]
        new = np.full(good.size, -1, np.int64)
        new[order] = np.arange(order.size)
        columns = {n: v[order] for n, v in columns.items()}
        columns["start"] = columns["start"] + base
        return Events(
            path=self.path,
            rank=_whole(info.get("rank")),
            world_size=world,
            groups=groups,
            texts=list(self._code),
            **columns,
            communication={
                int(new[i]): _with_ranks(v, groups)
                for i, v in self._communication.items()
                if new[i] >= 0
            },
            wait={int(new[i]): v for i, v in self._wait.items() if new[i] >= 0},
            peer={int(new[i]): v for i, v in self._peer.items() if new[i] >= 0},
            lost=self.lost,
        )

    def _valid(self, c: dict[str, np.ndarray]) -> np.ndarray:
        """Events with a usable time; the others are counted by reason."""
        device = c["kind"] == Kind.DEVICE
        faults = {
            "time out of range": (np.abs(c["start"]) > LONGEST_NS) | (c["duration"] > LONGEST_NS),
            "unfinished (negative duration)": c["duration"] < 0,
            "never completed (time 0 and duration 0)": (
                device & (c["start"] == 0) & (c["duration"] == 0)
            ),
        }
        bad = np.zeros(c["start"].size, bool)
        for reason, fault in faults.items():
            if np.any(fault & ~bad):
                self.lost[reason] += int(np.sum(fault & ~bad))
            bad |= fault
        return ~bad


_NONE = Args()
_COMPLETE = ("X", None)
_TS, _DUR, _CAT, _NAME, _TID, _ARGS = map(attrgetter, ("ts", "dur", "cat", "name", "tid", "args"))
_COLLECTIVE, _GROUP = attrgetter("collective"), attrgetter("group_ranks")
_PEERED = {"c10d::send", "c10d::recv_"}
_SPOKEN = ("ProfilerStep", "gloo:", "c10d::")
#: calls that neither give the device work nor wait for it
_SILENT = re.compile(r"Query|GetAttrib|IsCapturing|Occupancy|PeekAt|INVALID|SetAttrib|GetLast|Priority|"
                     r"CaptureInfo|ElapsedTime|GetDevice|DriverGet|FuncGet|PointerGet|Malloc|PushCall|PopCall")  # fmt: skip


def _useful(e: Event) -> bool:
    """CPU ops that tell a shape, a collective, or a step (which old files call an op)."""
    a = e.args
    if a is not None and (
        a.dims is not ABSENT or a.dims_old is not ABSENT or a.collective is not None
    ):
        return True
    return isinstance(e.name, str) and e.name.startswith(_SPOKEN)


def _texts(names: list) -> list[str]:
    return [n if n.__class__ is str else "" if n is None else str(n) for n in names]


def _codes(values: list, code: dict) -> np.ndarray:
    """Index of each value in `code`, which grows, int32 (n,)."""
    for new in sorted(set(values) - code.keys(), key=str):
        code[new] = len(code)
    return np.fromiter(map(code.__getitem__, values), np.int32, len(values))


def _squeezed(json: bytes | tuple[bytes, bytes]) -> str:
    if isinstance(json, bytes):
        return b"".join(json.split()).decode()
    grid, block = json
    return f"grid{_squeezed(grid)}block{_squeezed(block)}" if grid else ""


def _whole(value: Any) -> int | None:
    try:
        return None if value is None or isinstance(value, bool) else int(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _with_ranks(said: Communication, groups: dict[str, tuple[int, ...]]) -> Communication:
    """Ranks from the header where the profiler cut the list short."""
    if said.ranks is None and said.group_name in groups:
        return said._replace(ranks=groups[said.group_name])
    return said


def _groups(config: Any) -> dict[str, tuple[int, ...]]:
    """Process groups that the header names."""
    out = {}
    for entry in config if isinstance(config, list) else []:
        if isinstance(entry, dict) and (ranks := ranks_of(entry.get("ranks"))) is not None:
            out[str(entry.get("pg_name", ""))] = ranks
    return out
