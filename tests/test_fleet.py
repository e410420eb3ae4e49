"""Fleet reading and variability: published data to the last digit, planted spreads, bad files."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pandas as pd
import pytest

from prism.base import schema
from prism.base.specs import SpecError
from prism.measure import fleet
from prism.measure.fleet import (
    FleetError,
    ReferenceFleet,
    read_fleet,
    spatial_temporal,
    variability,
)


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
            low, high = spatial_temporal._kernel_variability(duration, 0.95, 300, i)[
                "spatial_cv_interval"
            ]
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
        (
            "gpu_id,speed\na,1\n",
            "needs a column duration_s, duration_ms or duration_us, has gpu_id, speed",
        ),
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
        ("uuid,perf\na,1\n", "columns exp, cabinet, node are missing"),
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


@pytest.mark.parametrize(
    ("raw", "tidy"),
    [
        ("raw/bert-longhorn-agg.csv", "longhorn_v100_bert"),
        ("raw/resnet-ls6-agg.csv", "lonestar6_a100_resnet50"),
        ("longhorn_v100_bert.csv.gz", "longhorn_v100_bert"),
        ("longhorn_v100_resnet50.csv.gz", "longhorn_v100_resnet50"),
        ("longhorn_v100_pagerank.csv.gz", "longhorn_v100_pagerank"),
        ("lonestar6_a100_resnet50.csv.gz", "lonestar6_a100_resnet50"),
    ],
)
def test_other_kernels_against_published(prism_data, raw, tidy):
    """Units differ by file for one column name: milliseconds, and seconds where runs were averaged."""
    want = json.loads((prism_data / "fleet/expected/gpu_stats.json").read_text())["gpu"][tidy]
    devices = read_fleet(prism_data / "fleet" / raw)
    found = variability(devices, resamples=50).isel(signature=0)
    assert int(found["gpus"]) == want["gpus"] and int(found["runs"]) == want["rows_after_dedup"]
    for name, key in {
        "spatial_spread": "spatial_spread_pct", "spatial_p95_p5": "spatial_p95_p5_pct", "spatial_cv": "spatial_cv_pct",
        "spatial_whisker_spread": "spatial_whisker_spread_pct",
    }.items():  # fmt: skip
        assert 100 * float(found[name]) == pytest.approx(want[key], rel=1e-4)
    assert 1e3 * float(found["median"]) == pytest.approx(want["median_of_gpu_medians_ms"], rel=1e-6)
    if "temporal_cv_pct_median" in want and want.get("temporal_gpus"):
        assert 100 * float(found["temporal_cv_median"]) == pytest.approx(
            want["temporal_cv_pct_median"], rel=1e-3
        )
    outlier = fleet.characterise(devices, resamples=10)["outlier"].values[0]
    assert (outlier == 1).sum() == want["tukey_outliers_slow"]
    assert (outlier == -1).sum() == want["tukey_outliers_fast"]


def test_what_goes_with_what_against_published(prism_data):
    sgemm, pagerank, bert, resnet = (
        read_fleet(prism_data / f"fleet/longhorn_v100_{k}.csv.gz")
        for k in ("sgemm", "pagerank", "bert", "resnet50")
    )
    own = fleet.correlations(sgemm)["run_correlation"].isel(signature=0)
    assert own.sel(field=["clock_sm", "temperature", "power"]).values.round(3).tolist() == [
        -0.947,
        0.443,
        -0.298,
    ]
    assert 100 * float(fleet.correlations(sgemm)["clock_explains"][0]) == pytest.approx(
        0.95, abs=0.005
    )
    for a, b, rank, n in ((sgemm, pagerank, 0.05, 168), (bert, resnet, None, 120)):
        found = fleet.correlations(fleet.merge_fleets(a, b))
        medians = [ds["duration"].isel(signature=0).median("trial").to_series() for ds in (a, b)]
        by_pandas = pd.concat(medians, axis=1, join="inner").corr("spearman").iloc[0, 1]
        assert float(found["rank_correlation"][0, 1]) == pytest.approx(by_pandas, abs=1e-12)
        assert rank is None or by_pandas == pytest.approx(rank, abs=0.005)
        assert int(found["count"][0, 1]) == n
        low, high = found["rank_correlation_interval"].values[0, 1]
        assert low < by_pandas < high
    with pytest.raises(ValueError, match="fleets of different kernels"):
        fleet.merge_fleets(bert, bert)


def test_repeats_of_tuned_kernels_against_published(prism_data):
    """Median cv over configurations, the first, cold repeat left out."""
    ds = read_fleet(prism_data / "fleet/kernel_repeats_single_gpu.csv.gz", cold=1)
    found = variability(ds, resamples=20)["temporal_cv"].median("signature")
    want = {"A100": 0.216, "A6000": 0.323, "MI250X": 0.364, "3090": 0.185, "TITAN": 2.841}
    for gpu in found["gpu"].values:
        expected = next(v for k, v in want.items() if k in str(gpu))
        assert 100 * float(found.sel(gpu=gpu)) == pytest.approx(expected, abs=0.001)
    cold = variability(
        read_fleet(prism_data / "fleet/kernel_repeats_single_gpu.csv.gz"), resamples=2
    )
    assert 100 * float(cold["temporal_cv"].sel(gpu="A100-PCIe-40GB").median()) == pytest.approx(
        2.3, abs=0.1
    )
    raw = read_fleet(prism_data / "fleet/raw/kerneltuner_convolution_A100.json.gz", cold=1)
    fastest = raw["duration"].median("trial").isel(gpu=0).argsort().values[:200]
    cv = variability(raw.isel(signature=np.sort(fastest)), resamples=20)["temporal_cv"].median()
    assert 100 * float(cv) == pytest.approx(0.216, abs=0.002)


def test_planted_components_lie_in_their_intervals_at_the_nominal_rate():
    rng = np.random.default_rng(3)
    hits = np.zeros(2)
    for _ in range(100):
        duration = (
            1 + 0.03 * rng.standard_normal((1, 40, 1)) + 0.01 * rng.standard_normal((1, 40, 25))
        )
        ds = schema.dataset({"duration": (("signature", "gpu", "trial"), duration)}, coords={"signature": ["k"], "gpu": [f"g{i}" for i in range(40)]}, made_by="t", source="synthetic")  # fmt: skip
        found = fleet.characterise(ds, resamples=100)
        for i, (name, truth) in enumerate(
            (("spatial_component", 0.03), ("temporal_component", 0.01))
        ):
            low, high = found[f"{name}_interval"].values[0]
            hits[i] += low <= truth <= high
    assert (hits >= 95 - 3 * 2.2).all(), hits


def test_machines_that_differ_are_found():
    rng = np.random.default_rng(4)
    node = 0.05 * rng.standard_normal(40)
    duration = 1 + np.repeat(node, 8)[None, :, None] + 0.02 * rng.standard_normal((1, 320, 1)) + 0.005 * rng.standard_normal((1, 320, 10))  # fmt: skip
    ds = schema.dataset(
        {"duration": (("signature", "gpu", "trial"), duration)},
        coords={"signature": ["k"], "gpu": [f"g{i:03d}" for i in range(320)], "node": ("gpu", [f"n{i // 8:02d}" for i in range(320)])},
        made_by="t", source="synthetic",
    )  # fmt: skip
    found = fleet.characterise(ds, resamples=5).isel(signature=0)
    low, high = found["node_component_interval"].values
    assert low < 0.05 < high and float(found["spatial_component"]) == pytest.approx(
        0.0539, rel=0.15
    )


@pytest.mark.parametrize("name", ["v100", "a100", "h100", "h200"])
def test_reference_fleets_have_the_published_spreads(name):
    spec = fleet.ReferenceFleet.preset(name)
    ds = fleet.synthetic_fleet(spec)
    assert ds.attrs["source"] == "synthetic"
    (kernel,) = spec.kernels.values()
    found = variability(ds, resamples=100)
    # of device medians, which keep a little of the noise in time
    assert float(found["spatial_spread"][0]) == pytest.approx(kernel.spatial_spread, rel=0.25)
    assert np.ptp(ds["clock_sm"].values) == pytest.approx(500) and np.ptp(
        ds["power"].values
    ) == pytest.approx(140)
    held = ds["throttle"].values[ds["throttle"].values > 0]
    assert (held == 0x20).mean() == pytest.approx(0.76, abs=0.03)


def test_files_of_several_nodes_are_one_fleet(tmp_path):
    for node in ("a", "b"):
        (tmp_path / f"{node}.csv").write_text(f"gpu_id,node,m,n,k,dtype,duration_us\n{node}0,{node},2,3,4,f32,10\n{node}0,{node},2,3,4,f32,12\n")  # fmt: skip
    ds = read_fleet(tmp_path)
    assert ds["signature"].values.tolist() == ["gemm 2x3x4 f32"] and ds["flop"].values.tolist() == [
        48
    ]
    np.testing.assert_allclose(ds["duration"].values[0], [[1e-5, 1.2e-5]] * 2)
    np.testing.assert_allclose(read_fleet(tmp_path, cold=1)["duration"].values[0], [[1.2e-5]] * 2)
    with pytest.raises(FleetError, match="no device has more than 5 runs"):
        read_fleet(tmp_path, cold=5)
    with pytest.raises(FleetError, match="several sizes"):
        (tmp_path / "c.csv").write_text(
            "gpu_id,kernel,m,n,k,duration_us\nc,x,2,3,4,1\nc,x,2,3,5,1\n"
        )
        read_fleet(tmp_path / "c.csv")


def test_places_on_nodes_are_devices_of_their_own(tmp_path):
    """`gpu_id` 0 to 3 on every node: forty devices, not four that moved."""
    rows = [
        f"{g},n{n},{1 + 0.01 * n + 0.001 * r}"
        for n in range(10)
        for g in range(4)
        for r in range(5)
    ]
    (tmp_path / "x.csv").write_text("gpu_id,node,duration_s\n" + "\n".join(rows))
    ds = read_fleet(tmp_path / "x.csv")
    assert ds.sizes["gpu"] == 40 and ds.sizes["trial"] == 5
    assert '"gpus_named_by_node": true' in ds.attrs["provenance"]


def test_a_number_of_the_run_is_its_place_in_time(tmp_path):
    (tmp_path / "x.csv").write_text("gpu_id,run,duration_s\na,2,1.2\na,0,10\na,1,1.1\n")
    np.testing.assert_allclose(
        read_fleet(tmp_path / "x.csv", cold=1)["duration"].values[0, 0], [1.1, 1.2]
    )


def test_dtypes_of_one_kernel_are_not_mixed(tmp_path):
    (tmp_path / "x.csv").write_text("gpu_id,kernel,dtype,duration_s\na,k,f32,1\na,k,f16,2\n")
    with pytest.raises(FleetError, match="rows of several dtypes"):
        read_fleet(tmp_path / "x.csv")


def test_a_perfect_order_of_few_devices_is_not_certain():
    duration = np.arange(1.0, 5.0)[None, :, None] * np.ones((2, 1, 3))
    ds = schema.dataset({"duration": (("signature", "gpu", "trial"), duration)}, coords={"signature": ["a", "b"], "gpu": list("wxyz")}, made_by="t", source="synthetic")  # fmt: skip
    low, high = fleet.correlations(ds)["rank_correlation_interval"].values[0, 1]
    assert low < 0.9 and high < 1.0
