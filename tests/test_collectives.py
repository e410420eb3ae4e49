"""Collectives: published files against their published quantiles, forms of others, arrivals told from transfers."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from prism.measure.collectives import CollectivesError, read_collectives, size_quantiles

PUBLISHED = [
    ("mpi_collectives_leonardo", "mpi_collectives_leonardo", ["collective", "condition", "job_nodes", "message_bytes"], 0, 149),
    ("mpi_collectives_cresco8", "mpi_collectives_cresco8", ["collective", "condition", "job_nodes", "message_bytes"], 0, 180),
    ("unlicensed/mpi_collectives_daint", "mpi_collectives_daint", ["collective", "ranks", "message_bytes"], 0, 54),
    ("unlicensed/mpi_collectives_oracle_hpc", "mpi_collectives_oracle_hpc", ["collective", "ranks", "message_bytes"], 0, 6),
    ("unlicensed/snellius_gpu_p2p", "snellius_gpu_p2p_iter_ge5", ["collective", "gpu_model", "transport", "nodes", "message_bytes"], 5, 620),
]  # fmt: skip


def compared(found, expected: pd.DataFrame, keys: list[str]) -> int:
    """Rows whose quantiles, cv and counts agree; a row of another count is left out."""
    rows = 0
    for _, want in expected.iterrows():
        one = np.logical_and.reduce([found[k].values == want[k] for k in keys])
        (i,) = np.flatnonzero(one)
        if int(found["count"][i]) != want["n"]:
            continue
        for level, column in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"), (1.0, "max")):
            value = 1e6 * float(found["transfer_quantile"].sel(quantile=level)[i])
            assert value == pytest.approx(want[column], rel=1e-4)
        assert 100 * float(found["cv"][i]) == pytest.approx(want["cv_pct"], rel=1e-4)
        rows += 1
    return rows


@pytest.mark.parametrize(("file", "expected", "keys", "cold", "rows"), PUBLISHED)
def test_quantiles_against_published(prism_data, file, expected, keys, cold, rows):
    found = size_quantiles(read_collectives(prism_data / f"fleet/{file}.csv.gz", cold=cold))
    want = pd.read_csv(prism_data / f"fleet/expected/{expected}.csv")
    want = want.rename(columns={"pattern": "collective"})
    assert compared(found, want, keys) == len(want) == rows


def test_failed_checks_are_dropped_against_published(prism_data):
    ds = read_collectives(prism_data / "fleet/unlicensed/alps_gh200_nccl_allreduce.csv.gz")
    assert '"failed_checks": 47' in ds.attrs["provenance"]
    found = size_quantiles(ds.isel(signature=ds["in_place"].values == 0))
    want = pd.read_csv(prism_data / "fleet/expected/alps_allreduce_outofplace_over_10_jobs.csv")
    # seven configurations have a job whose check failed
    assert compared(found, want, ["nodes", "message_bytes"]) == len(want) - 7
    assert (
        ds["scope"].values == np.where(ds["nodes"].values > 1, "inter_node", "intra_node")
    ).all()


def test_raw_forms_against_the_tidy_ones(prism_data):
    raw = prism_data / "fleet/raw"
    crab = size_quantiles(read_collectives(raw / "crab_leonardo_64n_allgather_incast"))
    want = pd.read_csv(prism_data / "fleet/expected/mpi_collectives_leonardo.csv")
    want = want[(want.collective == "allgather") & (want.condition == "incast_aggressor") & (want.job_nodes == 64) & (want.message_bytes == 8)]  # fmt: skip
    assert (
        compared(crab, want, ["collective", "condition", "job_nodes", "ranks", "message_bytes"])
        == 1
    )
    log = read_collectives(raw / "unlicensed/alps_job-n-00008-N-0002-142996.out")
    assert set(log["collective"].values) == {"allreduce"}
    assert (int(log["ranks"][0]), int(log["nodes"][0]), log.sizes["signature"]) == (8, 2, 60)
    table = read_collectives(raw / "unlicensed/alps_job-n-00008-N-0002.csv")
    np.testing.assert_allclose(np.sort(table["duration"], axis=0), np.sort(log["duration"], axis=0))
    ping = size_quantiles(
        read_collectives(raw / "unlicensed/snellius_pp_Nccl_multinode_gpu-h100_8253890.out", cold=5)
    )
    want = pd.read_csv(prism_data / "fleet/expected/snellius_gpu_p2p_iter_ge5.csv")
    want = want[(want.gpu_model == "H100") & (want.transport == "nccl") & (want.nodes == 2) & (want.message_bytes >= 4) & (want.pattern == "pingpong")]  # fmt: skip
    assert compared(ping, want, ["message_bytes"]) > 20
    columns = size_quantiles(
        read_collectives(raw / "unlicensed/cloudnoise_daint_pipelinedring_16_16777216.csv")
    )
    want = pd.read_csv(prism_data / "fleet/expected/mpi_collectives_daint.csv")
    want = want[(want.collective == "pipelinedring") & (want.ranks == 16) & (want.message_bytes == 16777216)]  # fmt: skip
    assert compared(columns, want, ["ranks", "message_bytes"]) == 1


NCCL = """#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
#  Rank  0 Group  0 Pid 1 on  hostA device  0 [0x01] NVIDIA X
#  Rank  1 Group  0 Pid 2 on  hostA device  1 [0x01] NVIDIA X
#  Rank  2 Group  0 Pid 3 on  hostA device  2 [0x01] NVIDIA X
#  Rank  3 Group  0 Pid 4 on  hostA device  3 [0x01] NVIDIA X
     1048576        262144     float    none      -1    10.00  104.86   78.64      0    11.00   95.33   71.49      2
     2097152        524288     float    none      -1    20.00  104.86   78.64    N/A    21.00   99.86   74.90    N/A
