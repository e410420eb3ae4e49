"""The command line of measurements: ``prism bench gemm|collective|telemetry|training``."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import asdict

from prism.measure.bench import (
    CONDITIONS,
    Layout,
    measure_collectives,
    measure_gemm,
    measure_telemetry,
    record_training,
)
from prism.measure.bench.gemm import BYTES
from prism.measure.bench.transfers import OPS


def add_commands(commands) -> None:
    """Add ``bench`` and what it measures to a parser's commands."""
    bench = commands.add_parser("bench", help="measure this machine").add_subparsers(
        required=True, metavar="what"
    )
    _gemm_parser(bench)
    _collective_parser(bench)
    _telemetry_parser(bench)
    train = bench.add_parser(
        "training",
        help="record a small transformer trained by several processes (needs torch)",
        description="Train a small transformer on this machine's CPUs over gloo, data, tensor and pipeline "
        "parallel, and leave a table of op records a rank, for `prism simulate` and `prism validate`.",
    )
    train.add_argument("folder", help="folder for the tables")
    for name, default in asdict(Layout()).items():
        train.add_argument(
            f"--{name}", type=int, default=default, help=f"{_SIZES[name]} (default {default})"
        )
    train.add_argument("--steps", type=int, default=2000, help="steps to record (default 2000)")
    train.add_argument(
        "--skip", type=int, default=50, help="warm-up steps, not recorded (default 50)"
    )
    train.add_argument(
        "--condition",
        choices=CONDITIONS,
        default="steady",
        help="slow-rank: the last rank computes twice; background: an intermittent load",
    )
    train.add_argument(
        "--seed", type=int, default=0, help="seed of weights, data and load (default 0)"
    )
    train.set_defaults(run=_bench_training)


_SIZES = {
    "dp": "data-parallel replicas", "tp": "tensor-parallel ranks", "pp": "pipeline stages",
    "microbatches": "microbatches a step", "layers": "transformer layers", "width": "model width",
    "heads": "attention heads", "tokens": "tokens a sequence", "batch": "sequences a microbatch",
}  # fmt: skip


def _bench_training(arguments: argparse.Namespace) -> None:
    made = record_training(
        arguments.folder,
        Layout(**{name: getattr(arguments, name) for name in _SIZES}),
        steps=arguments.steps,
        skip=arguments.skip,
        condition=arguments.condition,
        seed=arguments.seed,
        progress=sys.stderr.isatty(),
    )
    print(f"{made}: {arguments.steps} steps of {len(list(made.glob('rank*.csv.gz')))} ranks")


def _gemm_parser(bench) -> None:
    gemm = bench.add_parser(
        "gemm",
        help="time repeated matrix products, with sensor readings (torch, or numpy)",
        description="Time matrix products on every GPU of this machine, or on its CPU, and read clock, power, temperature and "
        "clock-event reasons after each trial. Start it once a machine, for instance by srun; each leaves a file of "
        "its own in the folder, which prism.read_fleet reads.",
    )
    gemm.add_argument("folder", help="folder for the table")
    gemm.add_argument(
        "--shape", nargs="+", type=_shape, default=[(2048, 2048, 2048)], metavar="MxNxK",
        help="matrix sizes (default 2048x2048x2048)",
    )  # fmt: skip
    gemm.add_argument("--dtype", nargs="+", choices=list(BYTES), default=["float32"])
    gemm.add_argument("--trials", type=int, default=1000, help="timed products (default 1000)")
    gemm.add_argument(
        "--warmup", type=int, default=50, help="warm-up products, not recorded (default 50)"
    )
    gemm.add_argument(
        "--device", default="auto", help="auto, cuda, cuda:<index>, cpu (torch) or numpy"
    )
    _reveal(gemm)
    gemm.set_defaults(run=_gemm)


def _collective_parser(bench) -> None:
    collective = bench.add_parser(
        "collective",
        help="time every iteration of collectives between ranks (needs torch)",
        description="Time collectives over NCCL or RCCL where every rank has a GPU, over gloo elsewhere. Started by torchrun or "
        "srun (with MASTER_ADDR and MASTER_PORT set) it is one rank; otherwise it starts its own on this machine.",
    )
    collective.add_argument("folder", help="folder for the tables")
    collective.add_argument("--op", nargs="+", choices=OPS, default=list(OPS))
    collective.add_argument(
        "--bytes", nargs="+", type=int, default=[1024, 65536, 1 << 20], help="message sizes"
    )
    collective.add_argument(
        "--iterations", type=int, default=1000, help="timed iterations (default 1000)"
    )
    collective.add_argument(
        "--warmup", type=int, default=20, help="warm-up iterations, not recorded (default 20)"
    )
    collective.add_argument("--ranks", type=int, help="ranks to start here (default 2)")
    _reveal(collective)
    collective.set_defaults(run=_collective)


def _telemetry_parser(bench) -> None:
    telemetry = bench.add_parser(
        "telemetry",
        help="record sensors at a fixed rate (GPUs by NVML, or the host)",
        description="Read clock, power, temperature, load and clock-event reasons of every GPU, or of the host.",
    )
    telemetry.add_argument("folder", help="folder for the table")
    telemetry.add_argument(
        "--seconds", type=float, default=60.0, help="seconds to record (default 60)"
    )
    telemetry.add_argument(
        "--rate", type=float, default=10.0, help="readings a second (default 10)"
    )
    telemetry.add_argument("--device", choices=("auto", "nvml", "cpu"), default="auto")
    _reveal(telemetry)
    telemetry.set_defaults(run=_telemetry)


def _reveal(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--reveal-host", action="store_true", help="call the node by its host name, not by a hash"
    )


def _shape(text: str) -> tuple[int, int, int]:
    found = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form MxNxK, such as 512x512x512")
    return int(found[1]), int(found[2]), int(found[3])


def _gemm(arguments: argparse.Namespace) -> None:
    made = measure_gemm(
        arguments.folder,
        arguments.shape,
        dtypes=arguments.dtype,
        trials=arguments.trials,
        warmup=arguments.warmup,
        device=arguments.device,
        reveal_host=arguments.reveal_host,
        progress=sys.stderr.isatty(),
    )
    print(
        f"{made}: {arguments.trials} trials of {len(arguments.shape) * len(arguments.dtype)} products"
    )


def _collective(arguments: argparse.Namespace) -> None:
    made = measure_collectives(
        arguments.folder,
        ops=arguments.op,
        sizes=arguments.bytes,
        iterations=arguments.iterations,
        warmup=arguments.warmup,
        ranks=arguments.ranks,
        reveal_host=arguments.reveal_host,
        progress=sys.stderr.isatty(),
    )
    print(
        f"{made}: {arguments.iterations} iterations of {len(arguments.op)} ops at {len(arguments.bytes)} sizes"
    )


def _telemetry(arguments: argparse.Namespace) -> None:
    made = measure_telemetry(
        arguments.folder,
        seconds=arguments.seconds,
        rate=arguments.rate,
        device=arguments.device,
        reveal_host=arguments.reveal_host,
        progress=sys.stderr.isatty(),
    )
    print(f"{made}: {arguments.seconds:g} s at {arguments.rate:g} readings a second")
