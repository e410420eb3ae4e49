"""The command line, as a shell sees it."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import xarray as xr

from prism import cli


def test_simulate_prints_quantiles_and_guarantee(straggler_trace, capsys):
    assert cli.main(["simulate", str(straggler_trace), "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    simulated = out["simulated"]
    assert simulated["p5"] < simulated["p50"] < simulated["p95"] <= out["guarantee"]["bound"]
    assert out["steps"] == {"ST": 32, "SE": 43}[straggler_trace.stem[-2:]]
    assert cli.main(["simulate", str(straggler_trace)]) == 0
    text = capsys.readouterr().out
    assert f"{out['guarantee']['bound']:.4f}" in text
    assert f"{out['measured']['p95']:.4f}" in text


@pytest.mark.filterwarnings("ignore::prism.traces.TraceWarning")
def test_a_folder_of_profiler_traces_in_one_command(prism_data, tmp_path, capsys):
    """Eight real ranks: text, JSON, Dataset and a trace for Perfetto; one step cannot tell how steps differ."""
    folder = str(prism_data / "traces/param_dlrm_8rank")
    out, chrome = tmp_path / "draws.nc", tmp_path / "p95.json"
    arguments = ["simulate", folder, "--draws", "200", "--out", str(out), "--chrome", str(chrome)]
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert "1 step: how steps differ is not known" in text and "note: device ops outside" in text
    assert cli.main([*arguments, "--json"]) == 0
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
    assert cli.main(["validate", trace, "--draws", "1000", "--json", "--out", str(out)]) == 0
    said = json.loads(capsys.readouterr().out)
    for key in ("ks_in_sample", "ks_cross_validated", "ks_noise_floor", "crps", "mean_error", "std_error",
                "p95_error", "p95_error_interval", "coverage", "gaps_kept", "loadings"):  # fmt: skip
        assert key in said
    assert set(said["baselines"]) == {"independent", "means only", "resampled"}
    with xr.open_dataset(out, engine="h5netcdf") as saved:
        assert float(saved.ks_in_sample.sel(scenario="model")) == said["ks_in_sample"]
    assert cli.main(["validate", trace, "--draws", "1000"]) == 0
    text = capsys.readouterr().out
    assert f"{said['crps']:.5f}" in text and "joint event of embedding-grads-all-reduce" in text


@pytest.mark.filterwarnings("ignore::prism.traces.TraceWarning")
def test_validate_says_what_few_steps_cannot_tell(prism_data, capsys):
    three = str(prism_data / "traces/tracelens/mi300_resnet_ddp.rank0of8.json.gz")
    assert cli.main(["validate", three, "--draws", "100"]) == 0
    assert "too few steps to leave any out" in capsys.readouterr().out
    assert cli.main(["validate", str(prism_data / "traces/param_dlrm_8rank")]) == 2
    assert "one measured step has no distribution" in capsys.readouterr().err


def test_same_seed_same_output(straggler_trace, capsys):
    outputs = []
    for seed in ("3", "3", "4"):
        cli.main(["simulate", str(straggler_trace), "--json", "--seed", seed])
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
        [sys.executable, "-m", "prism.cli", "simulate", *arguments],
        capture_output=True, text=True, cwd=root,
    )  # fmt: skip
    assert ran.returncode == 2
    assert message in ran.stderr
    assert ran.stderr.count("\n") == 1
    assert ran.stdout == ""


def test_too_few_draws_are_refused(straggler_trace, capsys):
    assert cli.main(["simulate", str(straggler_trace), "--draws", "58"]) == 2
    assert "simulate at least 59" in capsys.readouterr().err
