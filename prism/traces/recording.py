"""Record one's own training loop the way PRISM reads it. Needs torch, which is not a dependency."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prism.base.files import write_atomically


@contextmanager
def record(
    folder: str | Path, *, steps: int = 20, skip: int = 3, rank: int | None = None
) -> Iterator[Any]:
    """Profile `steps` steps of a training loop and write one file for this rank.

    Sets up `torch.profiler.profile` with what a graph needs: steps marked, shapes, metadata of
    collectives, and on a GPU the events by which streams wait for each other. Run it on every rank.

    Parameters
    ----------
    folder : path
        Is made; holds ``rank<N>.pt.trace.json.gz`` afterwards, written under another name first. An
        existing file of this rank is replaced.
    steps : int
        Steps to record. One shows the graph; its spread takes 20 and more.
    skip : int
        Steps before that, in which caches warm up.
    rank : int, optional
        As `torch.distributed` says, else from the environment (``RANK``), else 0.

    Yields
    ------
    torch.profiler.profile
        Call its ``step()`` at the end of every step.

    Raises
    ------
    ImportError
        Without torch.
    ValueError
        If `steps` is less than 1 or `skip` negative.

    Examples
    --------
    ::

        with prism.traces.record("traces", steps=50) as profile:
            for batch in loader:
                train(batch)
                profile.step()
        trace = prism.read_trace("traces")
    """
    if steps < 1 or skip < 0:
        raise ValueError(f"steps must be at least 1 and skip not negative, got {steps} and {skip}")
    try:
        import torch
        from torch import profiler
    except ImportError as missing:
        raise ImportError("recording needs torch; install it as your training does") from missing
    number = _rank(torch) if rank is None else rank
    target = Path(folder) / f"rank{number}.pt.trace.json.gz"
    target.parent.mkdir(parents=True, exist_ok=True)

    def write(profile: Any) -> None:
        write_atomically({target: lambda part: profile.export_chrome_trace(str(part))})

    activities = [profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(profiler.ProfilerActivity.CUDA)
    with profiler.profile(
        activities=activities,
        # one step of warm-up belongs to the profiler itself
        schedule=profiler.schedule(skip_first=skip, wait=0, warmup=1, active=steps, repeat=1),
        on_trace_ready=write,
        record_shapes=True,
        experimental_config=_synchronisation(torch),
    ) as profile:
        yield profile


def _rank(torch: Any) -> int:
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return int(os.environ.get("RANK", "0"))


def _synchronisation(torch: Any) -> Any:
    """Options under which the profiler records which stream waits for which; None where it cannot."""
    try:
        from torch._C._profiler import _ExperimentalConfig
    except ImportError:
        return None
    try:
        return _ExperimentalConfig(enable_cuda_sync_events=True)
    except TypeError:
        return None
