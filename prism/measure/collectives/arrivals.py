"""Starts and ends of every rank of a collective: what was transfer, and what was waiting for the last to arrive."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from prism.base.tables import TableError, numbers, require_columns

KEYS = ["collective", "message_bytes", "ranks", "iteration"]


def joined(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    """One row an instance: ``duration_s`` from the last arrival to the last end, ``skew_s`` of arrivals.

    Clocks of one machine are one clock. Other machines' are moved so that their ends of collectives agree in the
    median, since all ranks of most collectives end together.

    Parameters
    ----------
    table : DataFrame
        ``collective, message_bytes, ranks, iteration, rank, node, start_s, end_s``, a row a rank and instance.

    Raises
    ------
    TableError
        Instances that some ranks lack, or a rank has twice; ends before starts.
    """
    require_columns(table, (*KEYS, "rank", "node", "start_s", "end_s"), path)
    table = table.copy()
    for column in ("message_bytes", "ranks", "iteration", "rank"):
        table[column] = numbers(table, column, path, least=0, whole=True).astype(np.int64)
    for column in ("start_s", "end_s"):
        table[column] = numbers(table, column, path)
    if (table["end_s"] < table["start_s"]).any():
        row = int(np.flatnonzero(table["end_s"] < table["start_s"])[0]) + 1
        raise TableError(f"{path}: an instance ends before it starts (data row {row})")
    count = table.groupby(KEYS)["rank"].agg(["size", "nunique"]).reset_index()
    odd = count[(count["size"] != count["ranks"]) | (count["nunique"] != count["ranks"])]
    if len(odd):
        first = odd.iloc[0]
        raise TableError(
            f"{path}: {len(odd)} instances are not there once for each of their ranks (first: {first['collective']}, "
            f"{first['message_bytes']} B, iteration {first['iteration']}: {first['size']} rows of {first['ranks']} ranks)"
        )
    table = _one_clock(table)
    groups = table.groupby(KEYS, sort=False)
    out = groups.agg(
        last_start=("start_s", "max"), first_start=("start_s", "min"), last_end=("end_s", "max"),
        first_end=("end_s", "min"), nodes=("node", "nunique"),
    ).reset_index()  # fmt: skip
    # a clock that is still a little off must not make a transfer negative
    out["duration_s"] = np.maximum(out["last_end"] - out["last_start"], 0.0)
    out["earliest_s"] = np.maximum(out["first_end"] - out["last_start"], 0.0)
    out["skew_s"] = out["last_start"] - out["first_start"]
    return out.drop(columns=["last_start", "first_start", "last_end", "first_end"])


def _one_clock(table: pd.DataFrame) -> pd.DataFrame:
    nodes = sorted(table["node"].astype(str).unique())
    if len(nodes) == 1:
        return table
    ends = table.assign(node=table["node"].astype(str)).pivot_table(
        index=KEYS, columns="node", values="end_s", aggfunc="max"
    )
    offset = {n: float((ends[n] - ends[nodes[0]]).median()) for n in nodes}
    moved = table["node"].astype(str).map(offset).fillna(0.0)
    return table.assign(start_s=table["start_s"] - moved, end_s=table["end_s"] - moved)
