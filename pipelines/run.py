"""Run one notebook as a pipeline stage.

``python -m pipelines.run notebooks/10_fleet.ipynb --params seed,fleet -p out build/fleet``

Hands over the named blocks of ``params.yaml``, read as YAML 1.2 and validated, and nothing else; a
notebook cannot see a parameter that its stage does not declare. The executed copy goes to
``reports/``, for reading: it holds times and random ids, so it is never an output of the pipeline.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import nbformat
import papermill
from papermill.exceptions import PapermillExecutionError
from traitlets.config import Config

from prism import study
from prism.base.specs import SpecError

CELL_TIMEOUT_S = 1800
# ipykernel 7 warns at each start about the transport of a local kernel
QUIET_KERNEL = {"transport_encryption": "auto"}


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    notebook = study.path(arguments.notebook)
    name = notebook.stem
    try:
        blocks = study.read_params().model_dump(mode="json")
    except SpecError as fault:
        return _fail(name, str(fault))
    wanted = arguments.params.split(",")
    unknown = [w for w in wanted if w not in blocks]
    if unknown:
        return _fail(name, f"params.yaml has no {', '.join(unknown)}; it has {', '.join(blocks)}")
    parameters = {w: blocks[w] for w in wanted} | dict(arguments.set or [])
    report = study.path("reports") / notebook.name
    report.parent.mkdir(exist_ok=True)
    started = time.monotonic()
    try:
        _execute(notebook, report, parameters)
    except PapermillExecutionError as fault:
        message = " ".join(str(fault.evalue).split())
        return _fail(name, f"{fault.ename}: {message} (traceback: reports/{notebook.name})")
    print(f"{name}: done in {time.monotonic() - started:.1f} s", flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebook")
    parser.add_argument("--params", required=True, help="blocks of params.yaml, comma-separated")
    parser.add_argument(
        "-p", dest="set", nargs=2, action="append", metavar=("NAME", "PATH"),
        help="a file or stem that the notebook reads or writes",
    )  # fmt: skip
    return parser


def _execute(notebook: Path, report: Path, parameters: dict) -> None:
    os.environ["TQDM_DISABLE"] = "1"
    os.environ["PRISM_ROOT"] = str(study.root())
    try:
        papermill.execute_notebook(
            str(notebook),
            str(report),
            parameters=parameters,
            kernel_name="python3",
            progress_bar=False,
            execution_timeout=CELL_TIMEOUT_S,
            config=Config({"KernelManager": QUIET_KERNEL, "AsyncKernelManager": QUIET_KERNEL}),
        )
    finally:
        if report.is_file():
            _scrub(report)


def _scrub(report: Path) -> None:
    """Drop times and places of this machine from an executed notebook."""
    notebook = nbformat.read(report, as_version=4)
    notebook.metadata.pop("papermill", None)
    for cell in notebook.cells:
        cell.metadata.pop("papermill", None)
        cell.metadata.pop("execution", None)
    nbformat.write(notebook, report)


def _fail(name: str, message: str) -> int:
    print(f"{name}: {message}", file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
