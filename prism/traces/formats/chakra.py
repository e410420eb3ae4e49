"""Chakra execution traces (MLCommons), protobuf and JSON: a graph with durations, mostly without times.

Nodes name what they wait for, so nothing is inferred. Where no start times are recorded, ops start as soon
as the graph allows: such a "step time" is computed, not measured, and the Dataset says so.

The protobuf form is a sequence of length-delimited messages, ``GlobalMetadata`` first. Of ``Node`` the
fields 1 id, 2 name, 3 type, 4 ctrl_deps, 5 data_deps, 6 start_time_micros, 7 duration_micros and 10 attr
are read; of an attribute 1 name and its numeric or text value. That is little enough to read directly.
"""

from __future__ import annotations

import gzip
import re
import warnings
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xarray as xr

from prism.base import schema
from prism.model.engine.montecarlo import propagate
from prism.traces.graph import build_graph
from prism.traces.records import TraceError, TraceWarning, trace_dataset

#: node types of the schema
COMPUTE, SEND, RECEIVE, COLLECTIVE = 4, 5, 6, 7
COLLECTIVES = (
    "all_reduce", "reduce", "all_gather", "gather", "scatter", "broadcast", "all_to_all",
    "reduce_scatter", "reduce_scatter", "barrier",
)  # fmt: skip
LARGEST = 1 << 30
_RANK = re.compile(r"(\d{1,7})(?=(?:\.[a-z_]+)*\.(?:et|json)(?:\.gz)?$)")
_COUNT_IN_NAME = re.compile(r"\(\d+\)$")


class Node(msgspec.Struct):
    """Node of an execution trace as far as it is read, in either form; times in microseconds."""

    id: int = msgspec.field(default=-1, name="Id")
    name: str = msgspec.field(default="", name="Name")
    kind: int = msgspec.field(default=0, name="NodeType")
    control: list[int] = msgspec.field(default_factory=list, name="ctrlDeps")
    data: list[int] = msgspec.field(default_factory=list, name="data_deps")
    start: float | None = None
    duration: float = msgspec.field(default=0.0, name="runtime")
    is_cpu: bool = msgspec.field(default=False, name="is_cpu_op")
    collective: int = msgspec.field(default=-1, name="comm_type")
    size: int = msgspec.field(default=0, name="comm_size")


class _Document(msgspec.Struct):
    workload_graph: list[Node]


def read_chakra(files: Sequence[Path], ranks: Sequence[int] | None = None) -> xr.Dataset:
    """Read the traces of one job, a file a rank; see `prism.traces.read_trace`.

    Raises
    ------
    TraceError
        Damaged files, cycles, no durations, sends and receives (whose partners most writers leave out),
        collectives that do not match. Dependencies on nodes that are not there are ignored: writers leave
        out nodes of the host that nothing was measured of.
    """
    numbers = [_rank(f, len(files)) for f in files] if ranks is None else [int(r) for r in ranks]
    if len(set(numbers)) < len(files) or len(numbers) != len(files):
        raise TraceError(f"{len(files)} files, ranks {sorted(numbers)}: one file a rank")
    order = np.argsort(numbers)
    each = [(numbers[i], files[i], _nodes(files[i])) for i in order]
    for _, path, nodes in each:
        if not any(n.duration > 0 for n in nodes):
            raise TraceError(
                f"{path}: its nodes have no durations, so there is no step time to speak of"
            )
    return _dataset(each)


def _rank(path: Path, files: int) -> int:
    found = _RANK.search(path.name)
    if found is None and files > 1:
        raise TraceError(f"{path}: no rank in the file name (as in name.0.et); pass ranks=")
    return int(found.group(1)) if found else 0


def _nodes(path: Path) -> list[Node]:
    text = whole_file(path)
    nodes = (
        _from_json(path, text) if text.lstrip()[:1] == b"{" else list(_from_protobuf(path, text))
    )
    if not nodes:
        raise TraceError(f"{path}: holds no nodes")
    seen = {n.id for n in nodes}
    if len(seen) < len(nodes):
        raise TraceError(f"{path}: ids of nodes are repeated")
    if any(n.kind in (SEND, RECEIVE) for n in nodes):
        raise TraceError(f"{path}: sends and receives are not read; collectives are")
    for n in nodes:
        for time in (n.duration, 0.0 if n.start is None else n.start):
            if not 0 <= time < 1e13:
                raise TraceError(f"{path}: node {n.id} ({n.name[:40]}) has a time of {time} us")
    return nodes