"""


def test_a_log_says_its_collective_by_its_bandwidths(tmp_path):
    file = tmp_path / "run.log"
    file.write_text(NCCL)
    ds = read_collectives(file)
    assert set(ds["collective"].values) == {"allgather or reducescatter"}
    assert ds.sizes["signature"] == 3 and '"failed_checks": 1' in ds.attrs["provenance"]
    file.write_text("# Collective test starting: reduce_scatter_perf\n" + NCCL)
    assert set(read_collectives(file)["collective"].values) == {"reducescatter"}


def test_averages_of_osu(tmp_path):
    file = tmp_path / "osu.txt"
    file.write_text(
        "# OSU MPI Allreduce Latency Test v7.3\n# Size       Avg Latency(us)   Min Latency(us)   Max Latency(us)  Iterations\n"
        "4                       1.50              1.20              2.10        1000\n8                       1.60              1.30              2.50        1000\n"
    )
    ds = read_collectives(file)
    np.testing.assert_allclose(ds["duration"].values[:, 0], [2.1e-6, 2.5e-6])
    np.testing.assert_allclose(ds["earliest"].values[:, 0], [1.2e-6, 1.3e-6])
    assert set(ds["collective"].values) == {"allreduce"}


def arrivals(clock: float = 0.0, ranks: int = 4, n: int = 50) -> pd.DataFrame:
    """Planted: transfers of 1 ms, the last rank arrives 0.2 ms late; the second node's clock is off."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(n):
        start = i * 0.01 + rng.uniform(0, 1e-4, ranks)
        start[-1] = i * 0.01 + 3e-4
        for r in range(ranks):
            off = clock if r >= ranks // 2 else 0.0
            rows.append(("all_reduce", 1024, ranks, i, r, f"n{r // (ranks // 2)}", start[r] + off, start.max() + 1e-3 + off))  # fmt: skip
    return pd.DataFrame(
        rows,
        columns=[
            "collective",
            "message_bytes",
            "ranks",
            "iteration",
            "rank",
            "node",
            "start_s",
            "end_s",
        ],
    )


