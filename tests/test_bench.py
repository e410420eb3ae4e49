"""Benches of products, collectives and sensors: run for real at smoke size; GPUs by stand-ins for their libraries."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from prism.cli import main
from prism.measure import collectives, fleet, telemetry
from prism.measure.bench import (
    CollectiveError,
    collective,
    machine,
    measure_collectives,
    measure_gemm,
    measure_telemetry,
    products,
)


def torch_or_skip():
    return pytest.importorskip("torch", reason="the bench's torch paths need torch")


@pytest.mark.parametrize("device", ["numpy", "cpu"])
def test_products_are_timed_and_read_back(tmp_path, device):
    if device == "cpu":
        torch_or_skip()
    made = measure_gemm(
        tmp_path, [(64, 32, 16), (128, 128, 128)], trials=30, warmup=3, device=device
    )
    ds = fleet.read_fleet(tmp_path)
    assert ds["signature"].values.tolist() == ["gemm 128x128x128 float32", "gemm 64x32x16 float32"]
    assert ds["flop"].values.tolist() == [2 * 128**3, 2 * 64 * 32 * 16]
    assert ds["duration"].shape == (2, 1, 30) and float(ds["duration"].min()) > 0
    # no host name, anywhere
    import socket

    text = (tmp_path / made.name.replace(".csv.gz", ".yaml")).read_text() + made.name
    assert socket.gethostname() not in text
    assert str(ds["gpu"].values[0]).startswith("node-")
    named = measure_gemm(tmp_path / "named", [(8, 8, 8)], trials=2, device=device, reveal_host=True)
    assert socket.gethostname() in named.name


def test_a_slower_product_takes_longer(tmp_path):
    measure_gemm(tmp_path, [(64, 64, 64), (256, 256, 256)], trials=50, device="numpy")
    ds = fleet.read_fleet(tmp_path)
    medians = np.nanmedian(ds["duration"], axis=(1, 2))
    assert medians[ds["flop"].values.argmax()] > 4 * medians[ds["flop"].values.argmin()]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"shapes": []}, "needs shapes and dtypes, each once"),
        ({"shapes": [(0, 1, 1)]}, "sizes must be at least 1"),
        ({"shapes": [(1 << 20, 1 << 20, 8)]}, "take more than 64 GB"),
        ({"shapes": [(8, 8, 8)], "dtypes": ["int8"]}, "dtype 'int8' is not one of"),
        ({"shapes": [(8, 8, 8)], "trials": 0}, "trials must be at least 1"),
        ({"shapes": [(8, 8, 8)], "device": "tpu"}, "device 'tpu' is not auto"),
        ({"shapes": [(8, 8, 8)], "device": "numpy", "dtypes": ["float16"]}, "numpy multiplies float64 and float32"),
    ],
)  # fmt: skip
def test_products_that_cannot_be_are_refused(tmp_path, given, message):
    with pytest.raises(ValueError, match=message):
        measure_gemm(tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives_between_real_ranks(tmp_path, ranks):
    torch_or_skip()
    measure_collectives(
        tmp_path, sizes=(1024, 65536), iterations=20, warmup=2, ranks=ranks, timeout=120
    )
    ds = collectives.read_collectives(tmp_path)
    assert {str(c) for c in ds["collective"].values} == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"}  # fmt: skip
    of = ds["ranks"].where(ds["collective"] != "send_recv", drop=True)
    assert set(of.values) == {ranks}
    assert (ds["skew"].values[np.isfinite(ds["skew"].values)] >= 0).all()
    p50 = collectives.size_quantiles(ds)["transfer_quantile"].sel(quantile=0.5)
    assert (p50 > 1e-6).all()
    assert "left_out: {}" in (tmp_path / "collective.yaml").read_text()


def test_ranks_that_fail_say_so(tmp_path):
    torch_or_skip()
    with pytest.raises(CollectiveError, match="of 2 failed or was not done within"):
        measure_collectives(tmp_path, ops=["all_reduce"], sizes=[1 << 24], iterations=100_000, ranks=2, timeout=4)  # fmt: skip
    assert not list(tmp_path.glob("collective*"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ops": ["gossip"]}, "op 'gossip' is not one of all_reduce"),
        ({"sizes": [1]}, "sizes are 4 to"),
        ({"iterations": 0}, "iterations must be at least 1"),
    ],
)
def test_collectives_that_cannot_be_are_refused(tmp_path, given, message):
    with pytest.raises(ValueError, match=message):
        measure_collectives(tmp_path / "out", **given)


def test_who_started_the_ranks(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert collective.launcher() is None
    for name, value in {"SLURM_PROCID": "5", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="MASTER_ADDR is not set"):
        collective.launcher()
    monkeypatch.setenv("MASTER_ADDR", "first")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert collective.launcher() == {"rank": 5, "world": 16, "local": 1}
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    assert collective.launcher() == {"rank": 3, "world": 8, "local": 3}


def test_sensors_of_this_machine(tmp_path):
    measure_telemetry(tmp_path, seconds=0.5, rate=20, device="cpu")
    ds = telemetry.read_telemetry(tmp_path)
    assert ds.sizes["time"] == 10 and ds.sizes["gpu"] == 1
    # by the clock: readings do not drift
    assert float(ds["time"][-1]) == pytest.approx(0.45, abs=0.04)
    with pytest.raises(ValueError, match="seconds must be positive and rate up to"):
        measure_telemetry(tmp_path, seconds=0, rate=10)


def test_sensors_of_a_host_that_shows_more(tmp_path):
    """A made-up /proc and /sys: clock, temperature, power from two counters, load."""
    for file, text in {
        "proc/cpuinfo": "cpu MHz\t\t: 2000.0\ncpu MHz\t\t: 3000.0\n", "proc/uptime": "10.0 1\n",
        "proc/stat": "cpu  10 0 0 90 0 0 0 0\n", "sys/class/thermal/thermal_zone0/temp": "41000\n",
        "sys/class/powercap/intel-rapl:0/energy_uj": "1000000\n",
    }.items():  # fmt: skip
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    sensors = machine.CpuSensors(tmp_path)
    assert sensors.read() == {"sm_clock_mhz": 2500.0, "temperature_c": 41.0}
    (tmp_path / "proc/uptime").write_text("12.0 1\n")
    (tmp_path / "proc/stat").write_text("cpu  40 0 0 100 0 0 0 0\n")
    (tmp_path / "sys/class/powercap/intel-rapl:0/energy_uj").write_text("101000000\n")
    assert sensors.read() == {"sm_clock_mhz": 2500.0, "temperature_c": 41.0, "power_w": 50.0, "gpu_util_pct": 75.0}  # fmt: skip


class FakeNvml:
    """A stand-in for nvidia-ml-py with two GPUs, of which the second does not tell its power."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self):
        self.open = 0

    def nvmlInit(self):
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetHandleByPciBusId(self, bus):
        return {b"00000000:3b:00.0": 1}[bus]

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle}"

    def nvmlDeviceGetClockInfo(self, handle, which):
        return 1400 + 10 * handle if which == 1 else 2600

    def nvmlDeviceGetPowerUsage(self, handle):
        if handle == 1:
            raise self.NVMLError("not supported")
        return 312_500

    def nvmlDeviceGetTemperature(self, handle, which):
        return 61

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=97)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return 0x24


