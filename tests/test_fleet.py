"""Fleet reading and variability: published data to the last digit, planted spreads, bad files."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pandas as pd
import pytest

from prism import fleet, schema
from prism.fleet import FleetError, ReferenceFleet, read_fleet, variability
from prism.specs import SpecError


@pytest.mark.parametrize(
    "file", ["longhorn_v100_sgemm.csv.gz", "raw/sgemm-longhorn-agg.csv"], ids=["tidy", "raw"]
)
def test_longhorn_sgemm_against_published(prism_data, file):
    expected = json.loads((prism_data / "fleet/expected/gpu_stats.json").read_text())["gpu"][
        "longhorn_v100_sgemm"
    ]
    devices = read_fleet(prism_data / "fleet" / file)
    found = variability(devices).isel(signature=0)
    counts = schema.provenance(devices)
    assert counts["rows"] == expected["rows"]
    assert counts["rows"] - counts["duplicates_dropped"] == expected["rows_after_dedup"]
    assert int(found.runs) == expected["rows_after_dedup"]
    assert int(found.gpus) == expected["gpus"]
    assert len(set(devices.node.values) - {""}) == expected["nodes"]
    for ours, theirs in (
        ("spatial_spread", "spatial_spread_pct"),
        ("spatial_p95_p5", "spatial_p95_p5_pct"),
        ("spatial_cv", "spatial_cv_pct"),
        ("spatial_whisker_spread", "spatial_whisker_spread_pct"),
        ("temporal_cv_median", "temporal_cv_pct_median"),
        ("temporal_cv_p95", "temporal_cv_pct_p95"),
    ):
        assert 100 * float(found[ours]) == pytest.approx(expected[theirs], abs=5e-7), ours
    assert 1000 * float(found["median"]) == pytest.approx(expected["median_of_gpu_medians_ms"])
    assert 100 * float(found.temporal_cv.max()) == pytest.approx(
        expected["temporal_cv_pct_max"], abs=5e-7
    )
    assert int(np.isfinite(found.temporal_cv).sum()) == expected["temporal_gpus"]
    medians = devices.duration.isel(signature=0).median("trial")
    assert str(devices.gpu[int(medians.argmax("gpu"))].item()) == expected["slowest_gpu"]
    clock = devices.clock_sm
    assert float(clock.min()) == expected["sm_clock_mhz"]["run_min"]
    assert float(clock.max()) == expected["sm_clock_mhz"]["run_max"]


def test_duplicates_would_change_the_result_negative_control(prism_data, tmp_path):
    """Without dropping duplicates the number of runs is another one: the test above can fail."""
    table = pd.read_csv(prism_data / "fleet/raw/sgemm-longhorn-agg.csv")
    table["row"] = np.arange(len(table))
    table.to_csv(tmp_path / "kept.csv", index=False)
    assert int(variability(read_fleet(tmp_path / "kept.csv")).runs[0]) == 11087


def reference(**changes) -> ReferenceFleet:
    kernel = {"median_s": 0.01, "spatial_spread": 0.1, "temporal_spread": 0.05}
    spec = {
        "kind": "synthetic fleet", "sources": "test", "gpus": 200, "gpus_per_node": 8, "trials": 400,
        "temporal_trials": 1000, "seed": 1, "kernels": {"gemm": kernel},
    }  # fmt: skip
    return ReferenceFleet.model_validate({**spec, **changes})


def test_synthetic_fleet_has_the_stated_spreads_against_theory():
    found = variability(fleet.synthetic_fleet(reference(trials=1000))).isel(signature=0)
    # medians of 1000 runs carry a noise of 0.05 / 6.5 / sqrt(1000) x 1.25 = 0.0003
    assert float(found.spatial_spread) == pytest.approx(0.1, abs=0.0015)
    devices = fleet.synthetic_fleet(reference(trials=1000)).duration.isel(signature=0)
    ranges = (devices.max("trial") - devices.min("trial")) / devices.median("trial")
    assert float(ranges.mean()) == pytest.approx(0.05, rel=0.02)


def test_synthetic_fleet_says_so_and_repeats():
    a, b = fleet.synthetic_fleet(reference()), fleet.synthetic_fleet(reference())
    assert a.source == "synthetic"
    assert a.identical(b)


def test_embedded_reference_keeps_to_the_published_ranges(root):
    """The kernels span what the PRISM paper publishes: 1.64 to 14.04 %, 0.98 to 6.46 %."""
    kernels = schema.provenance(read_fleet(root / "inputs/reference_fleet.yaml"))["parameters"][
        "kernels"
    ].values()
    spatial = [k["spatial_spread"] for k in kernels]
    temporal = [k["temporal_spread"] for k in kernels]
    assert (min(spatial), max(spatial)) == (0.0164, 0.1404)
    assert (min(temporal), max(temporal)) == (0.0098, 0.0646)


def test_planted_cv_lies_in_its_interval_at_the_nominal_rate():
    rng = np.random.default_rng(0)
    for devices, least in ((32, 0.86), (200, 0.90)):
        covered = 0
        for i in range(200):
            duration = rng.normal(1.0, 0.03, (devices, 1))
            low, high = fleet._kernel_variability(duration, 0.95, 300, i)["spatial_cv_interval"]
            covered += low <= 0.03 <= high
        assert least <= covered / 200 <= 0.99


def test_units_and_order_of_time(tmp_path):
    file = tmp_path / "own.csv"
    file.write_text("gpu_id,duration_ms,start_unix_s,node\nb,30,3,n1\na,20,2,\na,10,1,n0\n")
    devices = read_fleet(file)
    assert devices.gpu.values.tolist() == ["a", "b"]
    assert devices.node.values.tolist() == ["n0", "n1"]
    np.testing.assert_allclose(devices.duration.values[0], [[0.01, 0.02], [0.03, np.nan]])


def test_equal_readings_are_no_duplicates(tmp_path):
    """Rounded readings repeat; only a column that identifies the run makes rows the same run."""
    rng = np.random.default_rng(0)
    rows = [f"g{g},{rng.normal(10, 0.03):.2f}" for g in range(20) for _ in range(50)]
    file = tmp_path / "rounded.csv"
    file.write_text("gpu_id,duration_ms\n" + "\n".join(rows))
    assert int(variability(read_fleet(file)).runs[0]) == 1000
    file.write_text("gpu_id,duration_ms,run\n" + "\n".join(r + ",0" for r in rows))
    assert int(variability(read_fleet(file)).runs[0]) < 500


def test_relative_pool_keeps_the_spread_in_time():
    rng = np.random.default_rng(1)
    devices = schema.dataset(
        {"duration": (("signature", "gpu", "trial"), rng.normal(1.0, 0.05, (1, 20, 2000)))},
        coords={"signature": ["k"]},
        made_by="test",
        source="synthetic",
    )
    assert fleet.relative_pool(devices).std == pytest.approx(0.05, rel=0.04)


def test_relative_pool_weighs_devices_equally():
    """A device that was run a hundred times counts as much as one that was run once."""
    duration = np.full((1, 2, 100), np.nan)
    duration[0, 0] = 1.0
    duration[0, 1, 0] = 3.0
    devices = schema.dataset(
        {"duration": (("signature", "gpu", "trial"), duration)},
        coords={"signature": ["k"]},
        made_by="test",
        source="synthetic",
    )
    pool = fleet.relative_pool(devices)
    assert pool.mean == pytest.approx(1.0)
    assert (float(pool.quantile(0.25)), float(pool.quantile(0.75))) == (0.5, 1.5)
    with pytest.raises(ValueError, match="no kernel 'x'; it has k"):
        fleet.relative_pool(devices, "x")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("gpu_id,speed\na,1\n", "needs a column duration_s or duration_ms, has gpu_id, speed"),
        ("duration_s\n1\n", "columns gpu_id are missing"),
        ("gpu_id,duration_s\n", "holds no rows"),
        ("gpu_id,duration_s\na,1\na,nan\n", "duration_s must be a number, 1 rows are not .*row 2"),
        ("gpu_id,duration_s\na,1\na,-5\n", "1 durations are not positive .first in data row 2"),
        ("gpu_id,duration_s\na,0\n", "not positive"),
        ("gpu_id,duration_s\na,fast\n", "must be a number.*'fast'"),
        ("gpu_id,duration_s\na,inf\n", "must be a number"),
        ("gpu_id,duration_s\n,1\n", "gpu_id is empty in 1 rows"),
        ("gpu_id,duration_s\na,1,2\n", "more cells than the header"),
        ("gpu_id,duration_s,duration_ms\na,1,2\n", "one of duration_s and duration_ms"),
        ("gpu_id,duration_s,temperature_c\na,1,71C\n", "temperature_c must be a number.*'71C'"),
        ("uuid,perf\na,1\n", "columns freq, memfreq, temp, pwr, ts, exp"),
        ("", "not readable as a table"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path, content, message):
    file = tmp_path / "fleet.csv"
    file.write_text(content)
    with pytest.raises(FleetError, match=message) as fault:
        read_fleet(file)
    assert "\n" not in str(fault.value)


def test_damaged_archives_and_specs_are_refused(tmp_path):
    damaged = tmp_path / "cut.csv.gz"
    damaged.write_bytes(gzip.compress(b"gpu_id,duration_s\n" + b"a,1\n" * 1000)[:40])
    with pytest.raises(FleetError, match="not readable as a table"):
        read_fleet(damaged)
    with pytest.raises(FleetError, match="no such file"):
        read_fleet(tmp_path / "none.csv")
    spec = tmp_path / "fleet.yaml"
    spec.write_text("kind: synthetic fleet\ngpus: many\n")
    with pytest.raises(SpecError, match=r"gpus: .*'many'.*kernels: Field required"):
        read_fleet(spec)
