"""Telemetry: published samples, forms of tools, reasons by bit."""

from __future__ import annotations

import numpy as np
import pytest

from prism.measure.telemetry import TelemetryError, read_telemetry, throttling


def test_reasons_against_published(prism_data):
    """Counts of the steady phase as the data's description gives them, and thermal slow-down never."""
    import pandas as pd

    table = pd.read_csv(prism_data / "fleet/unlicensed/h100_telemetry_10hz.csv.gz")
    ds = read_telemetry(prism_data / "fleet/unlicensed/h100_telemetry_10hz.csv.gz")
    assert ds.sizes["gpu"] == 32
    assert int(np.isfinite(ds["power"]).sum()) == len(table) == 102_360
    share = throttling(ds)["reason_share"]
    for gpu in ds["gpu"].values:
        workload, node, index = str(gpu).split(" ")
        own = table[(table.workload == workload) & (table.node == node) & (table.gpu == int(index))]
        mine = share.sel(gpu=gpu)
        assert float(mine.sel(reason="software power cap")) == pytest.approx(
            ((own.throttle_reasons.astype(int) & 4) > 0).mean()
        )
        assert float(mine.sel(reason="software thermal")) == 0.0
    raw = read_telemetry(prism_data / "fleet/raw/unlicensed/h100_t3_telemetry.head2000.csv")
    assert (raw.sizes["gpu"], raw.sizes["time"]) == (8, 250)
    assert float(raw["power"].min()) > 50


NVIDIA_SMI = """timestamp, index, clocks.current.sm [MHz], power.draw [W], temperature.gpu, utilization.gpu [%], clocks_throttle_reasons.active
2026/01/02 03:04:05.100, 0, 1410 MHz, 312.55 W, 61, 99 %, 0x0000000000000004
2026/01/02 03:04:05.100, 1, 1380 MHz, [N/A], 59, 98 %, 0x0000000000000024
2026/01/02 03:04:05.600, 0, 1395 MHz, 315.10 W, 62, 100 %, 0x0000000000000000
2026/01/02 03:04:05.600, 1, [Not Supported], 300.00 W, 60, 97 %, 0x0000000000000020
"""


def test_nvidia_smi_with_units_and_unknowns(tmp_path):
    file = tmp_path / "smi.csv"
    file.write_text(NVIDIA_SMI)
    ds = read_telemetry(file)
    np.testing.assert_allclose(ds["time"], [0.0, 0.5])
    np.testing.assert_allclose(ds["clock_sm"], [[1410, 1395], [1380, np.nan]])
    np.testing.assert_allclose(ds["power"], [[312.55, 315.10], [np.nan, 300.0]])
    np.testing.assert_allclose(ds["utilisation"], [[0.99, 1.0], [0.98, 0.97]])
    share = throttling(ds, busy_above=0.98)["reason_share"]
    assert float(share.sel(gpu="0", reason="software power cap")) == 0.5
    assert float(share.sel(gpu="1", reason="software thermal")) == 1.0
    assert throttling(ds, busy_above=0.98)["count"].values.tolist() == [2, 1]


def test_fields_of_dcgm_and_several_files(tmp_path):
    for node in (0, 1):
        (tmp_path / f"{node}.csv").write_text(
            f"timestamp,node,Entity,DCGM_FI_DEV_SM_CLOCK,DCGM_FI_DEV_POWER_USAGE\n{100 + node}.0,n{node},GPU 0,1980,650.5\n{101 + node}.0,n{node},GPU 0,1965,N/A\n"
        )
    ds = read_telemetry(tmp_path)
    assert ds["gpu"].values.tolist() == ["n0 GPU 0", "n1 GPU 0"]
    # each series counts from its own begin
    np.testing.assert_allclose(ds["time"], [0.0, 1.0])
    np.testing.assert_allclose(ds["power"], [[650.5, np.nan]] * 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n1,2\n", "needs a time .* a device .* and readings"),
        ("t_s,gpu,power_w\n0,0,hot\n", "power_w must be a number"),
        ("t_s,gpu,power_w\nsoon,0,1\n", "neither seconds nor time stamps"),
        ("t_s,gpu,power_w,power.draw [W]\n0,0,1,1\n", "several columns hold one quantity"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path, content, message):
    file = tmp_path / "x.csv"
    file.write_text(content)
    with pytest.raises(TelemetryError, match=message) as fault:
        read_telemetry(file)
    assert "\n" not in str(fault.value)


def test_questions_that_telemetry_cannot_answer(tmp_path):
    file = tmp_path / "x.csv"
    file.write_text("t_s,gpu,power_w\n0,0,1\n")
    with pytest.raises(ValueError, match="the telemetry has no throttle; it has power"):
        throttling(read_telemetry(file))
    file.write_text("t_s,gpu,throttle_reasons\n0,0,4096\n")
    with pytest.raises(ValueError, match="0x1000 are not NVML's"):
        throttling(read_telemetry(file))


def test_logs_of_several_nodes_that_do_not_say_theirs(tmp_path):
    for name, watts in (("first", 300), ("second", 700)):
        (tmp_path / f"{name}.csv").write_text(
            f"timestamp,index,power.draw [W]\n1.0,0,{watts} W\n2.0,0,{watts} W\n"
        )
    ds = read_telemetry(tmp_path)
    assert ds["gpu"].values.tolist() == ["first 0", "second 0"]
    np.testing.assert_allclose(ds["power"], [[300, 300], [700, 700]])


def test_reasons_beside_a_benchs_trials(tmp_path):
    from prism.measure.fleet import read_fleet

    (tmp_path / "x.csv").write_text(
        "gpu_id,duration_s,throttle_reasons\na,1,4\na,1,0\nb,1,32\nb,1,32\n"
    )
    share = throttling(read_fleet(tmp_path / "x.csv"))["reason_share"]
    assert share.sel(reason="software power cap").values.tolist() == [0.5, 0.0]
    assert share.sel(reason="software thermal").values.tolist() == [0.0, 1.0]
