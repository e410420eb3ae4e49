"""Matrix products, over and over: how long, at which clock, at which temperature."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tqdm import tqdm

from prism.base.files import write_rows
from prism.measure.bench.machine import as_yaml, node_name
from prism.measure.bench.products import Device, devices

#: bytes of a product's three matrices up to which it is tried
LARGEST_PRODUCT = 64e9
BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def measure_gemm(
    folder: str | Path,
    shapes: Sequence[tuple[int, int, int]],
    *,
    dtypes: Sequence[str] = ("float32",),
    trials: int = 1000,
    warmup: int = 50,
    device: str = "auto",
    reveal_host: bool = False,
    seed: int = 0,
    progress: bool = False,
) -> Path:
    """Time matrix products on every device of this machine, sensors read after each trial.

    GPUs are timed by device events around one product, launched while others run; CPUs by the monotonic clock. Between trials the
    sensors are read and the device rests for as long: products of less than a few milliseconds leave a GPU cooler than
    training would, and its power, which NVML averages over time, lower.
    Started once a machine (by ``srun`` or by hand), each leaves one file of its own in the folder, and `prism.read_fleet`
    reads the folder.

    Parameters
    ----------
    folder : path
        Is made. Holds ``gemm-<node>.csv.gz``, a trial a row (`prism.read_fleet` names the columns), and
        ``gemm-<node>.yaml``, what was run on which kind of machine.
    shapes : sequence of (m, n, k)
        ``(m, k) @ (k, n)``.
    dtypes : sequence of str
        Of `prism.measure.bench.products.DTYPES`.
    trials, warmup : int
        Timed products of each shape, dtype and device, and products before them.
    device : str
        ``auto``, ``cuda``, ``cuda:<index>``, ``cpu`` or ``numpy``.
    reveal_host : bool
        Whether the node is called by its host name, instead of by a hash of it.
    seed : int
        Seed of the operands' values.
    progress : bool

    Returns
    -------
    Path
        The table.

    Raises
    ------
    ValueError
        No shapes or dtypes, sizes that are not positive or too large, unknown dtypes and devices.
    ImportError, OSError
        As `prism.measure.bench.products.devices`.
    """
    jobs = _checked(shapes, dtypes, trials, warmup)
    node = node_name(reveal=reveal_host)
    rows: list[dict] = []
    facts: dict[str, object] = {"node": node, "trials": trials, "warmup": warmup, "seed": seed}
    with ExitStack() as held:
        measured = devices(device, held)
        total = len(measured) * len(jobs) * (trials + warmup)
        with tqdm(total=total, desc="products", disable=not progress, leave=False) as bar:
            for one in measured:
                facts[one.name] = one.facts
                for shape, dtype in jobs:
                    rows += _trials(one, node, shape, dtype, trials, warmup, seed, bar)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # several tasks of a node, and devices measured one after the other, do not replace each other's
    task = f"-task{os.environ['SLURM_LOCALID']}" if "SLURM_LOCALID" in os.environ else ""
    name = f"gemm-{node}{task}" + ("" if ":" not in device else "-" + device.replace(":", ""))
    target = folder / f"{name}.csv.gz"
    write_rows(rows, target)
    (folder / f"{name}.yaml").write_text(as_yaml(facts))
    return target


def _checked(shapes, dtypes, trials: int, warmup: int) -> list[tuple[tuple[int, int, int], str]]:
    if trials < 1 or warmup < 0:
        raise ValueError(
            f"trials must be at least 1 and warmup not negative, got {trials} and {warmup}"
        )
    jobs = [(tuple(map(int, s)), d) for d in dtypes for s in shapes]
    if not jobs or len(set(jobs)) < len(jobs):
        raise ValueError("needs shapes and dtypes, each once")
    for (m, n, k), dtype in jobs:
        if min(m, n, k) < 1:
            raise ValueError(f"shape {m}x{n}x{k}: sizes must be at least 1")
        if dtype not in BYTES:
            raise ValueError(f"dtype {dtype!r} is not one of {', '.join(BYTES)}")
        if (m * k + k * n + m * n) * BYTES[dtype] > LARGEST_PRODUCT:
            raise ValueError(
                f"shape {m}x{n}x{k}: its matrices take more than {LARGEST_PRODUCT / 1e9:g} GB"
            )
    return jobs


def _trials(
    device: Device, node: str, shape, dtype: str, trials: int, warmup: int, seed: int, bar: tqdm
) -> list[dict]:
    m, n, k = shape
    once = device.product(m, n, k, dtype, seed)
    for _ in range(warmup):
        once()
        bar.update()
    device.sensors.read()
    fixed = {"gpu_id": f"{node}/{device.identity}", "node": node, "kernel": f"gemm {m}x{n}x{k} {dtype}",
             "dtype": dtype, "m": m, "n": n, "k": k}  # fmt: skip
    rows = []
    for run in range(trials):
        started = time.time()
        seconds = once()
        rows.append(
            fixed
            | {"run": run, "start_unix_s": round(started, 6), "duration_s": f"{seconds:.9g}"}
            | device.sensors.read()
        )
        bar.update()
    return rows
