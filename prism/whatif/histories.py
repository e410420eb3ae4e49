"""Degradations that come and go: which step meets what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import xarray as xr

from prism.model.step_model import StepModel
from prism.whatif.scenarios import Scenario
from prism.whatif.sweeping import Executor, sweep, switching


def rotating(draws: int, places: int, *, every: int = 1) -> np.ndarray:
    """Which of so many places is struck in each step: the next one after every so many steps.

    Examples
    --------
    >>> rotating(7, 3, every=2).tolist()
    [0, 0, 1, 1, 2, 2, 0]
    """
    _check_counts(draws=draws, places=places, every=every)
    return np.arange(draws) // every % places


def flapping(draws: int, *, up: float, down: float, seed: int = 0) -> np.ndarray:
    """A link that is good and bad by turns: whether each step meets it bad, bool (draw,).

    A Markov chain of two states that stays good for `up` and bad for `down` steps on average, and starts
    in its steady state, bad with probability ``down / (up + down)``.

    Examples
    --------
    >>> round(float(flapping(100_000, up=30, down=10).mean()), 2)
    0.25
    """
    _check_counts(draws=draws)
    if not (1 <= up < np.inf and 1 <= down < np.inf):
        raise ValueError(f"up and down are mean numbers of steps, at least 1, got {up} and {down}")
    u = np.random.default_rng(seed).random(draws)
    bad = np.empty(draws, bool)
    state = u[0] < down / (up + down)
    for step in range(draws):
        if step:
            state = u[step] >= 1 / down if state else u[step] < 1 / up
        bad[step] = state
    return bad


def throttled(
    draws: int,
    *,
    factor: float,
    heating: float,
    limit: float = 0.9,
    resume: float = 0.8,
    cooled: float = 0.5,
) -> np.ndarray:
    """A node that heats up, throttles, cools, and speeds up again: factor on its durations by step, (draw,).

    Temperature, from 0 (cold) to 1 (what full speed would end at), follows one time constant: ``T += (target - T) /
    heating`` a step, target 1 at full speed and `cooled` when throttled. It throttles above `limit` until it is below
    `resume`.

    Parameters
    ----------
    draws : int
    factor : float
        Slow-down factor of a throttled step, at least 1.
    heating : float
        Time constant in steps, at least 1.
    limit, resume, cooled : float
        ``cooled < resume < limit < 1``: anything else would never throttle, or never stop.

    Examples
    --------
    >>> throttled(60, factor=1.3, heating=10)[[0, 23, 40]].tolist()
    [1.0, 1.3, 1.0]
    """
    _check_counts(draws=draws)
    if not (1 <= factor < np.inf and 1 <= heating < np.inf):
        raise ValueError(f"factor and heating must be at least 1, got {factor} and {heating}")
    if not 0 <= cooled < resume < limit < 1:
        raise ValueError(
            f"needs 0 <= cooled < resume < limit < 1, got {cooled}, {resume} and {limit}"
        )
    out, temperature, slow = np.ones(draws), 0.0, False
    for step in range(draws):
        slow = temperature > resume if slow else temperature > limit
        out[step] = factor if slow else 1.0
        temperature += ((cooled if slow else 1.0) - temperature) / heating
    return out


def simulate_course(
    model: StepModel,
    course: np.ndarray,
    scenario: Callable[[float], Scenario | None],
    *,
    name: str,
    levels: int = 16,
    seed: int = 0,
    executor: Executor | None = None,
    progress: bool = False,
) -> xr.Dataset:
    """Step times of a job whose state follows a course: a speed curve, a flapping link, a straggler that moves.

    Each state is simulated for all steps with the same random numbers; step d takes the draw d of its own state.

    Parameters
    ----------
    model : StepModel
    course : array (draw,)
        State of each step: a factor, a node.
    scenario : callable, state to scenario
        For instance ``lambda f: NodeSpeeds({3: f})`` or ``HotNode``; None is the model as it is.
    name : str
        Of the course among the scenarios of the result; the others are the states.
    levels : int
        A course of more different values is rounded to so many of them (its quantiles).
    seed, executor, progress
        Passed on to `prism.sweep`.

    Returns
    -------
    Dataset
        ``step_time(scenario, draw)``, s.
    """
    course = np.asarray(course)
    if course.ndim != 1 or course.size == 0 or not np.isfinite(course.astype(float)).all():
        raise ValueError(f"course needs a finite value for each step, got shape {course.shape}")
    states, which = np.unique(course, return_inverse=True)
    if states.size > levels:
        cuts = np.quantile(course, (np.arange(levels) + 0.5) / levels, method="nearest")
        states = np.unique(cuts)
        which = np.abs(course[:, None] - states).argmin(axis=1)
    cells = {f"{name} {s.item():g}": _State(scenario(s.item())) for s in states}
    runs = sweep(model, cells, course.size, seed=seed, executor=executor, progress=progress)
    return switching(runs, which, name=name)


@dataclass(frozen=True)
class _State:
    """One state of a course, which may be the model as it is."""

    scenario: Scenario | None
    allows_no_effect = True

    def __call__(self, model: StepModel) -> StepModel:
        return model if self.scenario is None else self.scenario(model)


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
