"""Predicted against published iteration times, and constants recovered from made-up measurements."""

from __future__ import annotations

import csv

import numpy as np
import pandas as pd
import pytest

from prism.base.presets import presets
from prism.context import analytic
from prism.context.analytic_model import deterministic_step
from prism.context.calibration import calibrate, fit_efficiency, leave_one_out
from prism.context.context import Context, Parallelism, Topology, Workload
from prism.context.topology import Efficiency


def context(row: dict) -> Context:
    """A published run. What the Llama 3 report does not say (chunks, sharding) follows from its text: one layer a
    chunk, embedding and output as chunks of their own, gradients and optimizer state sharded."""
    tp, cp, pp, dp = (int(row[k]) for k in ("tp", "cp", "pp", "dp"))
    if row["system"] == "megatron-lm":
        chunks = int(row["virtual_stages"])
        how = {
            "schedule": "interleaved_1f1b" if chunks > 1 else "1f1b",
            "chunks": chunks,
            "microbatches": int(row["global_batch_seqs"]) // int(row["microbatch_seqs"]) // dp,
            "recompute": row["recompute"],
            "sequence_parallel": row["sequence_parallel"] == "yes",
        }
    else:
        batch = 16 * 2**20 // int(row["seq_len"])
        how = {"schedule": "interleaved_1f1b", "chunks": 8, "microbatches": batch // dp,
               "sequence_parallel": True, "zero": 2}  # fmt: skip
    return Context(
        workload=Workload.preset(row["model"], sequence=int(row["seq_len"])),
        parallelism=Parallelism(dp=dp, tp=tp, cp=cp, pp=pp, microbatch_size=int(row["microbatch_seqs"]), **how),
        topology=Topology.preset(
            "dgx-a100" if row["gpu"] == "a100-80gb" else "h100-roce", nodes=int(row["gpus"]) // 8
        ),
    )  # fmt: skip


def seconds(row: dict, ctx: Context) -> float:
    """Published iteration time; from FLOP/s a GPU where the report gives those."""
    if row["unit"] == "s":
        return float(row["value"])
    tokens = ctx.parallelism.dp * ctx.parallelism.microbatches * ctx.workload.sequence
    return ctx.workload.flops_per_token * tokens / ctx.topology.gpus / (1e12 * float(row["value"]))


@pytest.fixture(scope="module")
def published(prism_data):
    with (prism_data / "published/training_throughput.csv").open() as file:
        rows = list(csv.DictReader(file))
    contexts = [context(r) for r in rows]
    return rows, contexts, [seconds(r, c) for r, c in zip(rows, contexts, strict=True)]


def of(published, system: str):
    rows, contexts, measured = published
    chosen = [i for i, r in enumerate(rows) if r["system"] == system]
    return [contexts[i] for i in chosen], [measured[i] for i in chosen]


def test_eight_megatron_runs_left_out_in_turn_against_published(published):
    """Four constants for all; each run is predicted with those of the other seven."""
    error = np.abs(leave_one_out(*of(published, "megatron-lm")))
    assert error.size == 8
    assert error.mean() < 0.05
    assert error.max() < 0.08


def test_three_llama_runs_left_out_in_turn_against_published(published):
    """One constant, since there are three runs."""
    error = np.abs(leave_one_out(*of(published, "llama-3"), constants=("matmul",)))
    assert error.size == 3
    assert error.mean() < 0.05
    assert error.max() < 0.06


def test_presets_hold_the_constants_that_were_fitted_against_published(published):
    _, contexts, measured = published
    errors = [deterministic_step(c)(c.topology.efficiency) / s - 1 for c, s in zip(contexts, measured, strict=True)]  # fmt: skip
    assert np.abs(errors[:8]).mean() < 0.03
    assert np.abs(errors[8:]).mean() < 0.03


def test_wrong_constants_fail_negative_control(published):
    contexts, measured = of(published, "megatron-lm")
    slow = Efficiency(matmul=0.5)
    assert abs(deterministic_step(contexts[0])(slow) / measured[0] - 1) > 0.2


