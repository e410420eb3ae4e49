"""From files of device measurements to one Dataset."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr

from prism.base import schema
from prism.base.files import read_dataset
from prism.base.specs import read_spec
from prism.base.tables import (
    TableError,
    labels,
    numbers,
    read_table,
    require_columns,
    table_files,
)
from prism.measure.fleet.published import MISSING, made_tidy, read_kernel_tuner
from prism.measure.fleet.synthetic import ReferenceFleet, synthetic_fleet

#: names in the tidy form -> name and factor to SI; a column may come in either unit
TIDY = {
    "duration_s": ("duration", 1.0), "duration_ms": ("duration", 1e-3), "duration_us": ("duration", 1e-6),
    "sm_clock_mhz": ("clock_sm", 1.0), "mem_clock_mhz": ("clock_mem", 1.0),
    "power_w": ("power", 1.0), "temperature_c": ("temperature", 1.0),
    "throttle_reasons": ("throttle", 1.0), "start_unix_s": ("started_at", 1.0),
}  # fmt: skip
DURATIONS = [c for c, (name, _) in TIDY.items() if name == "duration"]
TEXT = ("node", "cabinet", "gpu_id", "uuid", "kernel", "dtype")
#: columns that tell one run from another, so that equal rows are the same run recorded twice
RUN_COLUMNS = ("start_unix_s", "run")
#: matrix sizes, which say how much work a kernel is
SHAPE = ("m", "n", "k")
#: cells of a dense (signature, gpu, trial) array: 2 GB
LARGEST_TABLE = 2.5e8


class FleetError(ValueError):
    """A fleet file that cannot be used; the message names it."""


def read_fleet(path: str | Path, *, cold: int = 0) -> xr.Dataset:
    """Read per-device durations.

    Parameters
    ----------
    path : path
        - ``.csv``, ``.csv.gz`` or ``.parquet`` with one run a row: ``gpu_id`` and ``duration_s``, ``duration_ms`` or
          ``duration_us``; optional ``kernel, node, cabinet, start_unix_s, sm_clock_mhz, mem_clock_mhz, power_w,
          temperature_c, throttle_reasons``, and ``m, n, k, dtype`` of a matrix product;
        - a folder of such tables (one a node, as `prism bench gemm` writes them), read as one;
        - the aggregates published with PAL (columns ``uuid, perf, freq, ...``);
        - cache files of Kernel Tuner, ``.json`` or ``.json.gz``;
        - ``.yaml`` of a `ReferenceFleet`: the synthetic fleet that it describes;
        - ``.nc`` that PRISM saved.
    cold : int
        Runs of each kernel on each device, in order of time, that are left out as warm-up.

    Returns
    -------
    Dataset
        ``duration(signature, gpu, trial)``, seconds, and what else was measured, in order of time
        along `trial`, padded with NaN where a device has fewer runs. -1 is read as missing, except in
        durations. Where a column identifies the run (`start_unix_s`, `run`), rows that are equal in
        everything are one run recorded twice, and dropped; the provenance says how many. Coordinates ``node``,
        ``rack``, and ``flop(signature)`` where sizes are known.

    Raises
    ------
    FleetError, prism.base.specs.SpecError
        Missing file or columns, no rows, durations that are not positive numbers.
    """
    path = Path(path)
    if path.suffix in (".yaml", ".yml"):
        return synthetic_fleet(read_spec(ReferenceFleet, path))
    if path.suffix == ".nc":
        return _read_saved(path)
    if cold < 0:
        raise ValueError(f"cold must not be negative, got {cold}")
    try:
        return _to_dataset(*_tidy(_table(path), path), path, cold)
    except TableError as fault:
        raise FleetError(str(fault)) from fault


def merge_fleets(*fleets: xr.Dataset) -> xr.Dataset:
    """Kernels of several fleets side by side, over all their devices: for `correlations`.

    Devices are joined by name. Where places are known of a device in one fleet only, that one is taken.

    Raises
    ------
    ValueError
        No fleets; one kernel in two of them.
    """
    names = [str(s) for f in fleets for s in f["signature"].values]
    if not fleets or len(set(names)) < len(names):
        raise ValueError(f"needs fleets of different kernels, got {', '.join(names) or 'none'}")
    gpus = np.unique(np.concatenate([f["gpu"].values.astype(str) for f in fleets]))
    trials = max(f.sizes["trial"] for f in fleets)
    variables = sorted({str(v) for f in fleets for v in f.data_vars})
    shape = (len(names), gpus.size, trials)
    data = {v: (("signature", "gpu", "trial"), np.full(shape, np.nan)) for v in variables}
    places = {c: np.full(gpus.size, "", "U64") for c in ("node", "rack")}
    row = 0
    for f in fleets:
        at = np.searchsorted(gpus, f["gpu"].values.astype(str))
        rows = slice(row, row + f.sizes["signature"])
        row = rows.stop
        for v in f.data_vars:
            data[v][1][rows, at, : f.sizes["trial"]] = f[v].values
        for c, held in places.items():
            if c in f.coords:
                held[at] = np.where(held[at] == "", f[c].values.astype(str), held[at])
    sources = {f.attrs["source"] for f in fleets}
    return schema.dataset(
        data,
        coords={"signature": names, "gpu": gpus}
        | {c: ("gpu", held) for c, held in places.items() if (held != "").any()},
        made_by="prism.measure.fleet.merge_fleets",
        source="synthetic" if "synthetic" in sources else "measured",
        provenance={"of": [schema.provenance(f) for f in fleets]},
    )


def _table(path: Path) -> pd.DataFrame:
    if path.is_dir():
        files = table_files(path)
        return pd.concat([read_table(f, TEXT) for f in files], ignore_index=True)
    if path.name.endswith((".json", ".json.gz")):
        return read_kernel_tuner(path)
    return read_table(path, TEXT)


def _read_saved(path: Path) -> xr.Dataset:
    saved = read_dataset(path, FleetError)
    if "duration" not in saved or saved["duration"].dims != ("signature", "gpu", "trial"):
        raise FleetError(f"{path}: holds no duration(signature, gpu, trial), so it is no fleet")
    return saved


def _tidy(table: pd.DataFrame, path: Path) -> tuple[pd.DataFrame, dict[str, int]]:
    """Rows in the tidy form, without duplicates, and what was dropped."""
    table = made_tidy(table, path)
    require_columns(table, ("gpu_id",), path)
    given = [c for c in DURATIONS if c in table]
    if len(given) != 1:
        what = (
            f"a column {', '.join(DURATIONS[:-1])} or {DURATIONS[-1]}"
            if not given
            else f"one of {' and '.join(given)}"
        )
        raise TableError(f"{path}: needs {what}, has {', '.join(map(str, table.columns[:8]))}")
    kept = _without_duplicates(table, path)
    out = pd.DataFrame({"gpu": labels(kept, "gpu_id", path)}, index=kept.index)
    out["signature"] = labels(kept, "kernel", path) if "kernel" in kept else _sizes(kept)
    for column in ("node", "cabinet"):
        text = kept[column].astype("string") if column in kept else pd.Series("", kept.index)
        out[column] = text.replace({str(MISSING): "", f"{MISSING}.0": ""}).fillna("").astype(str)
    for column, (name, factor) in TIDY.items():
        if column in kept:
            required = name == "duration"
            values = numbers(
                kept, column, path, empty=not required, missing=None if required else MISSING
            )
            out[name] = values * factor
    if "dtype" in kept:
        out["dtype"] = kept["dtype"].astype("string").fillna("").astype(str)
    if "run" in kept:
        out["run"] = pd.to_numeric(kept["run"], errors="coerce")
    if set(SHAPE) <= set(kept.columns):
        out["flop"] = 2 * np.prod([numbers(kept, c, path, least=1) for c in SHAPE], axis=0)
    bad = ~(out["duration"] > 0)
    if bad.any():
        row = out.index[int(np.flatnonzero(bad)[0])] + 1
        raise TableError(
            f"{path}: {int(bad.sum())} durations are not positive (first in data row {row}); "
            "repair or remove these rows"
        )
    return out, {"rows": len(table), "duplicates_dropped": len(table) - len(kept)}


def _sizes(table: pd.DataFrame) -> pd.Series | str:
    """Names of matrix products by their sizes, where nothing else names kernels."""
    if not set(SHAPE) <= set(table.columns):
        return "kernel"
    sizes = table[list(SHAPE)].astype("string").agg("x".join, axis=1)
    return "gemm " + sizes + (" " + table["dtype"] if "dtype" in table else "")


def _without_duplicates(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Drop repeated rows where something identifies a run; equal readings alone are no repetition."""
    if "is_duplicate" in table:
        return table[numbers(table, "is_duplicate", path) == 0]
    identified = [c for c in RUN_COLUMNS if c in table]
    return table.drop_duplicates() if identified else table


