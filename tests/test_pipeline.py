"""The pipeline in a clone of its own: same bytes twice, failures that lose nothing, experiments.

Slow (a few minutes): each run executes every notebook.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

TRACKED = "git ls-files --cached --others --exclude-standard"


def run(command: str, folder: Path, *, check: bool = True) -> subprocess.CompletedProcess:
    """Run a shell command the way `make` does: this interpreter's folder first on the path."""
    environment = {k: v for k, v in os.environ.items() if k != "PRISM_ROOT"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment["PYTHONPATH"] = str(folder)  # the clone's package, not the installed one
    ran = subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True
    )
    assert not check or ran.returncode == 0, ran.stdout + ran.stderr
    return ran


@pytest.fixture(scope="module")
def clone(root, tmp_path_factory) -> Path:
    """The working tree as a repository elsewhere, smaller than the default, reproduced once."""
    folder = tmp_path_factory.mktemp("study") / "another name"
    for name in run(TRACKED, root).stdout.splitlines():
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, folder / name)
    text = (folder / "params.yaml").read_text()
    smaller = {
        "bootstrap: 199": "bootstrap: 99",
        "rounds: 1500": "rounds: 300",
        "policies: [FCFS, EASY, SRTF, Arena*]": "policies: [FCFS, SRTF]",
        "seeds: 5": "seeds: 2",
        "slow_node: [1.1, 1.64]": "slow_node: [1.64]",
        "overruns: [killable, clamp, reestimate, demote, requeue, restart]": "overruns: [killable, demote]",
        "path: inputs/training #": "path: inputs/training/steady #",
        "dp: [32, 128, 512, 2048]": "dp: [2, 8]",
        "  draws: 2000": "  draws: 200",
        "schedules: [1f1b, interleaved_1f1b, zb_h1, zbv]": "schedules: [1f1b, zbv]",
        "bandwidths: [1.0e+9, 3.0e+9, 1.0e+10, 3.0e+10, 1.0e+11]": "bandwidths: [1.0e+9, 1.0e+11]",
        "  draws: 300": "  draws: 100",
    }
    for old, new in smaller.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "params.yaml").write_text(text)
    run("git init -q && git config user.email a@b && git config user.name n", folder)
    run("dvc repro", folder)
    run("git add -A && git commit -qm start", folder)
    return folder


def results(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted((folder / "build").iterdir()) if p.is_file()}


def test_every_result_is_there_and_forcing_changes_nothing(clone):
    before = results(clone)
    for name in (
        "fleet",
        "pools",
        "montecarlo",
        "validation",
        "hot_node",
        "scheduling",
        "scale",
        "attribution",
        "what_ifs",
    ):
        for suffix in (".nc", ".json", ".pdf", ".png"):
            assert before[name + suffix], name + suffix
    lock = (clone / "dvc.lock").read_bytes()
    run("dvc repro -f", clone)
    assert (clone / "dvc.lock").read_bytes() == lock
    after = results(clone)
    assert [n for n in before if n != ".gitignore" and before[n] != after[n]] == []


def test_saving_outputs_runs_nothing_downstream(clone):
    file = clone / "notebooks" / "30_montecarlo.ipynb"
    original = file.read_bytes()
    shutil.copy(clone / "reports" / file.name, file)
    try:
        notebook = nbformat.read(file, as_version=4)
        # papermill adds a cell that a person who ran it in JupyterLab would not have
        notebook.cells = [
            c for c in notebook.cells if "injected-parameters" not in c.metadata.get("tags", [])
        ]
        nbformat.write(notebook, file)
        out = run("dvc repro", clone).stdout
        assert "Running stage 'sources'" in out
        assert out.count("Running stage") == 1
    finally:
        file.write_bytes(original)
        run("dvc repro", clone)


def test_experiments_and_what_moved(clone):
    run("dvc exp run -q -S montecarlo.draws=200", clone)
    assert "montecarlo.draws" in run("dvc params diff", clone).stdout
    moved = json.loads(run("dvc metrics diff --json", clone).stdout)
    assert "draws" in json.dumps(moved)
    assert json.loads((clone / "build/montecarlo.json").read_text())["draws"] == 200
    run("git checkout -q . && dvc checkout -q", clone)
    assert json.loads((clone / "build/montecarlo.json").read_text())["draws"] == 1000


@pytest.mark.parametrize(
    ("override", "file", "message"),
    [
        ("montecarlo.draws=10", None, "30_montecarlo: params.yaml: montecarlo.draws"),
        ("montecarlo.drawz=10", None, "montecarlo.drawz: Extra inputs"),
        ("fleet.path=none.csv", None, "none.csv"),
        ("fleet.path=own.csv", "gpu_id,speed\na,1\n", "own.csv: needs a column duration_s"),
        ("scheduling.path=own.csv", "job_id,gpus\na,1\n", "own.csv: columns submit_s, duration_s"),
        ("workload.path=own.parquet", "", "own.parquet: not readable as a table"),
        ("pools.kernel=nope", None, "the fleet has no kernel 'nope'"),
        ("validation.path=own.csv", "rank,step\n0,1\n", "own.csv: columns op, start, duration are missing"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_loses_nothing(clone, override, file, message):
    before = results(clone)
    if file is not None:
        (clone / override.split("=")[1]).write_text(file)
    try:
        key, _, value = override.partition("=")
        edit_params(clone, key.split("."), value)
        ran = run("dvc repro", clone, check=False)
        assert ran.returncode != 0
        lines = [line for line in (ran.stdout + ran.stderr).splitlines() if message in line]
        assert len(lines) == 1, ran.stdout + ran.stderr
        assert "Traceback" not in ran.stdout + ran.stderr
        assert {n: b for n, b in results(clone).items() if n in before} == before
    finally:
        run("git checkout -q . && dvc checkout -q", clone)


def edit_params(folder: Path, key: list[str], value: str) -> None:
    from ruamel.yaml import YAML

    reader = YAML()
    content = reader.load((folder / "params.yaml").read_text())
    content[key[0]][key[1]] = reader.load(value)
    with (folder / "params.yaml").open("w") as out:
        reader.dump(content, out)
