"""The command line: for people with a trace and no notebook."""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from prism import chrome_trace, traces
from prism.base.files import write_dataset
from prism.base.tables import one_line
from prism.cli import bench, report, schedule
from prism.context.analytic_model import model_from_context
from prism.context.context import read_context
from prism.measure.bench import CollectiveError, TrainingError
from prism.model.engine.montecarlo import simulate
from prism.validation.comparison import compare
from prism.validation.cross_validation import validate

BAD_INPUT = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit status: 0, or 2 for bad input (one line on standard error)."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except (ValueError, OSError, ImportError, TrainingError, CollectiveError) as fault:
        print(f"prism: {one_line(fault)}", file=sys.stderr)
        return BAD_INPUT
    except MemoryError:
        print("prism: not enough memory; ask for fewer draws", file=sys.stderr)
        return BAD_INPUT
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prism", description="Run time of large distributed training as a random quantity."
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--seed", type=int, default=0, help="seed of the draws (default 0)")
    common.add_argument(
        "--gpus-per-node", type=int, default=8, help="ranks that share a machine (default 8)"
    )
    common.add_argument("--json", action="store_true", help="machine-readable output")
    common.add_argument("--out", metavar="FILE.nc", help="also save the result as a Dataset")
    trace = argparse.ArgumentParser(add_help=False)
    what = "folder or files of one job: profiler JSON, Chakra, tables, op-level parquet"
    trace.add_argument("trace", nargs="+", help=what)
    sim = commands.add_parser(
        "simulate",
        parents=[common],
        help="distribution of step time from measured steps, or from a spec",
        description="Fit duration pools and their coupling to the ops of traced steps, draw steps, and "
        "print p5, p50, p95, a guarantee and what the longest path is made of. Idle gaps are kept where they "
        "delay the step; the measured figures are printed beside the simulated ones.",
    )
    sim.add_argument("--draws", type=int, default=1000, help="simulated steps (default 1000)")
    sim.add_argument(
        "--chrome", metavar="FILE.json", help="also save the p95 draw as a trace for Perfetto"
    )
    sim.set_defaults(run=_simulate)
    sim.add_argument("trace", nargs="+", help=f"{what}; or one .yaml: a context")
    sim.add_argument(
        "--measured",
        metavar="FILE",
        help="compare with measured step times, a table with step_time_s",
    )
    val = commands.add_parser(
        "validate",
        parents=[trace, common],
        help="cross-validate the model on left-out steps",
        description="Fit a model to blocks of the measured steps, predict the blocks left out, and compare, "
        "beside independent draws, means only, and the measured steps themselves.",
    )
    val.add_argument(
        "--folds", type=int, default=4, help="blocks of steps, each left out once (default 4)"
    )
    val.add_argument(
        "--draws", type=int, default=4000, help="draws of each prediction (default 4000)"
    )
    val.set_defaults(run=_validate)
    bench.add_commands(commands)
    schedule.add_command(commands)
    return parser


def _simulate(arguments: argparse.Namespace) -> None:
    _check_out(arguments.out)
    specs = [t for t in arguments.trace if Path(t).suffix in (".yaml", ".yml")]
    if specs and len(arguments.trace) > 1:
        raise ValueError(f"{specs[0]}: a context is simulated by itself; give one file")
    said, model, runs = (_from_context if specs else _from_trace)(arguments)
    if arguments.measured:
        said["compared"] = report.comparison(compare(runs["step_time"], arguments.measured))
    if arguments.out:
        write_dataset(runs, arguments.out)
    if arguments.chrome:
        draw = chrome_trace.draw_at(runs, 0.95)
        chrome_trace.write_chrome_trace(model, arguments.chrome, draw, seed=arguments.seed)
    text = report.context_text if specs else report.simulation_text
    print(json.dumps(said, indent=2) if arguments.json else text(said))


def _from_context(arguments: argparse.Namespace) -> tuple:
    """Return the report on a spec, its model and its draws."""
    ctx = read_context(arguments.trace[0])
    model = model_from_context(ctx)
    begin = time.monotonic()
    watching = sys.stderr.isatty()
    small = model.dag.n_ops * model.dag.lanes <= report.FEW_OPS
    runs = simulate(model, arguments.draws, seed=arguments.seed, paths=small, progress=watching)
    return report.context(ctx, model, runs, time.monotonic() - begin), model, runs


def _from_trace(arguments: argparse.Namespace) -> tuple:
    """Return the report on measured steps, the model fitted to them and its draws."""
    watching = sys.stderr.isatty()
    with _listening() as notes:
        trace = traces.read_trace(arguments.trace, progress=watching)
        measured = traces.measure_steps(trace, gpus_per_node=arguments.gpus_per_node)
    kept = traces.choose_gaps(measured)
    model = traces.fit_model(measured, gaps=kept)
    runs = simulate(model, arguments.draws, seed=arguments.seed, paths=True, progress=watching)
    said = report.simulation(trace, measured, kept, model, runs) | {"notes": notes}
    return said, model, runs


def _validate(arguments: argparse.Namespace) -> None:
    _check_out(arguments.out)
    watching = sys.stderr.isatty()
    with _listening() as notes:
        found = validate(
            traces.read_trace(arguments.trace, progress=watching),
            gpus_per_node=arguments.gpus_per_node,
            folds=arguments.folds,
            draws=arguments.draws,
            seed=arguments.seed,
            progress=watching,
        )
    if arguments.out:
        write_dataset(found, arguments.out)
    said = report.validation(found) | {"notes": notes}
    print(json.dumps(said, indent=2) if arguments.json else report.validation_text(said))


@contextmanager
def _listening() -> Iterator[list[str]]:
    """Collects what readers of traces warn of, to be printed with the result."""
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", traces.TraceWarning)
        yield notes
    notes += [str(w.message) for w in heard if issubclass(w.category, traces.TraceWarning)]


def _check_out(name: str | None) -> None:
    if name and not name.endswith(".nc"):
        raise ValueError(f"--out {name}: give a name that ends in .nc")
