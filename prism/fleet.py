"""Fleets of devices: reading measurements, and how much devices differ from each other and in time.

Spatial variability is between devices, temporal variability over the runs of one device.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from scipy import stats

from prism import schema
from prism.pools import Empirical
from prism.specs import Spec, read_spec
from prism.tables import TableError, labels, numbers, one_line, read_table, require_columns

#: names in the tidy form -> name and factor to SI; a column may come in either unit
TIDY = {
    "duration_s": ("duration", 1.0), "duration_ms": ("duration", 1e-3),
    "sm_clock_mhz": ("clock_sm", 1.0), "mem_clock_mhz": ("clock_mem", 1.0),
    "power_w": ("power", 1.0), "temperature_c": ("temperature", 1.0),
    "start_unix_s": ("started_at", 1.0),
}  # fmt: skip
#: names in the aggregates published with PAL (SC 2024) -> tidy names
PAL = {
    "uuid": "gpu_id", "perf": "duration_ms", "freq": "sm_clock_mhz", "memfreq": "mem_clock_mhz",
    "temp": "temperature_c", "pwr": "power_w", "ts": "start_unix_s",
}  # fmt: skip
MISSING = -1
TEXT = ("node", "cabinet", "gpu_id", "uuid", "kernel")
#: columns that tell one run from another, so that equal rows are the same run recorded twice
RUN_COLUMNS = ("start_unix_s", "run")
#: cells of a dense (signature, gpu, trial) array: 2 GB
LARGEST_TABLE = 2.5e8
#: each device enters a fleet-wide pool with this many quantiles of its runs
QUANTILES_PER_GPU = 32


class FleetError(ValueError):
    """A fleet file that cannot be used; the message names it."""


class Kernel(Spec):
    """A micro-benchmark of the synthetic reference fleet.

    `spatial_spread` and `temporal_spread` are (max - min) / median, over devices and over
    `temporal_trials` runs of one device.
    """

    median_s: PositiveFloat
    spatial_spread: NonNegativeFloat
    temporal_spread: NonNegativeFloat


class ReferenceFleet(Spec):
    """Parameters of a synthetic fleet (`synthetic_fleet`)."""

    kind: str = Field(pattern="^synthetic fleet$")
    sources: str
    gpus: PositiveInt = Field(ge=2)
    gpus_per_node: PositiveInt
    trials: PositiveInt = Field(ge=3)
    temporal_trials: PositiveInt = Field(ge=3)
    seed: int
    kernels: dict[str, Kernel] = Field(min_length=1)


def read_fleet(path: str | Path) -> xr.Dataset:
    """Read per-device durations.

    Parameters
    ----------
    path : path
        - ``.csv``, ``.csv.gz`` or ``.parquet`` with one run a row: ``gpu_id`` and ``duration_s`` or
          ``duration_ms``; optional ``kernel, node, cabinet, start_unix_s, sm_clock_mhz,
          mem_clock_mhz, power_w, temperature_c``;
        - the aggregates published with PAL (columns ``uuid, perf, freq, ...``; `perf` in ms);
        - ``.yaml`` of a `ReferenceFleet`: the synthetic fleet that it describes;
        - ``.nc`` that PRISM saved.

    Returns
    -------
    Dataset
        ``duration(signature, gpu, trial)``, seconds, and what else was measured, in order of time
        along `trial`, padded with NaN where a device has fewer runs. -1 is read as missing, except in
        durations. Where a column identifies the run (`start_unix_s`, `run`), rows that are equal in
        everything are one run recorded twice, and dropped; the provenance says how many.

    Raises
    ------
    FleetError, prism.specs.SpecError
        Missing file or columns, no rows, durations that are not positive numbers.
    """
    path = Path(path)
    if path.suffix in (".yaml", ".yml"):
        return synthetic_fleet(read_spec(ReferenceFleet, path))
    if path.suffix == ".nc":
        return _read_saved(path)
    try:
        return _to_dataset(*_tidy(read_table(path, TEXT), path), path)
    except TableError as fault:
        raise FleetError(str(fault)) from fault


def _read_saved(path: Path) -> xr.Dataset:
    try:
        with xr.open_dataset(path, engine="h5netcdf") as ds:
            saved = schema.check(ds.load())
    except (OSError, ValueError) as fault:
        raise FleetError(f"{path}: not a saved Dataset: {one_line(fault)}") from fault
    if "duration" not in saved or saved["duration"].dims != ("signature", "gpu", "trial"):
        raise FleetError(f"{path}: holds no duration(signature, gpu, trial), so it is no fleet")
    return saved


def _tidy(table: pd.DataFrame, path: Path) -> tuple[pd.DataFrame, dict[str, int]]:
    """Rows in the tidy form, without duplicates, and what was dropped."""
    if "uuid" in table:
        require_columns(table, (*PAL, "exp", "input_size", "cabinet", "node"), path)
        if set(PAL.values()) & set(table.columns):
            raise TableError(f"{path}: mixes columns of the PAL aggregates and of the tidy form")
        table = table.rename(columns=PAL)
        table["kernel"] = table["exp"].astype(str) + "_" + table["input_size"].astype(str)
        table["node"] = _node_names(table)
    require_columns(table, ("gpu_id",), path)
    given = [c for c in ("duration_s", "duration_ms") if c in table]
    if len(given) != 1:
        what = (
            "a column duration_s or duration_ms"
            if not given
            else "one of duration_s and duration_ms"
        )
        raise TableError(f"{path}: needs {what}, has {', '.join(map(str, table.columns[:8]))}")
    kept = _without_duplicates(table, path)
    out = pd.DataFrame({"gpu": labels(kept, "gpu_id", path)}, index=kept.index)
    out["signature"] = labels(kept, "kernel", path) if "kernel" in kept else "kernel"
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
    bad = ~(out["duration"] > 0)
    if bad.any():
        row = out.index[int(np.flatnonzero(bad)[0])] + 1
        raise TableError(
            f"{path}: {int(bad.sum())} durations are not positive (first in data row {row}); "
            "repair or remove these rows"
        )
    return out, {"rows": len(table), "duplicates_dropped": len(table) - len(kept)}


def _without_duplicates(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Drop repeated rows where something identifies a run; equal readings alone are no repetition."""
    if "is_duplicate" in table:
        return table[numbers(table, "is_duplicate", path) == 0]
    identified = [c for c in RUN_COLUMNS if c in table]
    return table.drop_duplicates() if identified else table


