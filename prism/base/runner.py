"""Execution of independent cells: here or on an executor, resumable, with a progress bar."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, Protocol, TypeVar

from tqdm import tqdm

K = TypeVar("K", bound=Hashable)


class Executor(Protocol):
    """The interface of `concurrent.futures` that cells need; a dask client's executor has it too."""

    def submit(self, fn: Callable, /, *args: Any) -> Future:
        """Start ``fn(*args)``."""
        ...


class WorkerError(RuntimeError):
    """A worker that died before its cells were done."""


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def process_pool() -> Iterator[ProcessPoolExecutor]:
    """Start a worker process for each core."""
    with ProcessPoolExecutor(cores(), mp_context=get_context("spawn")) as pool:
        yield pool


def run_cells(
    function: Callable[..., Any],
    cells: Mapping[K, tuple],
    *,
    executor: Executor | None = None,
    progress: bool = False,
    total: int | None = None,
) -> Iterator[tuple[K, Any]]:
    """Compute ``function(*arguments)`` of every cell and yield each as it is done.

    Parameters
    ----------
    function : callable
        A function of a module, so that it can be sent to another process.
    cells : mapping of key to arguments
    executor : Executor, optional
        Computes the cells, in any order; without it they are computed here, in theirs.
    progress : bool
        Whether to show a bar.
    total : int, optional
        Number of cells for the bar, where some were done before.

    Yields
    ------
    key, result

    Raises
    ------
    WorkerError
        If a worker dies. What was yielded before is the caller's to keep.

    Examples
    --------
    >>> dict(run_cells(pow, {"a": (2, 3), "b": (3, 2)}))
    {'a': 8, 'b': 9}
    """
    total = len(cells) if total is None else total
    with tqdm(total=total, initial=total - len(cells), disable=not progress, leave=False) as bar:
        for key, result in _results(function, cells, executor):
            yield key, result
            bar.update()


def _results(
    function: Callable[..., Any], cells: Mapping[K, tuple], executor: Executor | None
) -> Iterator[tuple[K, Any]]:
    if executor is None:
        for key, arguments in cells.items():
            yield key, function(*arguments)
        return
    running = {executor.submit(function, *arguments): key for key, arguments in cells.items()}
    try:
        for future in as_completed(running):
            yield running[future], future.result()
    except Exception as fault:
        # dask's own error is no BrokenExecutor, and dask is not imported here
        if isinstance(fault, BrokenExecutor) or type(fault).__name__ == "KilledWorker":
            raise WorkerError(
                f"a worker died ({fault}); cells finished before are kept where a folder was given, so that "
                "the same call goes on from there"
            ) from fault
        raise
    finally:
        for future in running:
            future.cancel()