def whole_file(path: Path) -> bytes:
    """Bytes of a plain or gzip file, up to `LARGEST`."""
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            file: Any = gzip.GzipFile(fileobj=raw) if packed else raw
            text = file.read(LARGEST + 1)
    except (OSError, EOFError, zlib.error) as fault:
        raise TraceError(f"{path}: truncated or not readable: {fault}") from fault
    if len(text) > LARGEST:
        raise TraceError(f"{path}: over {LARGEST >> 20} MB")
    if not text:
        raise TraceError(f"{path}: empty file")
    return text


def _from_json(path: Path, text: bytes) -> list[Node]:
    try:
        return msgspec.json.decode(text, type=_Document, strict=False).workload_graph
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
        raise TraceError(f"{path}: not a Chakra graph: {fault}") from None


# protobuf


def _from_protobuf(path: Path, text: bytes) -> Iterator[Node]:
    try:
        for i, message in enumerate(_messages(text)):
            if i > 0:  # the first holds metadata
                yield _node(message)
    except (ValueError, IndexError) as fault:
        raise TraceError(f"{path}: damaged or truncated protobuf: {fault}") from None


def _messages(text: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(text):
        size, at = _varint(text, at)
        if at + size > len(text):
            raise ValueError(f"a message of {size} bytes at {at} goes beyond the end")
        yield text[at : at + size]
        at += size


def _varint(text: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = text[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError(f"a number at byte {at} does not end")


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(message, at)
            yield number, value
            continue
        if wire == 2:
            size, at = _varint(message, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire} in field {number}")
        if at + size > len(message):
            raise ValueError(f"field {number} goes beyond its message")
        yield number, message[at : at + size]
        at += size


def _node(message: bytes) -> Node:
    node = Node()
    for number, value in _fields(message):
        if number in (1, 3, 6, 7):
            if not isinstance(value, int):
                raise ValueError(f"field {number} of a node is no number")
            if number == 1:
                node.id = value
            elif number == 3:
                node.kind = value
            elif number == 6:
                node.start = float(value)
            else:
                node.duration = float(value)
        elif number == 2 and isinstance(value, bytes):
            node.name = value.decode("utf-8", "replace")
        elif number in (4, 5):
            (node.control if number == 4 else node.data).extend(_numbers(value))
        elif number == 10 and isinstance(value, bytes):
            _attribute(node, value)
    return node


def _numbers(value: int | bytes) -> list[int]:
    """Repeated numbers, packed or not."""
    if isinstance(value, int):
        return [value]
    out, at = [], 0
    while at < len(value):
        number, at = _varint(value, at)
        out.append(number)
    return out


_ATTRIBUTES = {
    "is_cpu_op": "is_cpu", "comm_type": "collective", "comm_size": "size",
}  # fmt: skip


def _attribute(node: Node, message: bytes) -> None:
    name, value = "", None
    for number, content in _fields(message):
        if number == 1 and isinstance(content, bytes):
            name = content.decode("utf-8", "replace")
        elif number > 2 and isinstance(content, int):
            value = content
    if name in _ATTRIBUTES and value is not None:
        field = _ATTRIBUTES[name]
        setattr(node, field, bool(value) if field == "is_cpu" else value)


# to the common Dataset


def _dataset(each: list[tuple[int, Path, list[Node]]]) -> xr.Dataset:
    everyone = ",".join(str(r) for r, _, _ in each)
    columns: dict[str, list] = {n: [] for n in
                                ("name", "rank", "seq", "role", "group", "shape")}  # fmt: skip
    starts, durations, edges = [], [], []
    computed = False
    kinds: dict[int, list[str]] = {}
    for rank, path, nodes in each:
        offset = len(columns["name"])
        at = {n.id: i for i, n in enumerate(nodes)}
        own = _edges(path, nodes, at)
        edges += [(a + offset, b + offset, "recorded") for a, b in own]
        start, known = _starts(path, nodes, own)
        computed |= not known
        starts.append(start)
        durations.append([n.duration * 1e-6 for n in nodes])
        kinds[rank] = _columns(rank, nodes, everyone, columns)
    _check(kinds, each)
    start = np.concatenate(starts)[None, :]
    duration = np.concatenate(durations)[None, :]
    trace = trace_dataset(
        steps=[0],
        start=start - start.min(),
        duration=duration,
        coordinates=columns,
        edges=edges,
        provenance={
            "files": ", ".join(p.name for _, p, _ in each),
            "format": "chakra",
            "ranks": len(each),
            "step": "computed from the graph"
            if computed
            else "from the first start to the last end",
        },
    )
    return _scheduled(trace) if computed else trace


def _scheduled(trace: xr.Dataset) -> xr.Dataset:
    """Starts as soon as the graph allows, for a trace without times. The members of a collective took
    unlike long, since they waited for each other: it takes as long as the shortest."""
    warnings.warn(
        f"{schema.provenance(trace)['files']}: no start times are recorded, so the step time is computed from "
        "the graph and not measured",
        TraceWarning,
        stacklevel=5,
    )
    graph = build_graph(trace)
    raw = trace["duration"].values[0]
    duration = np.full(graph.dag.n_ops, np.inf)
    np.minimum.at(duration, graph.op_of_record, raw)
    _, finish = propagate(graph.dag, duration[:, None])
    end = finish[graph.op_of_record, 0]
    net = duration[graph.op_of_record]
    return trace.assign(
        start=trace["start"].copy(data=(end - net)[None, :]),
        duration=trace["duration"].copy(data=net[None, :]),
    )


def _edges(path: Path, nodes: list[Node], at: dict[int, int]) -> list[tuple[int, int]]:
    """Dependencies. Files leave out nodes of the host that nothing was measured of (3 is the root)."""
    found = {(at[d], i) for i, n in enumerate(nodes) for d in (*n.control, *n.data) if d in at}
    itself = {(a, b) for a, b in found if a == b}
    if itself:
        # a fault of the converter that wrote it: an op that was merged into its parent
        warnings.warn(
            f"{path}: {len(itself)} nodes wait for themselves; that is ignored",
            TraceWarning,
            stacklevel=5,
        )
    return sorted(found - itself)


def _starts(path: Path, nodes: list[Node], edges: list[tuple[int, int]]) -> tuple[np.ndarray, bool]:
    """Start of each node, s (0 where it was not recorded), and whether all were.

    Raises
    ------
    TraceError
        If dependencies form a cycle.
    """
    after: list[list[int]] = [[] for _ in nodes]
    waiting = np.zeros(len(nodes), int)
    for a, b in edges:
        after[a].append(b)
        waiting[b] += 1
    ready = [i for i in range(len(nodes)) if waiting[i] == 0]
    for i in ready:
        for b in after[i]:
            waiting[b] -= 1
            if waiting[b] == 0:
                ready.append(b)
    if len(ready) < len(nodes):
        stuck = next(n for i, n in enumerate(nodes) if waiting[i] > 0)
        raise TraceError(
            f"{path}: dependencies form a cycle through node {stuck.id} ({stuck.name[:40]})"
        )
    known = all(n.start is not None for n in nodes) and any(n.start for n in nodes)
    return np.array([float(n.start or 0.0) if known else 0.0 for n in nodes]) * 1e-6, known


def _columns(rank: int, nodes: list[Node], everyone: str, columns: dict[str, list]) -> list[str]:
    """Append the columns of one rank; kinds of its collectives in order."""
    on_device = any(n.kind == COLLECTIVE and not n.is_cpu for n in nodes)
    kinds: list[str] = []
    count: dict[str, int] = {}
    for n in nodes:
        name = _COUNT_IN_NAME.sub("", n.name)
        collective = n.kind == COLLECTIVE and not (n.is_cpu and on_device)
        if collective:
            known = 0 <= n.collective < len(COLLECTIVES)
            name = COLLECTIVES[n.collective] if known else name
            kinds.append(name)
        role = "world" if collective else "host" if n.is_cpu else "compute"
        columns["name"].append(name[:96])
        columns["rank"].append(rank)
        columns["seq"].append(len(kinds) - 1 if collective else count.get(name, 0))
        columns["role"].append(role)
        columns["group"].append(everyone if collective else "")
        columns["shape"].append(f"{n.size}B" if n.size > 0 else "")
        count[name] = count.get(name, 0) + 1
    return kinds


def _check(kinds: dict[int, list[str]], each: list) -> None:
    first, *others = kinds
    for r in others:
        if len(kinds[r]) != len(kinds[first]):
            raise TraceError(
                f"{each[0][1]}: rank {first} has {len(kinds[first])} collectives, rank {r} has "
                f"{len(kinds[r])}: they do not match"
            )
        for i, (a, b) in enumerate(zip(kinds[first], kinds[r], strict=True)):
            if a != b:
                raise TraceError(
                    f"{each[0][1]}: collective {i} is {a} on rank {first} and {b} on rank {r}"
                )
