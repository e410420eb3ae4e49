"""Op-level records of many steps, from parquet of the StragglerAnalysis kind.

One row per op: ``dp_rank, stage, rank, step, optype, start_ts, duration`` (seconds; `start_ts` from
the start of the step), ``seq_id`` (count of this optype on this rank), ``mc`` (model chunk),
``mb_id`` (microbatch, -1 where the op has none). Published with Lin et al., OSDI 2025.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr

from prism.base.tables import TableError, labels, numbers, read_table, require_columns
from prism.traces.records import TraceError, trace_dataset

COLUMNS = (
    "dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "mb_id",
)  # fmt: skip
INTEGERS = ("dp_rank", "stage", "rank", "step", "seq_id", "mc", "mb_id")
HIGHEST_RANK = 1 << 22
LONGEST_STEP = 1e7


def is_op_level(path: Path) -> bool:
    """Tell whether a parquet file has the columns of this format; needs the extra ``parquet``."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        return True  # its reader says what to install
    try:
        return "optype" in parquet.read_schema(path).names
    except (ArrowException, OSError):
        return True


def read_op_level(files: Sequence[Path]) -> xr.Dataset:
    """Read files of one job; see `prism.traces.read_trace`.

    Several files are steps of one job: they must have the same ops and no step in common.

    Raises
    ------
    TraceError
        Missing columns, no rows, steps with different ops, negative or non-finite times, several model
        chunks per stage.
    """
    tables = [_read_table(f) for f in files]
    for i, a in enumerate(tables):
        for j in range(i):
            both = set(a["step"]) & set(tables[j]["step"])
            if both:
                raise TraceError(
                    f"{files[i]}: step {min(both)} is also in {files[j]}; one job records a step once"
                )
    return _to_dataset(pd.concat(tables, ignore_index=True), ", ".join(f.name for f in files))


def _read_table(path: Path) -> pd.DataFrame:
    try:
        table = read_table(path)
        require_columns(table, COLUMNS, path)
        out = {"optype": labels(table, "optype", path)}
        for column in COLUMNS:
            if column != "optype":
                whole = column not in ("start_ts", "duration")
                least = -1 if column in ("mb_id", "mc") else 0
                out[column] = numbers(table, column, path, least=least, whole=whole)
    except TableError as fault:
        raise TraceError(str(fault)) from fault
    checked = pd.DataFrame(out).astype(dict.fromkeys(INTEGERS, np.int64))
    for column, limit in (("rank", HIGHEST_RANK), ("start_ts", LONGEST_STEP)):
        if checked[column].max() > limit:
            raise TraceError(
                f"{path}: {column} goes up to {checked[column].max():g}, over {limit:g}; start_ts counts "
                "seconds from the start of the step, ranks from 0"
            )
    if checked["mc"].max() > 0:
        raise TraceError(
            f"{path}: {int(checked['mc'].max()) + 1} model chunks per stage (interleaved pipeline) are "
            "not supported yet"
        )
    return checked


def _to_dataset(table: pd.DataFrame, name: str) -> xr.Dataset:
    """Rectangular (step, op): every step must hold the same ops."""
    identity = ["rank", "optype", "seq_id"]
    table = table.sort_values([*identity, "step"], kind="stable")
    repeated = table.duplicated([*identity, "step"])
    if repeated.any():
        r = table[repeated].iloc[0]
        raise TraceError(f"{name}: {_where(r)} is recorded twice in step {r.step}")
    steps = np.unique(table["step"])
    counts = table.groupby(identity, sort=False, observed=True)["step"].transform("size")
    if (counts != steps.size).any():
        r = table[counts != steps.size].iloc[0]
        raise TraceError(
            f"{name}: {_where(r)} is present in {counts[r.name]} of {steps.size} steps; "
            "steps must record the same ops"
        )
    ops = table[table["step"] == steps[0]].reset_index(drop=True)
    shape = (len(ops), steps.size)

    def matrix(column: str) -> np.ndarray:
        return table[column].to_numpy(np.float64).reshape(shape).T

    for column in ("dp_rank", "stage", "mb_id"):
        values = matrix(column)
        if (values != values[0]).any():
            at = int(np.argmax((values != values[0]).any(axis=0)))
            raise TraceError(f"{name}: {_where(ops.iloc[at])} changes its {column} between steps")
    return trace_dataset(
        steps=steps,
        start=matrix("start_ts"),
        duration=matrix("duration"),
        coordinates={
            "name": ops["optype"].to_numpy(dtype=object),
            "rank": ops["rank"].to_numpy(),
            "dp": ops["dp_rank"].to_numpy(),
            "stage": ops["stage"].to_numpy(),
            "microbatch": ops["mb_id"].to_numpy(),
            "seq": ops["seq_id"].to_numpy(),
        },
        provenance={"files": name, "format": "op-level parquet"},
    )


def _where(row: pd.Series) -> str:
    return f"{row.optype} {row.seq_id} on rank {row['rank']}"
