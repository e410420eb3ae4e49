"""Collectives and transfers between ranks, each iteration of every rank.

Started by ``torchrun`` or ``srun`` (a process a rank), or by itself: then it starts its own ranks on this machine.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

from tqdm import tqdm

from prism.base.files import write_rows
from prism.measure.bench.machine import as_yaml, kind_of_machine, node_name
from prism.measure.bench.transfers import OPS, buffers, timed

#: bytes of one buffer up to which it is tried
LARGEST_MESSAGE = 16 * 1024**3


class CollectiveError(RuntimeError):
    """A rank that failed, or ranks that took too long."""


def measure_collectives(
    folder: str | Path,
    *,
    ops: Sequence[str] = OPS,
    sizes: Sequence[int] = (1024, 65536, 1 << 20),
    iterations: int = 1000,
    warmup: int = 20,
    ranks: int | None = None,
    timeout: float = 600.0,
    reveal_host: bool = False,
    progress: bool = False,
) -> Path:
    """Time collectives over NCCL (RCCL) where every rank has a GPU, over gloo elsewhere.

    Ranks meet in a barrier before each iteration, and note when they start and when they are done: `prism.collectives`
    tells the transfer, after the last has arrived, from the skew of arrivals.

    Parameters
    ----------
    folder : path
        Is made. Holds ``collective-<node>-rank<r>.csv.gz`` for each rank, and ``collective.yaml``.
    ops : sequence of str
        Of `prism.measure.bench.transfers.OPS`. One that the backend does not have is left out, and noted in ``collective.yaml``.
    sizes : sequence of int
        Bytes: of the buffer of an all-reduce, of what an all-gather ends with, of what a reduce-scatter and an
        all-to-all begin with, of what is sent.
    iterations, warmup : int
    ranks : int, optional
        Ranks to start on this machine; under ``torchrun`` and ``srun`` these say how many there are.
    timeout : float
        Seconds after which ranks that were started here are stopped.
    reveal_host, progress
        As in `prism.measure.bench.measure_gemm`.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    ValueError
        Unknown ops, sizes and counts that are not positive; `ranks` under a launcher that says otherwise.
    ImportError
        Without torch.
    CollectiveError
        If a rank fails, or they take longer than `timeout`.
    """
    job = _checked(ops, sizes, iterations, warmup) | {
        "reveal_host": reveal_host,
        "progress": progress,
    }
    try:
        import torch.distributed  # noqa: F401
    except ImportError as missing:
        raise ImportError(
            "collectives need torch (its CPU build is enough, with gloo)"
        ) from missing
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    launched = launcher()
    if launched is not None:
        if ranks not in (None, launched["world"]):
            raise ValueError(
                f"{ranks} ranks are asked for, and the launcher started {launched['world']}"
            )
        _rank(
            folder, job, launched["rank"], launched["world"], launched["local"], "env://", timeout
        )
        return folder
    ranks = ranks or 2
    if ranks < 2:
        raise ValueError(f"a collective needs at least 2 ranks, got {ranks}")
    with tempfile.TemporaryDirectory(dir=folder, prefix="part-") as meet:
        address = f"file://{Path(meet).resolve()}/store"
        _spawn(folder, job, ranks, address, timeout)
    return folder


def launcher() -> dict[str, int] | None:
    """Rank, world and local rank that ``torchrun`` or ``srun`` said; None if neither did.

    Raises
    ------
    ValueError
        Under ``srun`` without ``MASTER_ADDR`` and ``MASTER_PORT``.
    """
    for names in (
        ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ):
        if all(n in os.environ for n in names) and int(os.environ[names[1]]) > 1:
            for needed in ("MASTER_ADDR", "MASTER_PORT"):
                if needed not in os.environ:
                    raise ValueError(
                        f"{needed} is not set: name the first rank's host and a free port of it"
                    )
            rank, world, local = (int(os.environ[n]) for n in names)
            return {"rank": rank, "world": world, "local": local}
    return None


def _checked(ops, sizes, iterations: int, warmup: int) -> dict:
    unknown = [o for o in ops if o not in OPS]
    if unknown or not ops:
        raise ValueError(f"op {unknown[0] if unknown else ''!r} is not one of {', '.join(OPS)}")
    if not sizes or min(sizes) < 4 or max(sizes) > LARGEST_MESSAGE:
        raise ValueError(f"sizes are 4 to {LARGEST_MESSAGE} bytes, got {list(sizes)}")
    if iterations < 1 or warmup < 0:
        raise ValueError(
            f"iterations must be at least 1 and warmup not negative, got {iterations} and {warmup}"
        )
    return {"ops": list(dict.fromkeys(ops)), "sizes": [int(s) for s in dict.fromkeys(sizes)],
            "iterations": iterations, "warmup": warmup}  # fmt: skip


def _spawn(folder: Path, job: dict, ranks: int, address: str, timeout: float) -> None:
    ctx = get_context("spawn")
    made = [
        ctx.Process(target=_rank, args=(folder, job, r, ranks, r, address, timeout), daemon=True)
        for r in range(ranks)
    ]
    for p in made:
        p.start()
    try:
        for p in made:
            p.join(timeout)
            if p.exitcode != 0:
                break
    finally:
        for p in made:
            if p.is_alive():
                p.kill()
            p.join()
    failed = [r for r, p in enumerate(made) if p.exitcode != 0]
    if failed:
        raise CollectiveError(
            f"rank {failed[0]} of {ranks} failed or was not done within {timeout:g} s; its error is above"
        )


def _rank(
    folder: Path, job: dict, rank: int, world: int, local: int, address: str, timeout: float
) -> None:
    """All ops and sizes on one rank."""
    import torch
    import torch.distributed as dist

    # all ranks have to decide alike: a launcher may show each of them one GPU only
    shown = torch.cuda.device_count() if torch.cuda.is_available() else 0
    on_gpu = shown > 0 and (address == "env://" or shown >= world)
    local = local % shown if on_gpu else local
    if on_gpu:
        torch.cuda.set_device(local)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", init_method=address, rank=rank, world_size=world,
        timeout=timedelta(seconds=timeout),
    )  # fmt: skip
    node, device = node_name(reveal=job["reveal_host"]), f"cuda:{local}" if on_gpu else "cpu"
    rows, left_out = [], {}
    cells = [(op, size) for op in job["ops"] for size in job["sizes"]]
    for op, size in tqdm(
        cells, desc="collectives", disable=not job["progress"] or rank > 0, leave=False
    ):
        if op in left_out:
            continue
        try:
            run = buffers(op, size, rank, world, device)
            run()
        except torch.OutOfMemoryError:
            # of one rank: the others would wait for it
            raise
        except (RuntimeError, ValueError) as fault:
            # a backend refuses an op on all ranks alike, before anything is sent
            left_out[op] = str(fault).splitlines()[0]
            continue
        rows += timed(run, op, size, rank, world, node, job["warmup"], job["iterations"], device)
    if not rows:
        raise CollectiveError(f"the backend has none of these ops: {left_out}")
    name = folder / f"collective-{node}-rank{rank}.csv.gz"
    write_rows(rows, name)
    if rank == 0:
        what = torch.cuda.get_device_name(local) if on_gpu else "none"
        facts = {k: job[k] for k in ("ops", "sizes", "iterations", "warmup")} | {
            "ranks": world, "backend": dist.get_backend(), "left_out": left_out, "gpu": what, "torch": torch.__version__,
        }  # fmt: skip
        (folder / "collective.yaml").write_text(as_yaml(facts | kind_of_machine()))
    dist.barrier()
    dist.destroy_process_group()
