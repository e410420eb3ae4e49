"""Back ends that time matrix products: torch on a GPU or CPU, numpy where torch is absent."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from prism.measure.bench.machine import CpuSensors, Nvml, Sensors, kind_of_machine

#: seconds for which a GPU is kept busy before a product is timed: launching one takes some ten microseconds
LAUNCH_S = 1e-4
DTYPES = ("float64", "float32", "float16", "bfloat16")


class Product(Protocol):
    """A matrix product that is there to be timed."""

    def __call__(self) -> float:
        """Do it once. Returns seconds."""


@dataclass
class Device:
    """Something that multiplies matrices.

    Attributes
    ----------
    name : str
        ``numpy``, ``cpu`` (torch) or ``cuda:<index>`` (CUDA and ROCm alike).
    identity : str
        Of the device on its machine, without telling who owns it.
    sensors : Sensors
    facts : dict
        What it is.
    """

    name: str
    identity: str
    sensors: Sensors
    facts: dict[str, object] = field(default_factory=dict)

    def product(self, m: int, n: int, k: int, dtype: str, seed: int) -> Product:
        """Operands filled with Normal numbers, and the product of them.

        Raises
        ------
        ValueError
            A dtype that the device does not have.
        """
        if self.name == "numpy":
            return _numpy_product(m, n, k, dtype, seed)
        return _torch_product(m, n, k, dtype, seed, self.name)


def devices(which: str, held: ExitStack) -> list[Device]:
    """Devices to measure: ``auto`` takes all GPUs, else the CPU by torch, else by numpy.

    Parameters
    ----------
    which : str
        ``auto``, ``cuda``, ``cuda:<index>``, ``cpu`` or ``numpy``.
    held : ExitStack
        Lets go of drivers afterwards.

    Raises
    ------
    ValueError
        Unknown devices.
    ImportError
        ``cpu`` or ``cuda`` without torch.
    OSError
        ``cuda`` where there is no such GPU.
    """
    if which == "numpy":
        return [_numpy_device()]
    if which != "auto" and which != "cpu" and which.partition(":")[0] != "cuda":
        raise ValueError(f"device {which!r} is not auto, cuda, cuda:<index>, cpu or numpy")
    try:
        import torch
    except ImportError as missing:
        if which == "auto":
            return [_numpy_device()]
        raise ImportError(f"device {which} needs torch") from missing
    if which == "cpu" or (which == "auto" and not torch.cuda.is_available()):
        facts = {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            **kind_of_machine(),
        }
        return [Device("cpu", "cpu", CpuSensors(), facts)]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    chosen = [int(which.partition(":")[2])] if ":" in which else list(range(count))
    if not chosen or max(chosen) >= count:
        raise OSError(f"device {which}: this machine has {count} GPUs")
    return [_cuda_device(torch, i, held) for i in chosen]


def _numpy_device() -> Device:
    return Device("numpy", "cpu", CpuSensors(), {"numpy": np.__version__, **kind_of_machine()})


class Silent:
    """A device whose sensors cannot be read."""

    def read(self) -> dict[str, float]:
        """Nothing."""
        return {}

    def close(self) -> None:
        """Nothing is held."""


def _cuda_device(torch, index: int, held: ExitStack) -> Device:
    properties = torch.cuda.get_device_properties(index)
    facts = {"gpu": properties.name, "torch": torch.__version__}
    # ROCm says "hip"; NVML knows no such devices
    facts["runtime"] = (
        f"hip {torch.version.hip}" if torch.version.hip else f"cuda {torch.version.cuda}"
    )
    try:
        nvml = held.enter_context(Nvml())
        bus = f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        gpu = nvml.gpu_at(bus)
    except (ImportError, OSError, AttributeError) as missing:
        facts["sensors"] = f"none: {missing}"
        return Device(f"cuda:{index}", f"gpu-{index}", Silent(), facts)
    return Device(f"cuda:{index}", gpu.identity(), gpu, facts)


def _numpy_product(m: int, n: int, k: int, dtype: str, seed: int) -> Product:
    if dtype not in ("float64", "float32"):
        raise ValueError(f"numpy multiplies float64 and float32, not {dtype}")
    rng = np.random.default_rng(seed)
    a, b = (rng.standard_normal(s).astype(dtype) for s in ((m, k), (k, n)))
    out = np.empty((m, n), dtype)

    def once() -> float:
        begin = time.perf_counter()
        np.matmul(a, b, out=out)
        return time.perf_counter() - begin

    return once


def _torch_product(m: int, n: int, k: int, dtype: str, seed: int, device: str) -> Product:
    import torch

    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    generator = torch.Generator(device).manual_seed(seed)
    kind = getattr(torch, dtype)
    a, b = (torch.randn(s, generator=generator, device=device).to(kind) for s in ((m, k), (k, n)))
    out = torch.empty((m, n), dtype=kind, device=device)
    if device == "cpu":

        def once() -> float:
            begin = time.perf_counter()
            torch.mm(a, b, out=out)
            return time.perf_counter() - begin

        return once
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    fillers = 1

    def on_gpu() -> float:
        nonlocal fillers
        with torch.cuda.device(device):
            # products before the clock starts, for long enough that the launch of the next hides behind them
            for _ in range(fillers):
                torch.mm(a, b, out=out)
            begin.record()
            torch.mm(a, b, out=out)
            end.record()
            end.synchronize()
        seconds = begin.elapsed_time(end) / 1e3
        fillers = int(min(100, max(1, np.ceil(LAUNCH_S / max(seconds, 1e-9)))))
        return seconds

    return on_gpu