def _node_names(rows: pd.DataFrame) -> pd.Series:
    """Machine names from cabinet and node numbers; empty where either is missing."""
    cabinet, node = rows["cabinet"].astype("string"), rows["node"].astype("string")
    known = (cabinet != str(MISSING)) & (node != str(MISSING))
    return (cabinet + "-" + node.str.zfill(3)).where(known, "")


def _to_dataset(rows: pd.DataFrame, counts: dict[str, int], path: Path) -> xr.Dataset:
    if "started_at" in rows:
        rows = rows.sort_values("started_at", kind="stable")
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
    return schema.dataset(
        data,
        coords={
            "signature": signatures.astype("U"),
            "gpu": gpus.astype("U"),
            "node": ("gpu", place["node"].to_numpy().astype("U")),
            "rack": ("gpu", place["cabinet"].to_numpy().astype("U")),
        },
        made_by="prism.read_fleet",
        source="measured",
        provenance={"file": path.name, **counts, "gpus_on_several_nodes": int((moved > 1).sum())},
    )


def synthetic_fleet(spec: ReferenceFleet) -> xr.Dataset:
    """A synthetic fleet with stated spreads: for examples and tests, not evidence.

    ``duration = median (1 + spatial_g + temporal_gt)``. Spatial effects are Normal, scaled so that the
    spread over devices of the noise-free durations is exactly the stated one; temporal effects are Normal with the standard deviation for which the expected range of
    `temporal_trials` runs is the stated spread.

    Returns
    -------
    Dataset
        As `read_fleet`, with source ``synthetic``.
    """
    rng = np.random.default_rng(spec.seed)
    unit_range = _expected_normal_range(spec.temporal_trials)
    durations = []
    for kernel in spec.kernels.values():
        z = rng.standard_normal(spec.gpus)
        spatial = (z - np.median(z)) * kernel.spatial_spread / np.ptp(z)
        noise = rng.standard_normal((spec.gpus, spec.trials)) * kernel.temporal_spread / unit_range
        durations.append(kernel.median_s * (1.0 + spatial[:, None] + noise))
    duration = schema.finite_durations(durations, "synthetic fleet", positive=True)
    gpu = np.arange(spec.gpus)
    return schema.dataset(
        {"duration": (("signature", "gpu", "trial"), duration)},
        coords={
            "signature": np.array(list(spec.kernels)),
            "gpu": np.array([f"gpu-{g:04d}" for g in gpu]),
            "node": ("gpu", np.array([f"node-{g // spec.gpus_per_node:03d}" for g in gpu])),
        },
        made_by="prism.fleet.synthetic_fleet",
        source="synthetic",
        seed=spec.seed,
        provenance={"parameters": spec.model_dump()},
    )


def _expected_normal_range(n: int) -> float:
    """Expected range of n standard normals: 2 E[max] = 2 n int z phi(z) Phi(z)^(n-1) dz."""
    z = np.linspace(-9.0, 9.0, 20001)
    density = n * stats.norm.pdf(z) * np.exp((n - 1) * stats.norm.logcdf(z))
    return float(2 * np.trapezoid(z * density, z))


