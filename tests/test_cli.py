"""The command line, as a shell sees it."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import xarray as xr

from prism.cli import main


def test_simulate_prints_quantiles_and_guarantee(straggler_trace, capsys):
    assert main.main(["simulate", str(straggler_trace), "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    simulated = out["simulated"]
    assert simulated["p5"] < simulated["p50"] < simulated["p95"] <= out["guarantee"]["bound"]
    assert out["steps"] == {"ST": 32, "SE": 43}[straggler_trace.stem[-2:]]
    assert main.main(["simulate", str(straggler_trace)]) == 0
    text = capsys.readouterr().out
    assert f"{out['guarantee']['bound']:.4f}" in text
    assert f"{out['measured']['p95']:.4f}" in text


@pytest.mark.filterwarnings("ignore::prism.traces.TraceWarning")
def test_a_folder_of_profiler_traces_in_one_command(prism_data, tmp_path, capsys):
    """Eight real ranks: text, JSON, Dataset and a trace for Perfetto; one step cannot tell how steps differ."""
    folder = str(prism_data / "traces/param_dlrm_8rank")
    out, chrome = tmp_path / "draws.nc", tmp_path / "p95.json"
    arguments = ["simulate", folder, "--draws", "200", "--out", str(out), "--chrome", str(chrome)]
    assert main.main(arguments) == 0
    text = capsys.readouterr().out
    assert "1 step: how steps differ is not known" in text and "note: device ops outside" in text
    assert main.main([*arguments, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["replay_largest_error"]["without_gaps"] < 0.01
    pools = said["largest_pools"]
    shares = [p["on_longest_path"] for p in pools]
    assert len(pools) == 8 and shares == sorted(shares, reverse=True)
    with xr.open_dataset(out, engine="h5netcdf") as saved:
        assert float(np.quantile(saved.step_time, 0.95)) == pytest.approx(said["simulated"]["p95"])
    events = json.loads(chrome.read_text())["traceEvents"]
    assert {e["pid"] for e in events} == set(range(8))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["draws.nc", "p95.json"]


def test_validate_prints_the_procedure_and_its_baselines(prism_data, tmp_path, capsys):
    trace = str(prism_data / "traces/straggler_analysis/trace-ST.parquet")
    out = tmp_path / "validation.nc"
    assert main.main(["validate", trace, "--draws", "1000", "--json", "--out", str(out)]) == 0
    said = json.loads(capsys.readouterr().out)
    for key in ("ks_in_sample", "ks_cross_validated", "ks_noise_floor", "crps", "mean_error", "std_error",
                "p95_error", "p95_error_interval", "coverage", "gaps_kept", "loadings"):  # fmt: skip
        assert key in said
    assert set(said["baselines"]) == {"independent", "means only", "resampled"}
    with xr.open_dataset(out, engine="h5netcdf") as saved:
        assert float(saved.ks_in_sample.sel(scenario="model")) == said["ks_in_sample"]
    assert main.main(["validate", trace, "--draws", "1000"]) == 0
    text = capsys.readouterr().out
    assert f"{said['crps']:.5f}" in text and "joint event of embedding-grads-all-reduce" in text


@pytest.mark.filterwarnings("ignore::prism.traces.TraceWarning")
def test_validate_says_what_few_steps_cannot_tell(prism_data, capsys):
    three = str(prism_data / "traces/tracelens/mi300_resnet_ddp.rank0of8.json.gz")
    assert main.main(["validate", three, "--draws", "100"]) == 0
    assert "too few steps to leave any out" in capsys.readouterr().out
    assert main.main(["validate", str(prism_data / "traces/param_dlrm_8rank")]) == 2
    assert "one measured step has no distribution" in capsys.readouterr().err


def test_same_seed_same_output(straggler_trace, capsys):
    outputs = []
    for seed in ("3", "3", "4"):
        main.main(["simulate", str(straggler_trace), "--json", "--seed", seed])
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.parquet"], "prism: none.parquet: no such file"),
        (["pyproject.toml"], "not a trace that can be read"),
        (["docs"], "no trace in this folder"),
        (["inputs/none.json", "--out", "draws.txt"], "give a name that ends in .nc"),
    ],
)
def test_bad_input_is_one_line_and_status_2(root, arguments, message):
    ran = subprocess.run(
        [sys.executable, "-m", "prism", "simulate", *arguments],
        capture_output=True, text=True, cwd=root,
    )  # fmt: skip
    assert ran.returncode == 2
    assert message in ran.stderr
    assert ran.stderr.count("\n") == 1
    assert ran.stdout == ""


def test_too_few_draws_are_refused(straggler_trace, capsys):
    assert main.main(["simulate", str(straggler_trace), "--draws", "58"]) == 2
    assert "simulate at least 59" in capsys.readouterr().err


SPEC = """
workload: {preset: llama3-8b, layers: 8}
parallelism: {dp: 2, tp: 4, pp: 2, microbatches: 4, zero: 1}
topology: {preset: dgx-h100, nodes: 2}
variability: {compute_cv: 0.03, step: 0.3, microbatch: 0.3}
"""


def test_a_spec_is_simulated_without_python(tmp_path, capsys):
    file, steps = tmp_path / "job.yaml", tmp_path / "steps.csv"
    file.write_text(SPEC)
    assert (
        main.main(
            ["simulate", str(file), "--draws", "300", "--json", "--out", str(tmp_path / "x.nc")]
        )
        == 0
    )
    said = json.loads(capsys.readouterr().out)
    q = said["simulated"]
    assert said["without_variability"] < q["p5"] < q["p50"] < q["p95"] < said["guarantee"]["bound"]
    low, high = said["p95_interval"]
    assert low <= q["p95"] <= high
    assert said["gpus"] == 16 and said["replicas"] == 2
    assert 0 < said["memory_bytes"] < said["gpu_memory_bytes"]
    assert xr.load_dataset(tmp_path / "x.nc").sizes["draw"] == 300
    steps.write_text("step_time_ms\n" + "\n".join(str(1e3 * q["p50"]) for _ in range(5)) + "\n")
    assert main.main(["simulate", str(file), "--draws", "300", "--measured", str(steps)]) == 0
    out = capsys.readouterr().out
    assert "against 5 measured steps: KS 0.5" in out and "on the longest path" in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("llama3-8b", "lama3-8b"), "no preset 'lama3-8b'; near it: llama3-8b"),
        (("tp: 4", "tp: 8"), "dp 2 x tp 8 x pp 2 = 32 ranks, but 2 nodes x 8 GPUs = 16"),
        (("layers: 8", "layers: 9"), "9 layers (or 11 with embedding and output) do not divide by 2"),
        (("step: 0.3", "step: 0.99"), "squares of step, node, rank and microbatch add up to 1.07, over 1"),
        (("layers: 8", "layers: 800, sequence: 65536"), "GB too much"),
        (("step: 0.3", "rank: 0.3"), "folds several ranks into one op"),
        (("{preset: llama3-8b, layers: 8}", "llama3-8b"), "workload: needs keys, such as {preset: llama3-8b}, got 'llama3-8b'"),
        (("preset: llama3-8b", "preset: [1]"), "no preset [1]"),
        (("microbatches: 4", "microbatches: 100000000"), "steps are built up to 1000000 and"),
    ],
)  # fmt: skip
def test_a_spec_that_cannot_be_is_one_line(tmp_path, capsys, change, message):
    file = tmp_path / "job.yaml"
    file.write_text(SPEC.replace(*change))
    assert main.main(["simulate", str(file), "--draws", "100"]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
