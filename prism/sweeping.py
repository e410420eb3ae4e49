"""Many scenarios of one model, here or on other machines, with the same random numbers."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping
from concurrent.futures import BrokenExecutor, Future
from pathlib import Path
from typing import Protocol

import numpy as np
import xarray as xr
from tqdm import tqdm

from prism import schema
from prism.model import StepModel
from prism.montecarlo import simulate
from prism.scenarios import Scenario, unchanged


class Executor(Protocol):
    """What runs cells elsewhere: the interface of `concurrent.futures`, also a dask client's executor."""

    def submit(self, fn: Callable, /, *args) -> Future:
        """Start ``fn(*args)``."""


class SweepError(RuntimeError):
    """A worker that died; what was finished before is kept where `folder` was given."""


def sweep(
    model: StepModel,
    scenarios: Mapping[str, Scenario | None],
    draws: int = 1000,
    *,
    seed: int = 0,
    executor: Executor | None = None,
    folder: str | Path | None = None,
    progress: bool = False,
) -> xr.Dataset:
    """Simulate a model under several scenarios with common random numbers.

    Draw d uses the same random numbers in every scenario, so differences between scenarios are not
    noise and `prism.stats.increase` gives them a paired interval. Results do not depend on where they were computed.

    Parameters
    ----------
    model : StepModel
    scenarios : mapping of name to scenario
        Functions from a model to a model; None is the model as it is. With an executor that sends work to other
        processes, functions that can be pickled: of a module, not lambdas.
    draws, seed
        As `simulate`.
    executor : Executor, optional
        For instance ``concurrent.futures.ProcessPoolExecutor()`` or ``dask.distributed.Client(...).get_executor()``.
    folder : path, optional
        Finished scenarios are kept there, and not computed again by a sweep of the same model, seed and number of
        draws.
    progress : bool
        Show a bar.

    Returns
    -------
    Dataset
        ``step_time(scenario, draw)``, seconds.

    Raises
    ------
    ValueError
        No scenarios; a scenario that changes nothing.
    SweepError
        If a worker dies.

    Examples
    --------
    A scenario of one's own is a function:

    >>> from prism import Scaled, StepModel
    >>> def slow_transfers(model: StepModel) -> StepModel:
    ...     return model.override(model.dag.is_inter_node, lambda op, pool: Scaled(pool, 2.0))
    """
    if not scenarios:
        raise ValueError("a sweep needs at least one scenario, none given")
    kept = _Kept(folder, model, draws, seed)
    found = {
        name: row for name, change in scenarios.items() if (row := kept.load(change)) is not None
    }
    left = {name: change for name, change in scenarios.items() if name not in found}
    sources = {model.source}
    with tqdm(total=len(scenarios), initial=len(found), disable=not progress, leave=False) as bar:
        for name, (row, source) in _computed(model, left, draws, seed, executor):
            kept.save(left[name], row, source)
            found[name] = (row, source)
            bar.update()
    sources |= {source for _, source in found.values()}
    return schema.dataset(
        {"step_time": (("scenario", "draw"), np.stack([found[n][0] for n in scenarios]))},
        coords={"scenario": list(scenarios)},
        made_by="prism.sweep",
        source="synthetic" if "synthetic" in sources else "simulated",
        seed=seed,
        provenance={"draws": draws},
    )


def _computed(model, scenarios, draws, seed, executor):
    """Scenarios as they are done: name, (step times, source)."""
    if executor is None:
        for name, change in scenarios.items():
            yield name, _cell(name, model, change, draws, seed, None)
        return
    # one thread each: the executor has as many workers as it wants
    running = {
        name: executor.submit(_cell, name, model, change, draws, seed, 1)
        for name, change in scenarios.items()
    }
    for name, future in running.items():
        try:
            yield name, future.result()
        except BrokenExecutor as fault:
            raise SweepError(
                f"a worker died at or before scenario {name!r} ({fault}); scenarios finished before it are kept where a "
                "folder was given, so that the same sweep goes on from there"
            ) from fault


def _cell(
    name: str, model: StepModel, change: Scenario | None, draws: int, seed: int, threads: int | None
) -> tuple[np.ndarray, str]:
    changed = model if change is None else change(model)
    if change not in (None, unchanged) and not getattr(change, "may_be_idle", False):
        _check_changes(name, model, changed)
    runs = simulate(changed, draws, seed=seed, threads=threads)
    return runs["step_time"].values, runs.attrs["source"]


def _check_changes(name: str, before: StepModel, after: StepModel) -> None:
    """A what-if that changes nothing must not look like a result."""
    same = (
        after.dag is before.dag
        and dict(after.pools) == dict(before.pools)
        and dict(after.overrides) == dict(before.overrides)
        and after.coupling == before.coupling
    )
    if same:
        raise ValueError(f"scenario {name!r} changes nothing: no op of the model is affected")


class _Kept:
    """Finished scenarios in a folder, by what they are the result of."""

    def __init__(self, folder: str | Path | None, model: StepModel, draws: int, seed: int) -> None:
        self.folder = None if folder is None else Path(folder)
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.model = hashlib.blake2b(pickle.dumps((model, draws, seed), protocol=5))

    def _path(self, change: Scenario | None) -> Path:
        key = self.model.copy()
        key.update(pickle.dumps(change, protocol=5))
        return self.folder / f"{key.hexdigest()[:32]}.npz"

    def load(self, change: Scenario | None) -> tuple[np.ndarray, str] | None:
        if self.folder is None or not self._path(change).is_file():
            return None
        with np.load(self._path(change), allow_pickle=False) as file:
            return file["step_time"], str(file["source"])

    def save(self, change: Scenario | None, row: np.ndarray, source: str) -> None:
        if self.folder is not None:
            path = self._path(change)
            part = path.with_suffix(".part.npz")
            np.savez(part, step_time=row, source=source)
            part.replace(path)


def switching(runs: xr.Dataset, which: np.ndarray, *, name: str) -> xr.Dataset:
    """Step times of a job that goes from scenario to scenario: a rotating straggler, a throttled node, a flapping link.

    Draws of all scenarios share their random numbers, so step d of the job is draw d of the scenario that
    holds then.

    Parameters
    ----------
    runs : Dataset of `sweep`
    which : int ndarray (draw,)
        Index of the scenario of each step.
    name : str
        Of the result.

    Returns
    -------
    Dataset
        `runs` with one more scenario.

    Raises
    ------
    ValueError
        If `which` has another length than the draws, or names a scenario that there is not.
    """
    step = runs["step_time"].values
    which = np.asarray(which)
    if which.shape != (step.shape[1],) or which.min() < 0 or which.max() >= step.shape[0]:
        raise ValueError(
            f"which needs for each of {step.shape[1]} draws one of {step.shape[0]} scenarios"
        )
    mixed = step[which, np.arange(step.shape[1])]
    return schema.dataset(
        {"step_time": (("scenario", "draw"), np.vstack([step, mixed]))},
        coords={"scenario": [*map(str, runs["scenario"].values), name]},
        made_by="prism.sweeping.switching",
        source=runs.attrs["source"],
        seed=runs.attrs["seed"],
        provenance=schema.provenance(runs),
    )
