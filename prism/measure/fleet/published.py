"""Fleet measurements in the forms that others published them in, made tidy.

Each form has its own traps: units that differ for one column name, sentinels for what is missing, text glued to
numbers, rows repeated.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd

from prism.base.tables import TableError, numbers, require_columns

#: names in the aggregates published with PAL (SC 2024) -> tidy names
PAL = {
    "uuid": "gpu_id", "perf": "duration_ms", "freq": "sm_clock_mhz", "memfreq": "mem_clock_mhz",
    "temp": "temperature_c", "pwr": "power_w", "ts": "start_unix_s",
}  # fmt: skip
#: what stands for "not known" there
MISSING = -1
#: a file of a kernel tuner is read whole
LARGEST_JSON = 512 * 1024**2


def made_tidy(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    """A table in the tidy form, from whichever form it is in."""
    if "uuid" in table:
        return _pal(table, path)
    if {"config_key", "repeat"} <= set(table.columns) and "gpu_id" not in table:
        return _repeats(table, path)
    return table


def _pal(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Aggregates of PAL: one run a row. `perf` is in milliseconds, but in seconds where runs were averaged."""
    require_columns(table, ("uuid", "perf", "exp", "cabinet", "node"), path)
    tidy = set(PAL.values()) & set(table.columns)
    if tidy:
        raise TableError(f"{path}: mixes columns of the PAL aggregates and of the tidy form")
    if "perf_s" in table:
        ms, s = numbers(table, "perf", path), numbers(table, "perf_s", path)
        if not np.allclose(ms, 1e3 * s, rtol=1e-4):
            raise TableError(
                f"{path}: perf is not perf_s in milliseconds, so its unit is not known"
            )
    names = dict(PAL)
    if "mean_iter_dur_mean" in table:
        # means over runs were published in seconds
        names["perf"] = "duration_s"
    elif "perf_s" not in table:
        require_columns(table, (*PAL, "input_size"), path)
    out = table.rename(columns=names)
    size = "_" + table["input_size"].astype(str) if "input_size" in table else ""
    out["kernel"] = table["exp"].astype(str) + size
    out["node"] = _node_names(table)
    return out


def _node_names(rows: pd.DataFrame) -> pd.Series:
    """Machine names from cabinet and node numbers; empty where either is missing."""
    cabinet, node = rows["cabinet"].astype("string"), rows["node"].astype("string")
    known = (cabinet != str(MISSING)) & (node != str(MISSING))
    return (cabinet + "-" + node.str.zfill(3)).where(known, "")


def _repeats(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Repeats of the configurations of an auto-tuned kernel, one device a model."""
    require_columns(table, ("gpu_model", "kernel", "config_key", "repeat"), path)
    out = table.sort_values(["gpu_model", "kernel", "config_key", "repeat"], kind="stable")
    # configurations are kernels of their own: their order mixes variants of the code
    kernel = out["kernel"].astype(str) + " " + out["config_key"].astype(str)
    return out.assign(gpu_id=out["gpu_model"], kernel=kernel)


def read_kernel_tuner(path: Path) -> pd.DataFrame:
    """Cache file of Kernel Tuner: every configuration's ``times``, milliseconds, in order.

    Raises
    ------
    TableError
        Not such a file; no configuration that ran.
    """
    try:
        with _opened(path) as file:
            text = file.read(LARGEST_JSON + 1)
        if len(text) > LARGEST_JSON:
            raise TableError(f"{path}: unpacks to more than {LARGEST_JSON >> 20} MiB")
        cache = json.loads(text)
        rows = [
            (key, repeat, float(t))
            for key, run in cache["cache"].items()
            for repeat, t in enumerate(run.get("times") or ())
        ]
        device, kernel = str(cache["device_name"]), str(cache["kernel_name"])
    except TableError:
        raise
    except (
        OSError,
        EOFError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as fault:
        raise TableError(f"{path}: not a cache file of Kernel Tuner: {fault!r}") from fault
    if not rows:
        raise TableError(f"{path}: no configuration has times")
    out = pd.DataFrame(rows, columns=["config_key", "repeat", "duration_ms"])
    return out.assign(gpu_model=device, kernel=kernel)


def _opened(path: Path):
    if path.suffix == ".gz":
        import gzip

        return gzip.open(path, "rb")
    return path.open("rb")
