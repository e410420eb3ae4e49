"""A plain table of op records, for any profiler that can be brought to one.

One row per op of a step on a rank, CSV or parquet:

===============  ==========================================================================
``rank``         whole number from 0
``step``         whole number; every step has the same ops
``op``           name of the op
``start``        seconds, from any origin that the ranks share
``duration``     seconds, as recorded (communication may include waiting)
``group``        optional: ranks that meet in the op, ``0;1;2``; empty for local work
``stream``       optional: the queue within which ops of a rank run in order (else one a rank)
``role``         optional: one of `prism.model.ROLES` (else compute, or group)
``shape``        optional: what decides the amount of work
``stage``        optional: pipeline stage
``microbatch``   optional: microbatch, -1 for none
===============  ==========================================================================

The n-th op of a name on a rank (and stream, and group) is the same op in every step. A step lasts from its
first start to its last end.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr

from prism.base.tables import TableError, labels, numbers, read_table, require_columns
from prism.model.signature import ROLES
from prism.traces.records import TraceError, trace_dataset

NEEDED = ("rank", "step", "op", "start", "duration")
TEXTS = ("op", "group", "stream", "role", "shape")
WHOLE = ("stage", "microbatch")
HIGHEST_RANK = 1 << 22
#: seconds, about 30 years more than since the epoch
LONGEST = 3e9


def read_record_table(files: Sequence[Path]) -> xr.Dataset:
    """Read tables of records of one job; several files are more ranks or more steps.

    Raises
    ------
    TraceError
        Missing columns, cells that are no times, steps with different ops.
    """
    try:
        tables = [_read(f) for f in files]
        _check_once(tables, files)
        table = pd.concat(tables, ignore_index=True)
    except TableError as fault:
        raise TraceError(str(fault)) from fault
    return _dataset(table, ", ".join(f.name for f in files))


def _check_once(tables: list[pd.DataFrame], files: Sequence[Path]) -> None:
    """A step of a rank is in one file."""
    seen: dict[tuple, Path] = {}
    for table, path in zip(tables, files, strict=True):
        for key in sorted(set(zip(table["rank"], table["step"], strict=True))):
            if key in seen:
                raise TableError(f"{path}: step {key[1]} of rank {key[0]} is also in {seen[key]}")
            seen[key] = path


def _read(path: Path) -> pd.DataFrame:
    table = read_table(path, text=TEXTS)
    require_columns(table, NEEDED, path)
    out = {"op": labels(table, "op", path)}
    for column in ("rank", "step"):
        out[column] = numbers(table, column, path, least=0, whole=True).astype(np.int64)
    for column in ("start", "duration"):
        out[column] = numbers(table, column, path, least=0.0 if column == "duration" else -np.inf)
    for column in TEXTS[1:]:
        given = table[column].fillna("").astype(str) if column in table else ""
        out[column] = np.broadcast_to(np.asarray(given, dtype=object), len(table))
    for column in WHOLE:
        values = numbers(table, column, path, least=-1, whole=True) if column in table else -1
        out[column] = np.broadcast_to(np.asarray(values, np.int64), len(table))
    checked = pd.DataFrame(out)
    for column in ("start", "duration"):
        if checked[column].abs().max() > LONGEST:
            raise TableError(f"{path}: {column} goes beyond {LONGEST:g} s; it counts seconds")
    if checked["rank"].max() > HIGHEST_RANK:
        raise TableError(f"{path}: rank goes up to {checked['rank'].max()}, over {HIGHEST_RANK}")
    checked["group"] = [_group(g, path) for g in checked["group"]]
    unknown = sorted(set(checked["role"]) - {"", *ROLES})
    if unknown:
        raise TableError(f"{path}: role {unknown[0]!r} is not one of {', '.join(ROLES)}")
    return checked


def _group(text: str, path: Path) -> str:
    parts = [p.strip() for p in text.replace(",", ";").split(";") if p.strip()]
    if not all(p.isdecimal() and len(p) < 8 for p in parts):
        raise TableError(f"{path}: group {text!r} is no list of ranks such as 0;1;2")
    return ",".join(map(str, sorted({int(p) for p in parts})))


def _dataset(table: pd.DataFrame, name: str) -> xr.Dataset:
    table = table.sort_values(["step", "rank", "start"], kind="stable").reset_index(drop=True)
    same = ["rank", "stream", "op", "group"]
    table["nth"] = table.groupby(["step", *same], sort=False).cumcount()
    # within a group, ops count in order whatever their names are
    table["seq"] = table.groupby(["step", "rank", "group"], sort=False).cumcount()
    table.loc[table["group"] == "", "seq"] = table["nth"]
    identity = [*same, "nth"]
    steps = np.unique(table["step"])
    counts = table.groupby(identity, sort=False)["step"].transform("size")
    if (counts != steps.size).any():
        r = table[counts != steps.size].iloc[0]
        raise TraceError(
            f"{name}: {r.op} number {r.nth} on rank {r['rank']} is present in {counts[r.name]} of "
            f"{steps.size} steps; steps must record the same ops"
        )
    table = table.sort_values([*identity, "step"], kind="stable")
    swapped = table.groupby(identity, sort=False)["seq"].transform("nunique") > 1
    if swapped.any():
        r = table[swapped].iloc[0]
        raise TraceError(
            f"{name}: {r.op} number {r.nth} on rank {r['rank']} changes its place among the ops of ranks "
            f"{r.group} between steps"
        )
    shape = (len(table) // steps.size, steps.size)

    def matrix(column: str) -> np.ndarray:
        return table[column].to_numpy(np.float64).reshape(shape).T

    start, duration = matrix("start"), matrix("duration")
    ops = table.iloc[:: steps.size]
    role = np.where(
        ops["role"] != "", ops["role"], np.where(ops["group"] == "", "compute", "group")
    )
    return trace_dataset(
        steps=steps,
        start=start - start.min(axis=1, keepdims=True),
        duration=duration,
        coordinates={
            "name": ops["op"].to_numpy(dtype=object),
            "rank": ops["rank"].to_numpy(),
            "stream": np.where(ops["stream"] == "", "main", ops["stream"]),
            "seq": ops["seq"].to_numpy(),
            "role": role,
            "group": ops["group"].to_numpy(dtype=object),
            "shape": ops["shape"].to_numpy(dtype=object),
            "stage": ops["stage"].to_numpy(),
            "microbatch": ops["microbatch"].to_numpy(),
        },
        provenance={"files": name, "format": "table"},
    )
