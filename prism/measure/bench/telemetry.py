"""Sensors of this machine, read at a rate."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

from tqdm import tqdm

from prism.base.files import write_rows
from prism.measure.bench.machine import CpuSensors, Nvml, node_name

#: readings a second beyond which sensors repeat themselves
LARGEST_RATE = 1000.0


def measure_telemetry(
    folder: str | Path,
    *,
    seconds: float,
    rate: float = 10.0,
    device: str = "auto",
    reveal_host: bool = False,
    progress: bool = False,
) -> Path:
    """Read the sensors of every device of this machine at a steady rate.

    Parameters
    ----------
    folder : path
        Is made. Holds ``telemetry-<node>.csv.gz``: ``t_s, node, gpu`` and the readings, for `prism.measure.telemetry.read_telemetry`.
    seconds, rate : float
        How long, and readings a second.
    device : {"auto", "nvml", "cpu"}
        GPUs by NVML, or the host; auto takes GPUs where there are some.
    reveal_host : bool
        As in `prism.measure.bench.measure_gemm`.
    progress : bool

    Returns
    -------
    Path
        The table.

    Raises
    ------
    ValueError
        Times and rates that are not positive or too large; unknown devices.
    ImportError, OSError
        ``nvml`` without it; no sensor can be read.
    """
    if not (0 < seconds < float("inf") and 0 < rate <= LARGEST_RATE):
        raise ValueError(
            f"seconds must be positive and rate up to {LARGEST_RATE:g}, got {seconds} and {rate}"
        )
    if device not in ("auto", "nvml", "cpu"):
        raise ValueError(f"device {device!r} is not auto, nvml or cpu")
    node = node_name(reveal=reveal_host)
    with ExitStack() as held:
        sensors = _sensors(device, held)
        rows = _loop(sensors, node, seconds, rate, progress)
    if not any(set(r) - {"t_s", "node", "gpu"} for r in rows):
        raise OSError("no sensor of this machine can be read")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"telemetry-{node}.csv.gz"
    write_rows(rows, target)
    return target


def _sensors(device: str, held: ExitStack) -> dict:
    if device != "cpu":
        try:
            nvml = held.enter_context(Nvml())
            found = [nvml.gpu(i) for i in range(nvml.count())]
            if found:
                return {gpu.identity(): gpu for gpu in found}
        except (ImportError, OSError):
            if device == "nvml":
                raise
        if device == "nvml":
            raise OSError("NVML knows no GPU here")
    return {"cpu": CpuSensors()}


def _loop(sensors: dict, node: str, seconds: float, rate: float, progress: bool) -> list[dict]:
    rows, ticks = [], max(1, round(seconds * rate))
    for one in sensors.values():
        # differences need a reading before the first
        one.read()
    begin = time.monotonic()
    for tick in tqdm(range(ticks), desc="readings", disable=not progress, leave=False):
        # by the clock, so that what a reading takes does not add up
        wait = begin + (tick + 1) / rate - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        now = time.monotonic() - begin
        rows += [
            {"t_s": round(now, 6), "node": node, "gpu": name} | one.read()
            for name, one in sensors.items()
        ]
    return rows
