"""Telemetry of devices over time: clock, power, temperature, and why clocks were held back."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr

from prism.base import schema
from prism.base.tables import TableError, labels, numbers, one_line, read_table, table_files

#: NVML's clock-event reasons by bit (nvmlClocksEventReason*)
REASONS = {
    0x1: "idle", 0x2: "application clocks", 0x4: "software power cap", 0x8: "hardware slowdown", 0x10: "sync boost",
    0x20: "software thermal", 0x40: "hardware thermal", 0x80: "hardware power brake", 0x100: "display clocks",
}  # fmt: skip
#: names in the tidy form, of nvidia-smi (units cut off) and of DCGM -> name and factor
COLUMNS = {
    "sm_clock_mhz": ("clock_sm", 1.0), "clocks.sm": ("clock_sm", 1.0), "clocks.current.sm": ("clock_sm", 1.0),
    "DCGM_FI_DEV_SM_CLOCK": ("clock_sm", 1.0), "SMCLK": ("clock_sm", 1.0),
    "mem_clock_mhz": ("clock_mem", 1.0), "clocks.mem": ("clock_mem", 1.0), "clocks.current.memory": ("clock_mem", 1.0),
    "DCGM_FI_DEV_MEM_CLOCK": ("clock_mem", 1.0), "MMCLK": ("clock_mem", 1.0),
    "power_w": ("power", 1.0), "power.draw": ("power", 1.0), "DCGM_FI_DEV_POWER_USAGE": ("power", 1.0), "POWER": ("power", 1.0),
    "temperature_c": ("temperature", 1.0), "temp_c": ("temperature", 1.0), "temperature.gpu": ("temperature", 1.0),
    "DCGM_FI_DEV_GPU_TEMP": ("temperature", 1.0), "TMPTR": ("temperature", 1.0),
    "gpu_util_pct": ("utilisation", 0.01), "utilization.gpu": ("utilisation", 0.01), "DCGM_FI_DEV_GPU_UTIL": ("utilisation", 0.01),
    "throttle_reasons": ("throttle", 1.0), "clocks_throttle_reasons.active": ("throttle", 1.0),
    "clocks_event_reasons.active": ("throttle", 1.0), "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": ("throttle", 1.0),
}  # fmt: skip
TIME = ("t_s", "timestamp", "time")
GPU = ("gpu", "index", "gpu_id", "uuid", "Entity")
#: what else tells a series apart
PLACE = ("workload", "node")
#: what tools write where a device does not tell
UNKNOWN = re.compile(r"^\[?\s*(N/?A|Not Supported|Unknown Error|Not Found)\s*\]?$", re.I)
LARGEST_TABLE = 2.5e8


class TelemetryError(ValueError):
    """A telemetry file that cannot be used; the message names it."""


def read_telemetry(path: str | Path) -> xr.Dataset:
    """Read telemetry of devices.

    Parameters
    ----------
    path : path
        A table, ``.csv``, ``.csv.gz`` or ``.parquet``, a device and time a row, or a folder of such (one a node):

        - as `prism bench telemetry` writes it: ``t_s`` (or ``timestamp``), ``gpu``, and any of ``sm_clock_mhz,
          mem_clock_mhz, power_w, temperature_c, gpu_util_pct, throttle_reasons``; ``workload`` and ``node`` tell series apart;
        - of ``nvidia-smi --query-gpu=timestamp,index,clocks.sm,... --format=csv``: units in header and cells are cut off,
          ``[N/A]`` is missing, reasons are hexadecimal;
        - with fields of DCGM (``DCGM_FI_DEV_SM_CLOCK``, ...).

    Returns
    -------
    Dataset
        ``clock_sm, clock_mem, power, temperature, utilisation, throttle`` (NVML bits), those that are there, by ``(gpu,
        time)``, NaN where a device has no reading then; `time` in seconds from each series' first reading.

    Raises
    ------
    TelemetryError
        Missing file or columns, no reading, cells that are no numbers.
    """
    path = Path(path)
    try:
        return _to_dataset(_table(path), path)
    except TableError as fault:
        raise TelemetryError(str(fault)) from fault


def _table(path: Path) -> pd.DataFrame:
    if path.is_dir():
        files = table_files(path)
        return pd.concat([_of_a_node(f) for f in files], ignore_index=True)
    return _without_units(read_table(path))


def _of_a_node(file: Path) -> pd.DataFrame:
    """One of several files: what does not name its node is a node of its own, called like the file."""
    table = _without_units(read_table(file))
    return table if "node" in table else table.assign(node=file.name.split(".")[0])


def _without_units(table: pd.DataFrame) -> pd.DataFrame:
    """``clocks.sm [MHz]`` with cells like ``1410 MHz`` to ``clocks.sm`` and 1410; what is unknown becomes empty."""
    table = table.rename(columns=lambda c: re.sub(r"\s*\[[^\]]*\]\s*$", "", str(c)).strip())
    for column in table.columns:
        if column in COLUMNS and table[column].dtype.kind not in "iufb":
            text = table[column].astype("string").str.strip()
            text = text.mask(
                text.str.fullmatch(UNKNOWN.pattern, flags=re.I).fillna(True).astype(bool)
            )
            table[column] = text.map(_number, na_action="ignore")
    return table


def _number(text: str) -> float | str:
    """``0x4``, ``1410 MHz``, ``12 %``; what is none of these stays, for the message."""
    word = text.split()[0] if text.split() else text
    try:
        return float(int(word, 16)) if word.lower().startswith("0x") else float(word)
    except ValueError:
        return text


def _to_dataset(table: pd.DataFrame, path: Path) -> xr.Dataset:
    time = next((c for c in TIME if c in table), None)
    gpu = next((c for c in GPU if c in table), None)
    readings = [c for c in COLUMNS if c in table]
    if time is None or gpu is None or not readings:
        there = ", ".join(map(str, table.columns[:8]))
        raise TableError(
            f"{path}: needs a time ({', '.join(TIME)}), a device ({', '.join(GPU[:4])}) and readings such as power_w, has {there}"
        )
    names = [COLUMNS[c][0] for c in readings]
    if len(set(names)) < len(names):
        raise TableError(f"{path}: several columns hold one quantity: {', '.join(readings)}")
    rows = pd.DataFrame({"time": _seconds(table[time], path)}, index=table.index)
    parts = [labels(table, c, path) for c in (*(p for p in PLACE if p in table), gpu)]
    rows["gpu"] = [" ".join(cells) for cells in zip(*parts, strict=True)]
    for column, name in zip(readings, names, strict=True):
        rows[name] = numbers(table, column, path, empty=True) * COLUMNS[column][1]
    # series of several files begin at different times
    series = pd.Series([" ".join(c[:-1]) for c in zip(*parts, strict=True)], index=rows.index)
    rows["time"] -= rows.groupby(series)["time"].transform("min")
    repeated = int(rows.duplicated(["gpu", "time"]).sum())
    rows = rows.drop_duplicates(["gpu", "time"])
    gpus, times = np.unique(rows["gpu"]), np.unique(rows["time"])
    if gpus.size * times.size > LARGEST_TABLE:
        raise TableError(
            f"{path}: {gpus.size} devices x {times.size} times do not fit a dense table"
        )
    at = np.searchsorted(gpus, rows["gpu"]), np.searchsorted(times, rows["time"])
    data = {}
    for name in names:
        values = np.full((gpus.size, times.size), np.nan)
        values[at] = rows[name].to_numpy()
        data[name] = (("gpu", "time"), values)
    return schema.dataset(
        data,
        coords={"gpu": gpus.astype("U"), "time": times},
        made_by="prism.measure.telemetry.read_telemetry",
        source="measured",
        provenance={"file": path.name, "rows": len(table), "repeated_dropped": repeated},
    )


def _seconds(cells: pd.Series, path: Path) -> np.ndarray:
    """Numbers of seconds, or time stamps."""
    if cells.dtype.kind in "iuf":
        values = cells.to_numpy(float)
    else:
        try:
            stamps = pd.to_datetime(cells, utc=True)
        except (ValueError, TypeError) as fault:
            raise TableError(
                f"{path}: times are neither seconds nor time stamps: {one_line(fault)}"
            ) from fault
        values = (stamps - stamps.min()).dt.total_seconds().to_numpy()
    if not np.isfinite(values).all():
        raise TableError(f"{path}: {int((~np.isfinite(values)).sum())} rows have no time")
    return values


def throttling(telemetry: xr.Dataset, *, busy_above: float | None = None) -> xr.Dataset:
    """Compute the share of samples with throttled clocks, by device and reason.

    Parameters
    ----------
    telemetry : Dataset of `read_telemetry` with `throttle`, or of `read_fleet`
    busy_above : float, optional
        Only samples with at least this utilisation (0 to 1).

    Returns
    -------
    Dataset
        ``reason_share(gpu, reason)`` of a device's samples (several can hold at once), and ``count(gpu)``, its samples.

    Raises
    ------
    ValueError
        Without `throttle`, or without `utilisation` where it is asked for; bits that NVML does not define.

    Examples
    --------
    >>> ds = schema.dataset({"throttle": (("gpu", "time"), [[0.0, 4.0, 36.0, 4.0]])}, made_by="x", source="measured")
    >>> throttling(ds)["reason_share"].sel(reason=["software power cap", "software thermal"]).values.tolist()
    [[0.75, 0.25]]
    """
    needed = ["throttle"] + ([] if busy_above is None else ["utilisation"])
    absent = [n for n in needed if n not in telemetry]
    if absent:
        raise ValueError(
            f"the telemetry has no {', '.join(absent)}; it has {', '.join(telemetry.data_vars)}"
        )
    own = [d for d in telemetry["throttle"].dims if d != "gpu"]
    bits, busy = (
        telemetry[n].transpose("gpu", *own).values.reshape(telemetry.sizes["gpu"], -1)
        if n in telemetry
        else None
        for n in ("throttle", "utilisation")
    )
    known = np.isfinite(bits)
    if busy_above is not None:
        known &= busy >= busy_above
    code = np.where(known, bits, 0).astype(np.int64)
    strange = code & ~sum(REASONS)
    if strange.any():
        raise ValueError(f"clock-event reasons {int(strange.max()):#x} are not NVML's")
    count = known.sum(axis=1)
    with np.errstate(invalid="ignore"):
        share = np.stack(
            [((code & b) > 0).sum(axis=1) / np.where(count, count, np.nan) for b in REASONS], axis=1
        )
    return schema.dataset(
        {"reason_share": (("gpu", "reason"), share), "count": ("gpu", count)},
        coords={"reason": list(REASONS.values())}
        | ({"gpu": telemetry["gpu"].values} if "gpu" in telemetry.coords else {}),
        made_by="prism.measure.telemetry.throttling",
        source=telemetry.attrs["source"],
        provenance={**schema.provenance(telemetry), "busy_above": busy_above},
    )
