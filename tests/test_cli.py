"""The command line, as a shell sees it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

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
        (["pyproject.toml"], "not a .parquet file"),
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
