"""From files of measured collectives to one Dataset."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr

from prism.base import schema
from prism.base.files import read_dataset
from prism.base.tables import (
    TableError,
    labels,
    numbers,
    read_table,
    require_columns,
    table_files,
)
from prism.measure.collectives.arrivals import joined
from prism.measure.collectives.published import nccl_csv, per_rank_columns, read_crab, read_log

#: names of one quantity -> name and factor to seconds
TIMES = {
    "duration_s": ("duration", 1.0), "duration_ms": ("duration", 1e-3), "duration_us": ("duration", 1e-6),
    "latency_us": ("duration", 1e-6), "mean_latency_us": ("duration", 1e-6), "transfer_time_us": ("duration", 1e-6),
    "earliest_s": ("earliest", 1.0), "min_rank_us": ("earliest", 1e-6), "skew_s": ("skew", 1.0),
}  # fmt: skip
#: what tells configurations apart, numbers and words
NUMBERS = ("message_bytes", "ranks", "nodes", "job_nodes", "in_place")
WORDS = ("cluster", "gpu_model", "collective", "dtype", "transport", "condition", "scope")
LARGEST_TABLE = 2.5e8


class CollectivesError(ValueError):
    """A file of collectives that cannot be used; the message names it."""


def read_collectives(path: str | Path, *, cold: int = 0) -> xr.Dataset:
    """Read times of collectives and transfers.

    Parameters
    ----------
    path : path
        - a table, ``.csv``, ``.csv.gz`` or ``.parquet``: ``collective``, ``message_bytes`` and one of ``duration_s``,
          ``duration_us``, ``latency_us``; where known ``iteration, ranks, nodes, condition, transport, cluster, in_place,
          wrong`` and ``min_rank_us``;
        - a folder that `prism bench collective` wrote: starts and ends of every rank, from which the transfer
          (after the last arrived) and the skew of arrivals are told apart;
        - a folder of CRAB (``config.json``, ``data_app_*.csv``);
        - logs of nccl-tests, of OSU's benchmarks, of a ping-pong (``.out``, ``.log``, ``.txt``), nccl-tests as CSV;
        - a column a rank (``#MessageSize Rank0Time(us) ...``);
        - ``.nc`` that PRISM saved.
    cold : int
        Iterations below this are left out as warm-up.

    Returns
    -------
    Dataset
        ``duration(signature, trial)``, seconds, on the rank that was done last unless arrivals are known; ``earliest``, on the
        one that was done first, and ``skew`` of arrivals, where measured. Configurations along `signature` have
        coordinates ``collective``, ``message_bytes``, ``ranks``, ``nodes``, ``scope`` and whatever else tells them
        apart. Rows whose check failed (``wrong``) are dropped; the provenance says how many.

    Raises
    ------
    CollectivesError
        Missing file or columns, nothing measured, times that are negative or no numbers.
    """
    path = Path(path)
    if path.suffix == ".nc":
        return _read_saved(path)
    if cold < 0:
        raise ValueError(f"cold must not be negative, got {cold}")
    try:
        return _to_dataset(_rows(path), path, cold)
    except TableError as fault:
        raise CollectivesError(str(fault)) from fault


def _rows(path: Path) -> pd.DataFrame:
    if path.is_dir():
        if (path / "config.json").is_file():
            return read_crab(path)
        files = table_files(path)
        return _standard(pd.concat([read_table(f) for f in files], ignore_index=True), path)
    if path.suffix in (".out", ".log", ".txt"):
        return read_log(path)
    if path.suffix == ".csv" and path.is_file() and (table := nccl_csv(path)) is not None:
        return table
    if path.suffix == ".csv" and path.is_file():
        with path.open(encoding="utf-8", errors="replace") as file:
            if file.readline().startswith("#MessageSize"):
                spaced = pd.read_csv(path, sep=r"\s+")
                return _standard(spaced, path)
    return _standard(read_table(path), path)


def _standard(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Rows with standard columns, from a table."""
    if (wide := per_rank_columns(table, path)) is not None:
        return wide
    if {"start_s", "end_s", "rank"} <= set(table.columns):
        return joined(table, path)
    return table.rename(columns={"pattern": "collective"} if "collective" not in table else {})


def _to_dataset(table: pd.DataFrame, path: Path, cold: int) -> xr.Dataset:
    require_columns(table, ("collective", "message_bytes"), path)
    given = [c for c, (name, _) in TIMES.items() if name == "duration" and c in table]
    if len(given) != 1:
        raise TableError(
            f"{path}: needs one column of durations (duration_s, duration_us, latency_us), has {', '.join(given) or 'none'}"
        )
    rows = pd.DataFrame(
        {c: numbers(table, c, path, least=0, whole=True) for c in NUMBERS if c in table}
    )
    for c in WORDS:
        if c in table:
            rows[c] = labels(table, c, path)
    for c, (name, factor) in TIMES.items():
        if c in table:
            rows[name] = numbers(table, c, path, least=0) * factor
    dropped = {"rows": len(rows), "failed_checks": 0, "cold_dropped": 0}
    if "wrong" in table:
        # may be N/A where nothing was checked, and a fraction in text
        wrong = pd.to_numeric(table["wrong"], errors="coerce").fillna(0.0).to_numpy() != 0
        dropped["failed_checks"] = int(wrong.sum())
        rows, table = rows[~wrong], table[~wrong]
    if "iteration" in table:
        order = numbers(table, "iteration", path, least=0)
        kept = np.argsort(order, kind="stable")
        kept = kept[order[kept] >= cold]
        dropped["cold_dropped"] = int((order < cold).sum())
        rows = rows.iloc[kept]
    if rows.empty:
        raise TableError(f"{path}: no row is left: {dropped}")
    return _packed(rows, path, dropped | {"zero": int((rows["duration"] == 0).sum())})


def _packed(rows: pd.DataFrame, path: Path, dropped: dict[str, int]) -> xr.Dataset:
    """Rows by configuration and trial."""
    if "nodes" in rows and "scope" not in rows:
        rows = rows.assign(scope=np.where(rows["nodes"] > 1, "inter_node", "intra_node"))
    keys = [c for c in (*WORDS, *NUMBERS) if c in rows]
    groups = rows.groupby(keys, sort=True)
    which, trial = groups.ngroup().to_numpy(), groups.cumcount().to_numpy()
    shape = (int(which.max()) + 1, int(trial.max()) + 1)
    if np.prod(shape, dtype=float) > LARGEST_TABLE:
        raise TableError(
            f"{path}: {shape[0]} configurations x {shape[1]} trials do not fit a dense table"
        )
    data = {}
    for name in ("duration", "earliest", "skew"):
        if name in rows:
            values = np.full(shape, np.nan)
            values[which, trial] = rows[name].to_numpy()
            data[name] = (("signature", "trial"), values)
    first = groups.first().reset_index()
    coords = {
        c: ("signature", first[c].to_numpy().astype("U" if c in WORDS else np.int64)) for c in keys
    }
    # what all share says nothing
    told = [c for c in keys if c in ("collective", "message_bytes") or first[c].nunique() > 1]
    names = [" ".join(_word(c, row[c]) for c in told) for _, row in first.iterrows()]
    return schema.dataset(
        data,
        coords={"signature": np.array(names), **coords},
        made_by="prism.read_collectives",
        source="measured",
        provenance={"file": path.name, **dropped},
    )


def _word(column: str, value) -> str:
    match column:
        case "message_bytes":
            return f"{int(value)} B"
        case "ranks" | "nodes":
            return f"{int(value)} {column}"
        case "in_place":
            return "in place" if value else "out of place"
        case "job_nodes":
            return f"of {int(value)} nodes"
        case _:
            return str(value)


def _read_saved(path: Path) -> xr.Dataset:
    saved = read_dataset(path, CollectivesError)
    if "message_bytes" not in saved.coords or saved.get("duration", xr.DataArray()).dims != (
        "signature",
        "trial",
    ):
        raise CollectivesError(f"{path}: holds no duration(signature, trial) of collectives")
    return saved