def _to_dataset(rows: pd.DataFrame, counts: dict[str, int], path: Path, cold: int) -> xr.Dataset:
    in_time = [c for c in ("started_at", "run") if c in rows]
    if in_time:
        rows = rows.sort_values(in_time, kind="stable", na_position="first")
    rows, by_node = _named_by_node(rows)
    rows = _warm(rows, cold, path)
    gpus = np.unique(rows["gpu"])
    signatures = np.unique(rows["signature"])
    trial = rows.groupby(["signature", "gpu"]).cumcount().to_numpy()
    index = (
        np.searchsorted(signatures, rows["signature"]),
        np.searchsorted(gpus, rows["gpu"]),
        trial,
    )
    shape = (signatures.size, gpus.size, int(trial.max()) + 1)
    if np.prod(shape, dtype=float) > LARGEST_TABLE:
        raise TableError(
            f"{path}: {shape[0]} kernels x {shape[1]} GPUs x {shape[2]} runs do not fit a dense table; "
            "read the kernels from files of their own"
        )
    data = {}
    for name in dict.fromkeys(v[0] for v in TIDY.values()):
        if name in rows:
            values = np.full(shape, np.nan)
            values[index] = rows[name].to_numpy()
            data[name] = (("signature", "gpu", "trial"), values)
    # a device whose rows partly lack its node has it from the others
    place = rows.groupby("gpu")[["node", "cabinet"]].max().loc[gpus]
    moved = rows[rows["node"] != ""].groupby("gpu")["node"].nunique()
    coords = {
        "signature": signatures.astype("U"),
        "gpu": gpus.astype("U"),
        "node": ("gpu", place["node"].to_numpy().astype("U")),
        "rack": ("gpu", place["cabinet"].to_numpy().astype("U")),
    }
    for name in ("flop", "dtype"):
        if name in rows:
            coords[name] = ("signature", _of_kernel(rows, signatures, name, path))
    return schema.dataset(
        data,
        coords=coords,
        made_by="prism.read_fleet",
        source="measured",
        provenance={
            "file": path.name,
            **counts,
            "cold_runs_dropped": cold,
            "gpus_named_by_node": by_node,
            "gpus_on_several_nodes": int((moved > 1).sum()),
        },
    )


