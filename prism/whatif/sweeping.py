"""Many scenarios of one model, here or on other machines, with the same random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import xarray as xr

from prism.base import schema
from prism.base.files import write_atomically
from prism.base.runner import Executor, WorkerError, run_cells
from prism.model.engine.lowering import fingerprint
from prism.model.engine.montecarlo import simulate
from prism.model.step_model import StepModel
from prism.whatif.scenarios import Scenario, unchanged

SweepError = WorkerError


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
    noise and `prism.base.stats.increase` gives them a paired interval. Results do not depend on where they were computed.

    Parameters
    ----------
    model : StepModel
    scenarios : mapping of name to scenario
        Functions from a model to a model, applied here; None is the model as it is.
    draws, seed
        As `simulate`.
    executor : Executor, optional
        For instance ``concurrent.futures.ProcessPoolExecutor()`` or ``dask.distributed.Client(...).get_executor()``.
    folder : path, optional
        Finished scenarios are kept there, and not computed again where model, seed and number of draws are the same.
    progress : bool
        Show a bar.

    Returns
    -------
    Dataset
        ``step_time(scenario, draw)``, seconds.

    Raises
    ------
    ValueError
        No scenarios; a scenario that cannot be applied, returns no model, or changes nothing.
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
    models = {name: _changed(name, model, change) for name, change in scenarios.items()}
    kept = _Cache(folder, draws, seed)
    _check_changes(model, models, scenarios, seed)
    found = {name: row for name, m in models.items() if (row := kept.load(m)) is not None}
    left = {name: m for name, m in models.items() if name not in found}
    # one thread each on an executor, which has as many workers as it wants
    threads = None if executor is None else 1
    cells = {name: (m, draws, seed, threads) for name, m in left.items()}
    for name, row in run_cells(
        _cell, cells, executor=executor, progress=progress, total=len(models)
    ):
        kept.save(left[name], row)
        found[name] = row
    return schema.dataset(
        {"step_time": (("scenario", "draw"), np.stack([found[n] for n in scenarios]))},
        coords={"scenario": list(scenarios)},
        made_by="prism.sweep",
        source=schema.derived_source(model.source, *(m.source for m in models.values())),
        seed=seed,
        provenance={"draws": draws},
    )


def _changed(name: str, model: StepModel, change: Scenario | None) -> StepModel:
    """The model under a scenario; whatever is wrong with it is said before anything is computed."""
    if change is None:
        return model
    try:
        changed = change(model)
    except ValueError as fault:
        raise ValueError(f"scenario {name!r}: {fault}") from fault
    if not isinstance(changed, StepModel):
        raise ValueError(f"scenario {name!r} returns {changed!r}, needs to return a step model")
    return changed


def _check_changes(
    model: StepModel, models: Mapping[str, StepModel], scenarios: Mapping, seed: int
) -> None:
    """A what-if that changes nothing must not look like a result."""
    before = None
    for name, changed in models.items():
        change = scenarios[name]
        if change in (None, unchanged) or getattr(change, "allows_no_effect", False):
            continue
        if before is None:
            before = fingerprint(model, seed=seed)
        if changed is model or fingerprint(changed, seed=seed) == before:
            raise ValueError(f"scenario {name!r} changes nothing: no op of the model is affected")


def _cell(model: StepModel, draws: int, seed: int, threads: int | None) -> np.ndarray:
    return simulate(model, draws, seed=seed, threads=threads)["step_time"].values


class _Cache:
    """Cache of finished scenarios, keyed by model fingerprint."""

    def __init__(self, folder: str | Path | None, draws: int, seed: int) -> None:
        self.folder, self.draws, self.seed = None if folder is None else Path(folder), draws, seed
        if self.folder is not None:
            if self.folder.exists() and not self.folder.is_dir():
                raise ValueError(f"{folder} is not a folder")
            self.folder.mkdir(parents=True, exist_ok=True)

    def _path(self, model: StepModel) -> Path:
        return self.folder / f"{fingerprint(model, seed=self.seed)}-{self.draws}.npy"

    def load(self, model: StepModel) -> np.ndarray | None:
        if self.folder is None:
            return None
        try:
            row = np.load(self._path(model), allow_pickle=False)
        except (OSError, ValueError, EOFError):
            # not there, or damaged: then it is computed
            return None
        return row if row.shape == (self.draws,) and np.isfinite(row).all() else None

    def save(self, model: StepModel, row: np.ndarray) -> None:
        if self.folder is not None:
            path = self._path(model)
            write_atomically({path: lambda part: np.save(part, row)})


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
    if which.dtype.kind not in "iu" or name in runs["scenario"].values:
        raise ValueError(f"which needs whole numbers, and {name!r} must not be a scenario yet")
    if which.shape != (step.shape[1],) or which.min() < 0 or which.max() >= step.shape[0]:
        raise ValueError(
            f"which needs for each of {step.shape[1]} draws one of {step.shape[0]} scenarios"
        )
    mixed = step[which, np.arange(step.shape[1])]
    return schema.dataset(
        {"step_time": (("scenario", "draw"), np.vstack([step, mixed]))},
        coords={"scenario": [*map(str, runs["scenario"].values), name]},
        made_by="prism.whatif.switching",
        source=runs.attrs["source"],
        seed=runs.attrs["seed"],
        provenance=schema.provenance(runs),
    )