def test_planted_constants_are_recovered():
    """From noiseless steps of different make-up; the prior is weak beside them."""
    truth = Efficiency(matmul=0.6, matmul_half=2e10, memory=0.6, network=0.5)
    contexts = [
        Context(
            workload=Workload.preset("megatron-22b", layers=8, sequence=s),
            parallelism=Parallelism(tp=tp, dp=8 // tp, microbatch_size=b, microbatches=2),
            topology=Topology.preset("dgx-a100", nodes=1),
        )
        for tp, b, s in ((1, 1, 512), (8, 4, 2048), (8, 1, 512), (2, 1, 8192), (4, 2, 1024), (8, 1, 4096))
    ]  # fmt: skip
    measured = [deterministic_step(c)(truth) for c in contexts]
    found = fit_efficiency(contexts, measured, error=1e-4)
    for name in ("matmul", "matmul_half", "memory", "network"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.01), name


def test_own_measurements_give_the_constants():
    topology = Topology.preset("dgx-a100", nodes=1)
    truth = topology.model_copy(
        update={"efficiency": Efficiency(matmul=0.7, matmul_half=3e9, memory=0.9, network=0.6)}
    )
    sizes = np.array([512, 1024, 2048, 4096, 8192])
    gemm = pd.DataFrame({"m": sizes, "n": sizes, "k": sizes})
    gemm["duration_s"] = [analytic.Work((2.0 * s**3,)).seconds(truth) for s in sizes]
    rows = [("all_reduce", b, n) for b in (1e6, 1e8) for n in (2, 8)]
    collectives = pd.DataFrame(rows, columns=["op", "bytes", "ranks"])
    collectives["duration_s"] = [
        analytic.all_reduce(analytic.route(truth, range(n)), b) for _, b, n in rows
    ]
    found = calibrate(topology, gemm=gemm, collectives=collectives).efficiency
    assert found.matmul == pytest.approx(0.7, rel=1e-6)
    assert found.matmul_half == pytest.approx(3e9, rel=1e-6)
    assert found.network == pytest.approx(0.6, rel=1e-4)
    assert found.memory == topology.efficiency.memory


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({}, "nothing measured"),
        ({"gemm": {"m": [1], "n": [1]}}, "columns k, duration_s are missing"),
        ({"gemm": {"m": [8], "n": [8], "k": [8], "duration_s": [-1.0]}}, "positive numbers"),
        ({"gemm": {"m": [8], "n": [8], "k": [8], "duration_s": [1.0]}}, "measure several sizes"),
        ({"collectives": {"op": ["gather"], "bytes": [8], "ranks": [2], "duration_s": [1.0]}}, "'gather' is not one of"),
    ],
)  # fmt: skip
def test_measurements_that_cannot_be_are_refused(tables, message):
    with pytest.raises(ValueError, match=message):
        calibrate(
            Topology.preset("dgx-a100", nodes=1), **{k: pd.DataFrame(v) for k, v in tables.items()}
        )


@pytest.mark.parametrize(
    "name", sorted(n for n, spec in presets("workloads").items() if "layers" in spec)
)
def test_shapes_have_as_many_parameters_as_published(name):
    model = Workload.preset(name)
    assert model.parameters / 1e9 == pytest.approx(model.parameters_b, rel=0.035)


def test_every_topology_preset_is_valid_and_names_its_sources():
    from importlib.resources import files

    from ruamel.yaml import YAML

    raw = YAML(typ="safe", pure=True).load(
        files("prism").joinpath("presets/topologies.yaml").read_text(encoding="utf-8")
    )
    for name, spec in raw.items():
        topology = Topology.preset(name, nodes=2)
        assert topology.gpu.peak_flops > 1e14
        assert {"gpu", "intra_node", "inter_node", "efficiency"} <= set(spec["sources"])
