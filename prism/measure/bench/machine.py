"""The machine that is measured: which it is, and what its sensors say. Written down without its name."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol

#: readings and their columns; a machine tells those that it knows
READINGS = ("sm_clock_mhz", "mem_clock_mhz", "power_w", "temperature_c", "gpu_util_pct", "throttle_reasons")  # fmt: skip


def node_name(*, reveal: bool = False) -> str:
    """A name for this machine that stays the same: a hash of its host name, or with `reveal` that name."""
    host = socket.gethostname()
    if reveal:
        return host
    return "node-" + hashlib.blake2b(host.encode(), digest_size=4).hexdigest()


def kind_of_machine() -> dict[str, object]:
    """The kind of machine, without its name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(s.split(":", 1)[1].strip() for s in lines if s.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or "unknown"
    return {"cpu": model, "cores": os.cpu_count(), "system": platform.system()}


def as_yaml(facts: Mapping[str, object]) -> str:
    """Flat facts as YAML: every JSON value is one."""
    return "".join(f"{name}: {json.dumps(value)}\n" for name, value in facts.items())


class Sensors(Protocol):
    """Readings of a device's own sensors."""

    def read(self) -> dict[str, float]:
        """Readings by column of `READINGS`, those that are known."""

    def close(self) -> None:
        """Let go of the device."""


class CpuSensors:
    """Clock (mean over cores), temperature, power and load of the host, where its system shows them."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._proc = root / "proc"
        self._thermal = sorted((root / "sys/class/thermal").glob("thermal_zone*/temp"))
        self._energy = sorted((root / "sys/class/powercap").glob("intel-rapl:?/energy_uj"))
        self._before: tuple[float, float] | None = None
        self._load: tuple[float, float] | None = None

    def read(self) -> dict[str, float]:
        """Readings; power and load need two calls, since they are differences."""
        out: dict[str, float] = {}
        clocks = [
            float(line.split(":")[1])
            for line in _lines(self._proc / "cpuinfo")
            if line.startswith("cpu MHz")
        ]
        if clocks:
            out["sm_clock_mhz"] = sum(clocks) / len(clocks)
        degrees = [float(lines[0]) / 1e3 for f in self._thermal if (lines := _lines(f))]
        if degrees:
            out["temperature_c"] = max(degrees)
        return out | self._power() | self._busy()

    def _power(self) -> dict[str, float]:
        energies = [float(lines[0]) / 1e6 for f in self._energy if (lines := _lines(f))]
        uptime = _lines(self._proc / "uptime")
        if not energies or not uptime:
            return {}
        now, joules = float(uptime[0].split()[0]), sum(energies)
        before = self._before
        if before is not None and now <= before[0]:
            return {}  # the clock has not ticked: what was used until then counts next time
        self._before = now, joules
        # counters wrap
        if before is None or joules < before[1]:
            return {}
        return {"power_w": (joules - before[1]) / (now - before[0])}

    def _busy(self) -> dict[str, float]:
        lines = _lines(self._proc / "stat")
        if not lines or not lines[0].startswith("cpu "):
            return {}
        ticks = [float(t) for t in lines[0].split()[1:9]]
        total, idle = sum(ticks), ticks[3] + ticks[4]
        before, self._load = self._load, (total, idle)
        if before is None or total <= before[0]:
            return {}
        return {"gpu_util_pct": 100 * (1 - (idle - before[1]) / (total - before[0]))}

    def close(self) -> None:
        """Nothing is held."""


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


class Nvml:
    """NVML, by nvidia-ml-py: GPUs of this machine and their sensors.

    Raises
    ------
    ImportError
        Without nvidia-ml-py.
    OSError
        Without a driver.
    """

    def __init__(self) -> None:
        try:
            import pynvml
        except ImportError as missing:
            raise ImportError("sensors of GPUs need nvidia-ml-py") from missing
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as fault:
            raise OSError(f"NVML does not start: {fault}") from fault

    def __enter__(self) -> Nvml:
        return self

    def __exit__(
        self, kind: type | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._nvml.nvmlShutdown()

    def count(self) -> int:
        """Number of GPUs."""
        return int(self._nvml.nvmlDeviceGetCount())

    def gpu(self, index: int) -> NvmlGpu:
        """One GPU by NVML's index."""
        return self._handle(self._nvml.nvmlDeviceGetHandleByIndex, index)

    def gpu_at(self, bus: str) -> NvmlGpu:
        """One GPU by its PCI bus id: CUDA counts devices in another order."""
        return self._handle(self._nvml.nvmlDeviceGetHandleByPciBusId, bus.encode())

    def _handle(self, ask: Callable, which: int | bytes) -> NvmlGpu:
        try:
            return NvmlGpu(self._nvml, ask(which))
        except self._nvml.NVMLError as fault:
            raise OSError(f"NVML does not give GPU {which!r}: {fault}") from fault


class NvmlGpu:
    """Sensors of one GPU. What a device does not support is left out."""

    def __init__(self, nvml, handle) -> None:
        self._nvml, self._handle = nvml, handle
        reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None) or getattr(
            nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None
        )
        self._asks = {
            "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "mem_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(
                handle, nvml.NVML_TEMPERATURE_GPU
            ),
            "gpu_util_pct": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "throttle_reasons": lambda: reasons(handle) if reasons else None,
        }

    def identity(self) -> str:
        """The GPU's UUID, hashed."""
        uuid = self._nvml.nvmlDeviceGetUUID(self._handle)
        text = uuid if isinstance(uuid, bytes) else str(uuid).encode()
        return "gpu-" + hashlib.blake2b(text, digest_size=6).hexdigest()

    def read(self) -> dict[str, float]:
        """Readings that the device supports; what it refuses once is not asked again."""
        out = {}
        for name, ask in list(self._asks.items()):
            try:
                value = ask()
            except self._nvml.NVMLError:
                value = None
            if value is None:
                del self._asks[name]
            else:
                out[name] = float(value)
        return out

    def close(self) -> None:
        """The library is shut down by `Nvml`."""
