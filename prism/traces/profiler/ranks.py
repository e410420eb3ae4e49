"""Profiler traces of one or many ranks as one trace."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import xarray as xr
from tqdm import tqdm

from prism.model.signature import stable_hash
from prism.traces.profiler import matching
from prism.traces.profiler.device_ops import RankSteps
from prism.traces.profiler.events import Events, read_kineto
from prism.traces.profiler.execution import enrich, read_executions
from prism.traces.profiler.host_work import HOST
from prism.traces.profiler.matching import Member
from prism.traces.profiler.rank import rank_steps
from prism.traces.records import TraceError, TraceWarning, trace_dataset

#: ranks in names of files, most telling first
_RANK_IN_NAME = tuple(
    re.compile(p, re.IGNORECASE) for p in (r"rank[-_.]?(\d{1,7})", r"worker[-_.]?(\d{1,7})")
)
#: bytes from which files are read by several processes
WORTH_PROCESSES = 20 << 20
LATE_START = "late start"
#: a clock correction from which it is said, ns
SKEW_WORTH_A_WORD = 100_000


def read_profiler(
    files: Sequence[Path],
    *,
    ranks: Sequence[int] | None = None,
    executions: Sequence[Path] = (),
    progress: bool = False,
) -> xr.Dataset:
    """Read Kineto JSON of one job, a file a rank, with execution traces beside them; see
    `prism.traces.read_trace`."""
    events = _read_all(files, progress)
    numbers = _rank_numbers(events, ranks)
    _check_complete(events, numbers)
    order = np.argsort(numbers)
    each = [rank_steps(events[i], numbers[i]) for i in order]
    del events
    said = read_executions(executions)
    for r in each:
        if r.rank in said and not enrich(r, said[r.rank]):
            r.notes["execution traces with another number of collectives, not used"] += 1
    return _joined(each, [files[i] for i in order])


def _read_all(files: Sequence[Path], progress: bool) -> list[Events]:
    size = sum(f.stat().st_size for f in files if f.is_file())
    bar = tqdm(total=len(files), unit="file", desc="reading", disable=not progress, leave=False)
    with bar:
        if len(files) == 1 or size < WORTH_PROCESSES:
            out = []
            for f in files:
                out.append(read_kineto(f))
                bar.update()
            return out
        with ProcessPoolExecutor() as pool:
            out = []
            for e in pool.map(read_kineto, files):
                out.append(e)
                bar.update()
            return out


def _rank_numbers(events: list[Events], ranks: Sequence[int] | None) -> list[int]:
    """Rank of each file: as given, as recorded, from its name, or 0 for a single one."""
    if ranks is not None:
        if len(ranks) != len(events):
            raise TraceError(f"{len(ranks)} ranks given for {len(events)} files")
        numbers = [int(r) for r in ranks]
    else:
        numbers = []
        for e in events:
            rank = e.rank if e.rank is not None and e.rank >= 0 else _from_name(e.path)
            if rank is None:
                if len(events) > 1:
                    raise TraceError(
                        f"{e.path}: tells no rank (no distributedInfo, none in the file name); pass ranks="
                    )
                rank = 0
            numbers.append(rank)
    first: dict[int, Path] = {}
    for e, r in zip(events, numbers, strict=True):
        if r in first:
            raise TraceError(f"{first[r]} and {e.path} are both rank {r}")
        if not 0 <= r < 1 << 22:
            raise TraceError(f"{e.path}: rank {r} is out of range")
        first[r] = e.path
    return numbers


def _from_name(path: Path) -> int | None:
    for pattern in _RANK_IN_NAME:
        found = pattern.search(path.name)
        if found:
            rank = int(found.group(1))
            warnings.warn(
                f"{path}: rank {rank} taken from the file's name", TraceWarning, stacklevel=5
            )
            return rank
    return None


def _check_complete(events: list[Events], numbers: list[int]) -> None:
    worlds = {e.world_size for e in events if e.world_size}
    if len(worlds) > 1:
        raise TraceError(f"files of jobs of different size: world sizes {sorted(worlds)}")
    told = [1 + max(c.ranks) for e in events for c in e.communication.values() if c.ranks]
    told += [c.group_size for e in events for c in e.communication.values() if c.group_size]
    world = max([*worlds, *told], default=0)
    if world <= len(numbers):
        return
    if len(numbers) > 1:
        here = set(numbers)
        absent = next(r for r in range(world) if r not in here)
        raise TraceError(
            f"rank {absent} is missing ({len(numbers)} of {world} ranks given): what the others wait for "
            "cannot be known; add its file, or give a single rank"
        )
    warnings.warn(
        f"{events[0].path}: one rank of {world}: its collectives also hold the wait for the others",
        TraceWarning,
        stacklevel=4,
    )


def _joined(each: list[RankSteps], files: list[Path]) -> xr.Dataset:
    steps = matching.common_steps(each)
    each = [_select(r, steps) for r in each]
    found = matching.members(each)
    if len(each) > 1 and not found:
        raise TraceError(
            f"{files[0]} and {len(files) - 1} more: no communication between {len(each)} ranks in any step"
        )
    skew = matching.align_clocks(each, found) if len(each) > 1 else np.zeros(1, np.int64)
    begin = _begins(each)
    length = np.max([r.end.max(axis=1) for r in each], axis=0) - begin
    matching.check_skew(each, skew, length)
    matching.check_ends(each, found, length)
    notes = sum((r.notes for r in each), Counter())
    apart = sum(len(m.group) == 1 and (m.said.group_size or 1) > 1 for m in found)
    if apart:
        notes["collectives whose members are not known: they hold the wait for each other"] = apart
    if np.max(np.abs(skew), initial=0) > SKEW_WORTH_A_WORD:
        notes["largest correction of a rank's clock, us"] = int(np.max(np.abs(skew))) // 1000
    _tell(notes, len(each))
    return _dataset(each, found, steps, begin, skew, notes, files)


def _begins(each: list[RankSteps]) -> np.ndarray:
    """When each step of the job begins, ns: where the first rank was free for it, but not before every rank
    had ended the step before, so that steps do not overlap. Ranks are cut to it."""
    begin = np.min([r.origin for r in each], axis=0)
    ends = np.max([r.end.max(axis=1) for r in each], axis=0)
    follows = np.diff(each[0].steps) == 1
    begin[1:] = np.where(follows, np.maximum(begin[1:], ends[:-1]), begin[1:])
    for r in each:
        r.origin = np.maximum(r.origin, begin)
        r.start = np.maximum(r.start, begin[:, None])
        r.end = np.maximum(r.end, r.start)
    return begin


def _select(r: RankSteps, steps: np.ndarray) -> RankSteps:
    at = np.searchsorted(r.steps, steps)
    r.steps, r.origin, r.start, r.end = r.steps[at], r.origin[at], r.start[at], r.end[at]
    return r


def _tell(notes: Counter, ranks: int) -> None:
    """One warning with all counts that a reader has to know."""
    silent = ("device ops", "share of ops aligned, per mille")
    said = [f"{reason}: {n}" for reason, n in sorted(notes.items()) if n and reason not in silent]
    share = notes["share of ops aligned, per mille"] / ranks / 1000
    if share < 0.995:
        said.append(f"{share:.1%} of device ops are found in every step, the others are left out")
    if said:
        warnings.warn("; ".join(said), TraceWarning, stacklevel=6)


def _dataset(
    each: list[RankSteps],
    found: list[Member],
    steps: np.ndarray,
    begin: np.ndarray,
    skew: np.ndarray,
    notes: Counter,
    files: list[Path],
) -> xr.Dataset:
    world = max(max(r.rank for r in each) + 1, *(r.world_size or 0 for r in each))
    of_rank: dict[int, dict[int, Member]] = {r.rank: {} for r in each}
    for m in found:
        of_rank[m.rank][m.op] = m
    columns: dict[str, list] = {n: [] for n in
                                ("name", "rank", "stream", "seq", "role", "group", "shape", "dtype")}  # fmt: skip
    starts, ends, edges, offset = [], [], [], 0
    late = len(each) > 1 and any(np.any(r.origin > begin) for r in each)
    for r in each:
        if late:
            _add_late_start(r, begin)
        _columns_of(r, of_rank[r.rank], world, columns)
        edges += [(a + offset, b + offset, why) for a, b, why in r.edges]
        starts.append((r.start - begin[:, None]) * 1e-9)
        ends.append((r.end - begin[:, None]) * 1e-9)
        offset += len(r.name)
    start, end = np.concatenate(starts, axis=1), np.concatenate(ends, axis=1)
    inferred = sum(why == "inferred" for _, _, why in edges)
    return trace_dataset(
        steps=steps,
        start=start,
        duration=end - start,
        coordinates=columns,
        edges=edges,
        provenance={
            "files": ", ".join(f.name for f in files),
            "format": "kineto",
            "ranks": len(each),
            "world_size": world,
            "clock_skew_ns": [int(s) for s in skew],
            "edges_inferred": inferred,
            "edges_recorded": len(edges) - inferred,
            "aligned": notes["share of ops aligned, per mille"] / len(each) / 1000,
            "left_out": {k: int(v) for k, v in sorted(notes.items()) if "per mille" not in k},
            "step": "from when the ranks were free (the host's mark, or the end of the step before) to "
            "the end of the last op",
        },
    )


def _add_late_start(r: RankSteps, begin: np.ndarray) -> None:
    """The time by which a rank begins later than the first, as an op before all of its own."""
    first: dict[str, int] = {}
    for op in np.argsort(np.median(r.start, axis=0), kind="stable"):
        first.setdefault(r.stream[op], int(op))
    new = len(r.name)
    r.start = np.column_stack([r.start, begin])
    r.end = np.column_stack([r.end, r.origin])
    r.name.append(LATE_START)
    r.shape.append(f"rank {r.rank}")  # how late a rank is says nothing about another
    r.stream.append(LATE_START)
    r.edges += [(new, op, "start") for op in first.values()]


def _columns_of(r: RankSteps, members: dict[int, Member], world: int, columns: dict) -> None:
    count: Counter = Counter()
    for op, name in enumerate(r.name):
        m = members.get(op)
        key = (r.stream[op], name, r.shape[op])
        columns["rank"].append(r.rank)
        columns["stream"].append(r.stream[op])
        if m is not None:
            columns["name"].append(m.kind)
            columns["seq"].append(m.nth)
            columns["role"].append(
                "pp" if m.kind == "transfer"
                else matching.role_of(m.group, world, m.said.about)
            )  # fmt: skip
            columns["group"].append(",".join(map(str, m.group)))
            columns["shape"].append(f"{m.said.elements}" if m.said.elements else "")
            columns["dtype"].append(m.said.dtype)
            continue
        columns["name"].append(_readable(name))
        columns["seq"].append(count[key])
        columns["role"].append(
            "gap" if name == LATE_START else "host" if r.stream[op] == HOST else "compute"
        )
        columns["group"].append("")
        columns["shape"].append(_clipped(r.shape[op], 120))
        columns["dtype"].append("")
        count[key] += 1


def _readable(name: str) -> str:
    """A kernel's name without return type; long ones are cut, with a hash of what was cut."""
    return _clipped(name.removeprefix("void "), 96)


def _clipped(text: str, size: int) -> str:
    if len(text) <= size:
        return text
    return f"{text[:size]}~{stable_hash(text[size:]) & 0xFFFFFF:06x}"