@pytest.mark.parametrize("clock", [0.0, 12.5, -3600.0])
def test_transfers_are_told_from_waiting_whatever_the_clocks(tmp_path, clock):
    arrivals(clock).to_csv(tmp_path / "all.csv", index=False)
    ds = read_collectives(tmp_path / "all.csv")
    np.testing.assert_allclose(ds["duration"].values[0], 1e-3, rtol=1e-6, atol=1e-11)
    assert float(ds["skew"].values.min()) > 2e-4 and float(ds["skew"].values.max()) <= 3.001e-4
    assert str(ds["scope"].values[0]) == "inter_node"


def test_a_rank_that_is_missing_is_said(tmp_path):
    arrivals().iloc[1:].to_csv(tmp_path / "all.csv", index=False)
    with pytest.raises(
        CollectivesError, match=r"1 instances are not there once .* 3 rows of 4 ranks"
    ):
        read_collectives(tmp_path / "all.csv")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("collective,message_bytes\na,1\n", "needs one column of durations"),
        ("message_bytes,latency_us\n1,1\n", "columns collective are missing"),
        ("collective,message_bytes,latency_us\na,8,-1\n", "latency_us must be a number >= 0"),
        ("collective,message_bytes,latency_us\na,8,soon\n", "'soon'"),
        ("collective,message_bytes,latency_us,wrong\na,8,1,3\n", "no row is left"),
        ("collective,message_bytes,latency_us\n", "holds no rows"),
    ],
)
def test_bad_tables_are_refused_in_one_line(tmp_path, content, message):
    file = tmp_path / "x.csv"
    file.write_text(content)
    with pytest.raises(CollectivesError, match=message) as fault:
        read_collectives(file)
    assert "\n" not in str(fault.value)


def test_other_files_are_refused_in_one_line(tmp_path):
    (tmp_path / "x.log").write_text("hello\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "crab").mkdir()
    (tmp_path / "crab/config.json").write_text("[]")
    for name, message in (("x.log", "no measurement"), ("empty", "holds no .csv"), ("crab", "no config.json of CRAB"), ("none.csv", "no such file")):  # fmt: skip
        with pytest.raises(CollectivesError, match=message):
            read_collectives(tmp_path / name)


def test_our_own_recording_is_read(root):
    """Recorded on this project's build machine by `prism bench collective`: 2 and 4 ranks over gloo."""
    for ranks in (2, 4):
        ds = read_collectives(root / f"inputs/bench/collective-{ranks}")
        found = size_quantiles(ds)
        reduce = found.isel(signature=found["collective"].values == "all_reduce")
        assert set(reduce["ranks"].values) == {ranks} and (reduce["count"] == 1000).all()
        p50 = (
            reduce["transfer_quantile"]
            .sel(quantile=0.5)
            .values[np.argsort(reduce["message_bytes"].values)]
        )
        assert p50[-1] > 2 * p50[0] and float(ds["skew"].min()) >= 0


def test_programs_of_one_log_are_told_apart(tmp_path):
    """An all-reduce and an all-gather, one after the other, each with its own ranks."""
    file = tmp_path / "both.log"
    file.write_text(
        "# Collective test starting: all_reduce_perf\n"
        + NCCL
        + "# Collective test starting: all_gather_perf\n"
        + NCCL.replace("10.00", "25.00")
    )
    ds = read_collectives(file)
    assert set(ds["collective"].values) == {"allreduce", "allgather"}
    assert (np.isfinite(ds["duration"]).sum("trial") == 1).all() and (ds["ranks"] == 4).all()


def test_first_iterations_of_every_size_are_left_out(tmp_path):
    file = tmp_path / "ring_4.csv"
    lines = [f"{size} {1000 if i == 0 else 10} {5}" for size in (16, 32) for i in range(5)]
    file.write_text("#MessageSize Rank0Time(us) Rank1Time(us)\n" + "\n".join(lines) + "\n")
    ds = read_collectives(file, cold=1)
    assert float(ds["duration"].max()) == pytest.approx(1e-5)