def variability(
    fleet: xr.Dataset, *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> xr.Dataset:
    """Spatial and temporal variability of a fleet, per kernel.

    A device's value is the median of its runs. ``spatial_spread = (max - min) / median`` over
    devices is the literature's figure (Sinha et al., SC 2022) and rests on two devices; the p95 - p5
    and Tukey-whisker spreads are its robust forms and ``spatial_cv`` (std with n - 1, over mean) the
    one that can carry a bootstrap interval (over devices, BCa; a bootstrap of a maximum is not valid).
    With fewer than about 30 devices that interval is too narrow: it covered 79 % instead of 95 % at 8.
    ``temporal_cv`` is std / mean over the runs of each device with at least 3 runs.

    Returns
    -------
    Dataset
        Per `signature`: the above, dimensionless; ``median`` in seconds; intervals along `ci_bound`.
    """
    rows = [_kernel_variability(d, confidence, resamples, seed) for d in fleet["duration"].values]
    bound = ("spatial_cv_interval", "temporal_cv_median_interval")
    data = {
        name: (
            ("signature", "ci_bound") if name in bound
            else ("signature", "gpu") if name == "temporal_cv" else ("signature",),
            np.array([r[name] for r in rows]),
        )
        for name in rows[0]
    }  # fmt: skip
    return schema.dataset(
        data,
        coords={
            "signature": fleet["signature"].values,
            "gpu": fleet["gpu"].values,
            "ci_bound": ["lower", "upper"],
        },
        made_by="prism.variability",
        source=fleet.attrs["source"],
        seed=seed,
        provenance={**schema.provenance(fleet), "confidence": confidence},
    )


def _kernel_variability(duration: np.ndarray, confidence: float, resamples: int, seed: int) -> dict:
    """Measures of one kernel; `duration` (gpu, trial) padded with NaN."""
    runs = np.sum(np.isfinite(duration), axis=1)
    device = np.nanmedian(duration[runs > 0], axis=1)
    median = float(np.median(device))
    p5, q1, q3, p95 = np.quantile(device, [0.05, 0.25, 0.75, 0.95])
    inside = device[(device >= q1 - 1.5 * (q3 - q1)) & (device <= q3 + 1.5 * (q3 - q1))]
    temporal = np.full(runs.size, np.nan)
    enough = runs >= 3
    if enough.any():
        x = duration[enough]
        temporal[enough] = np.nanstd(x, axis=1, ddof=1) / np.nanmean(x, axis=1)
    known = temporal[enough]

    def interval(values: np.ndarray, statistic) -> np.ndarray:
        if values.size < 2:
            return np.full(2, np.nan)
        result = stats.bootstrap(
            (values,), statistic, confidence_level=confidence, n_resamples=resamples,
            method="BCa" if statistic is _cv else "percentile", rng=np.random.default_rng(seed),
        )  # fmt: skip
        return np.array(result.confidence_interval)

    return {
        "gpus": device.size,
        "runs": int(runs.sum()),
        "median": median,
        "spatial_spread": np.ptp(device) / median,
        "spatial_p95_p5": (p95 - p5) / median,
        "spatial_whisker_spread": np.ptp(inside) / median,
        "spatial_cv": _cv(device, axis=-1) if device.size > 1 else np.nan,
        "spatial_cv_interval": interval(device, _cv),
        "temporal_cv": temporal,
        "temporal_cv_median": float(np.median(known)) if known.size else np.nan,
        "temporal_cv_median_interval": interval(known, np.median),
        "temporal_cv_p95": float(np.quantile(known, 0.95)) if known.size else np.nan,
    }


def _cv(x: np.ndarray, axis: int = -1) -> np.ndarray:
    return np.std(x, axis=axis, ddof=1) / np.mean(x, axis=axis)


def device_medians(fleet: xr.Dataset, kernel: str | None = None) -> np.ndarray:
    """Median duration of each device that ran `kernel` (the first if not given), seconds, (gpu,).

    One value a device: devices are independent of each other, the runs of one device are not.
    Raises `ValueError` if there is no such kernel.
    """
    return np.nanmedian(_of_kernel(fleet, kernel), axis=1)


def relative_pool(fleet: xr.Dataset, kernel: str | None = None) -> Empirical:
    """Fleet-wide pool of one kernel, relative to its mean: the shape to put on an analytic mean.

    Every device weighs the same, however often it was run: it enters with `QUANTILES_PER_GPU` quantiles
    of its runs, (k + 1/2) / n each. What lies beyond them within a device is cut: for Normal runs 3 % of
    their standard deviation is lost. The tail over devices is whole.

    Parameters
    ----------
    fleet : Dataset of `read_fleet`
    kernel : str, optional
        A `signature` of the fleet; the first if not given.

    Returns
    -------
    Empirical
        Dimensionless, mean 1.

    Raises
    ------
    ValueError
        If there is no such kernel.
    """
    duration = _of_kernel(fleet, kernel)
    levels = (np.arange(QUANTILES_PER_GPU) + 0.5) / QUANTILES_PER_GPU
    values = np.nanquantile(duration, levels, axis=1)
    return Empirical(tuple((values / values.mean()).ravel()))


def _of_kernel(fleet: xr.Dataset, kernel: str | None) -> np.ndarray:
    """Durations (gpu, trial) of one kernel, devices that ran it."""
    names = [str(s) for s in fleet["signature"].values]
    if kernel is not None and kernel not in names:
        raise ValueError(f"the fleet has no kernel {kernel!r}; it has {', '.join(names)}")
    duration = fleet["duration"].values[names.index(kernel) if kernel else 0]
    return duration[np.isfinite(duration).any(axis=1)]