def _warm(rows: pd.DataFrame, cold: int, path: Path) -> pd.DataFrame:
    if not cold:
        return rows
    left = rows[rows.groupby(["signature", "gpu"]).cumcount() >= cold]
    if left.empty:
        raise TableError(f"{path}: no device has more than {cold} runs of a kernel")
    return left


def _named_by_node(rows: pd.DataFrame) -> tuple[pd.DataFrame, bool]:
    """Devices that most nodes have, by their place on it: then a device is its node's. Single ones that moved are left alone."""
    known = rows[rows["node"] != ""]
    nodes = known.groupby("gpu")["node"].nunique()
    if nodes.size == 0 or (nodes > 1).mean() <= 0.5:
        return rows, False
    return rows.assign(gpu=rows["node"] + "/" + rows["gpu"]), True


def _of_kernel(rows: pd.DataFrame, signatures: np.ndarray, name: str, path: Path) -> np.ndarray:
    """Collect the facts that all rows of a kernel share."""
    per = rows.groupby("signature")[name]
    mixed = per.nunique()
    if (mixed > 1).any():
        what = "sizes" if name == "flop" else "dtypes"
        raise TableError(
            f"{path}: kernel {mixed.idxmax()!r} has rows of several {what}; name them apart"
        )
    found = per.first().loc[signatures].to_numpy()
    return found if name == "flop" else found.astype("U")