def test_gpus_by_nvml_stand_in(tmp_path, monkeypatch):
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    measure_telemetry(tmp_path, seconds=0.2, rate=10, device="nvml")
    assert nvml.open == 0
    ds = telemetry.read_telemetry(tmp_path)
    assert ds.sizes["gpu"] == 2 and not any("GPU-" in str(g) for g in ds["gpu"].values)
    assert np.isfinite(ds["power"]).all(axis=1).sum() == 1
    share = telemetry.throttling(ds)["reason_share"]
    assert (share.sel(reason=["software power cap", "software thermal"]) == 1.0).all()


def test_no_driver_and_no_library_are_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ImportError, match="sensors of GPUs need nvidia-ml-py"):
        measure_telemetry(tmp_path, seconds=1, device="nvml")
    broken = FakeNvml()
    broken.nvmlInit = lambda: (_ for _ in ()).throw(FakeNvml.NVMLError("driver not loaded"))
    monkeypatch.setitem(sys.modules, "pynvml", broken)
    with pytest.raises(OSError, match="NVML does not start: driver not loaded"):
        measure_telemetry(tmp_path, seconds=1, device="nvml")


class FakeTorch:
    """As much of torch.cuda as the bench of products touches; times are what the events say."""

    __version__ = "0"
    float32 = "float32"

    def __init__(self):
        self.done = []
        events = iter(range(1000))

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing
                self.number = next(events)

            def record(me):
                self.done.append(("record", me.number))

            def synchronize(me):
                self.done.append(("wait", me.number))

            def elapsed_time(me, other):
                return 2.5

        properties = SimpleNamespace(name="X100", pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
        self.cuda = SimpleNamespace(
            is_available=lambda: True, device_count=lambda: 2, Event=Event,
            get_device_properties=lambda i: properties, device=lambda d: ExitStack(),
        )  # fmt: skip
        self.version = SimpleNamespace(hip=None, cuda="13.0")

    def Generator(self, device):
        return SimpleNamespace(manual_seed=lambda s: None)

    def randn(self, shape, generator, device):
        return SimpleNamespace(to=lambda kind: np.ones(shape))

    def empty(self, shape, dtype, device):
        return np.empty(shape)

    def mm(self, a, b, out):
        self.done.append(("mm", out.shape))


def test_a_gpu_is_timed_by_events_behind_another_product_stand_in(tmp_path, monkeypatch):
    torch, nvml = FakeTorch(), FakeNvml()
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    measure_gemm(tmp_path, [(8, 4, 2)], trials=3, warmup=1, device="cuda:0")
    assert torch.done[:5] == [("mm", (8, 4)), ("record", 0), ("mm", (8, 4)), ("record", 1), ("wait", 1)]  # fmt: skip
    ds = fleet.read_fleet(tmp_path)
    np.testing.assert_allclose(ds["duration"], 2.5e-3)
    np.testing.assert_allclose(ds["clock_sm"], 1410)
    np.testing.assert_allclose(ds["throttle"], 0x24)
    with ExitStack() as held, pytest.raises(OSError, match="this machine has 2 GPUs"):
        products.devices("cuda:7", held)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with ExitStack() as held:
        silent = products.devices("cuda", held)
    assert [d.identity for d in silent] == ["gpu-0", "gpu-1"] and silent[0].sensors.read() == {}


def test_the_command_line_measures(tmp_path, capsys):
    out = str(tmp_path / "g")
    assert main.main(["bench", "gemm", out, "--shape", "16x16x16", "--trials", "5", "--device", "numpy"]) == 0  # fmt: skip
    assert "5 trials of 1 products" in capsys.readouterr().out
    assert main.main(["bench", "telemetry", str(tmp_path / "t"), "--seconds", "0.2", "--device", "cpu"]) == 0  # fmt: skip
    assert main.main(["bench", "gemm", out, "--device", "tpu"]) == 2
    assert "prism: device 'tpu' is not" in capsys.readouterr().err
    assert Path(out).is_dir()
