"""A real small transformer, trained by several processes on this machine's CPUs, and recorded.

Data, tensor and pipeline parallel over gloo, 1F1B. The point is not the model but its step times: a ground
truth of many steps and ranks that anyone can make anew. Every rank is a process of its own (`prism.measure.bench.training_rank`)
and writes one table of op records.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from prism.measure.bench.machine import as_yaml, kind_of_machine

CONDITIONS = ("steady", "slow-rank", "background")
#: seconds for which background load is on or off, drawn evenly
BACKGROUND_S = (0.05, 0.5)


class TrainingError(RuntimeError):
    """A rank that failed, or ranks that took too long."""


@dataclass(frozen=True)
class Layout:
    """Layout of a training benchmark: parallel sizes, microbatches and the transformer.

    Attributes
    ----------
    dp, tp, pp : int
        Data-, tensor- and pipeline-parallel sizes. Ranks count tensor parallel fastest, then pipeline.
    microbatches : int
        A step and replica.
    layers, width, heads, tokens, batch : int
        Of the transformer (all stages together), and of one microbatch.

    Raises
    ------
    ValueError
        Sizes that are not positive or do not divide; fewer microbatches than stages.

    Examples
    --------
    >>> Layout(dp=2, pp=2).place(3)
    (1, 1, 0)
    """

    dp: int = 1
    tp: int = 1
    pp: int = 2
    microbatches: int = 4
    layers: int = 4
    width: int = 128
    heads: int = 4
    tokens: int = 64
    batch: int = 4

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for whole, part in (("heads", "tp"), ("width", "heads"), ("layers", "pp")):
            if getattr(self, whole) % getattr(self, part):
                raise ValueError(
                    f"{whole} {getattr(self, whole)} does not divide by {part} {getattr(self, part)}"
                )
        if self.microbatches < self.pp:
            raise ValueError(
                f"1F1B over {self.pp} stages needs at least as many microbatches, got {self.microbatches}"
            )

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.dp * self.tp * self.pp

    def place(self, rank: int) -> tuple[int, int, int]:
        """Data-parallel, pipeline and tensor-parallel index of a rank."""
        return rank // (self.tp * self.pp), rank // self.tp % self.pp, rank % self.tp

    def rank(self, d: int, p: int, t: int) -> int:
        """The rank at a place."""
        return (d * self.pp + p) * self.tp + t


def record_training(
    folder: str | Path,
    layout: Layout | None = None,
    *,
    steps: int = 2000,
    skip: int = 50,
    condition: str = "steady",
    seed: int = 0,
    timeout: float = 3600.0,
    progress: bool = False,
) -> Path:
    """Train and record: one table of op records a rank, for `prism.read_trace`.

    Parameters
    ----------
    folder : path
        Is made; holds ``rank<N>.csv.gz`` afterwards, the losses (``loss.txt``) and what was run on which kind
        of machine (``recording.yaml``). Those of an earlier run are replaced.
    layout : Layout, optional
    steps, skip : int
        Steps to record, and steps before that, in which caches and allocators warm up.
    condition : {"steady", "slow-rank", "background"}
        The last rank computes everything twice, or another process computes for a while and rests for a
        while (`BACKGROUND_S`) on the cores of the first rank.
    seed : int
        Of weights, data and background load.
    timeout : float
        Seconds after which the ranks are stopped.
    progress : bool
        Show a bar.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    ValueError
        Unknown condition, steps out of range.
    ImportError
        Without torch.
    TrainingError
        If a rank fails, or they take longer than `timeout`; with the last line that it wrote. Nothing
        is left in the folder then.
    """
    layout = layout or Layout()
    if condition not in CONDITIONS:
        raise ValueError(f"condition {condition!r} is not one of {', '.join(CONDITIONS)}")
    if condition == "slow-rank" and layout.tp > 1:
        raise ValueError(
            "slow-rank needs tp 1: what a rank computes twice would take part in its collectives twice"
        )
    if steps < 1 or skip < 0:
        raise ValueError(f"steps must be at least 1 and skip not negative, got {steps} and {skip}")
    try:
        import torch
    except ImportError as missing:
        raise ImportError("training needs torch (its CPU build is enough)") from missing
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    job = {"layout": asdict(layout), "steps": steps, "skip": skip, "seed": seed, "slow": condition == "slow-rank"}  # fmt: skip
    with tempfile.TemporaryDirectory(dir=folder, prefix="part-") as meet:
        with _background(seed) if condition == "background" else _quiet():
            _wait([_start(job, r, meet) for r in range(layout.ranks)], Path(meet), timeout, skip + steps, progress)  # fmt: skip
        for old in folder.glob("rank*.csv.gz"):
            old.unlink()
        for made in [*sorted(Path(meet).glob("rank*.csv.gz")), Path(meet) / "loss.txt"]:
            made.replace(folder / made.name)
        facts = {"condition": condition, **job, "torch": torch.__version__, **kind_of_machine()}
        (folder / "recording.yaml").write_text(as_yaml(facts))
    return folder


def _start(job: dict, rank: int, meet: str) -> subprocess.Popen:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "prism.measure.bench.training_rank",
            json.dumps(job | {"rank": rank, "meet": meet}),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _wait(ranks: list, meet: Path, timeout: float, steps: int, progress: bool) -> None:
    """Wait for all ranks; if one fails stop the others, which wait for it."""
    end = time.monotonic() + timeout
    counted = meet / "count"
    try:
        with tqdm(total=steps, desc="steps", disable=not progress, leave=False) as bar:
            while any(p.poll() is None for p in ranks):
                if any(p.poll() not in (None, 0) for p in ranks) or time.monotonic() > end:
                    break
                time.sleep(0.2)
                if counted.exists():
                    bar.update(counted.stat().st_size - bar.n)
    finally:
        for p in ranks:
            if p.poll() is None:
                p.kill()
    for rank, p in enumerate(ranks):
        said = p.communicate()[1].strip().splitlines()
        if p.returncode > 0:
            raise TrainingError(f"rank {rank} failed: {said[-1] if said else p.returncode}")
    if any(p.returncode for p in ranks):
        raise TrainingError(f"training was not done within {timeout:g} s, or a rank was killed")


@contextmanager
def _quiet() -> Iterator[None]:
    yield


@contextmanager
def _background(seed: int) -> Iterator[None]:
    """A process that computes for a while and rests for a while."""
    process = multiprocessing.get_context("spawn").Process(target=_burn, args=(seed,), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _burn(seed: int) -> None:
    pin(0)
    rng = random.Random(seed)
    while True:
        end = time.monotonic() + rng.uniform(*BACKGROUND_S)
        while time.monotonic() < end:
            sum(i * i for i in range(1000))
        time.sleep(rng.uniform(*BACKGROUND_S))


def pin(index: int) -> None:
    """Keep this process on one core, where the system can: a process that wanders is noise of its own."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[index % len(cores)]})
