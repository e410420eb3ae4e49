"""Idle gaps: which of them delay the step, and which are only waiting.

Before an op starts there may be idle time that no known dependency explains. Some of it is work that the
graph does not have (launches, the host), some is waiting for something that the graph does not have, in
the shadow of what the step waits for anyway. Drawing the second kind anew counts a wait twice.

Only the *effective* gap counts: what is left of it when the op's slack is used up,

    effective_i = max(0, gap_i - slack_i),

with the slack from the replay of its own step, with all its gaps. Replacing every gap by its effective part
leaves each measured step time as it was: ops of the longest path have no slack, and keep theirs. A kind of op
keeps its gaps if leaving them out moves the mean replay by more than `LEAST_SHIFT`; they become ops of class
``gap`` before it, with pools and loadings of their own.

Idle time that is always there, and waits for nothing, has to be drawn whole: its effective part is small only
where something else was late. Both ways replay each step alike, so replay cannot tell them apart; the steps'
distribution can (`prism.traces.choose_gaps`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from prism.model.engine.montecarlo import propagate
from prism.traces.measured_steps import MeasuredSteps

#: a kind of op whose gaps move the mean replay by less than this keeps none
LEAST_SHIFT = 0.001
#: and all that keep none together move it by so many times that at most
GIVEN_UP = 5


def gap_shifts(measured: MeasuredSteps) -> dict[str, float]:
    """Compute the relative change of the mean replay without the effective gaps of each kind.

    Returns
    -------
    dict of op kind to float >= 0
    """
    shift, kinds = _replays(measured)
    return {kind: shift([k for k in kinds if k != kind]) for kind in kinds}


def kept_kinds(measured: MeasuredSteps) -> dict[str, float]:
    """Kinds of op that keep their gaps, chosen on the steps that are given: never on those of a test.

    Kinds are given up one after the other, the one that moves the replay least first, if giving it up moves
    the mean replay by no more than `LEAST_SHIFT`, and all that were given up by no more than `GIVEN_UP` times
    that: gaps of several kinds at once may hide each other, and none of them moves it alone.

    Returns
    -------
    dict of op kind to float
        The kinds that are kept, the one that moves the mean replay most by itself first, and how much.
    """
    shift, kinds = _replays(measured)
    alone = gap_shifts(measured)
    kept, now = kinds, 0.0
    for kind in sorted(kinds, key=lambda k: alone[k]):
        fewer = [k for k in kept if k != kind]
        without = shift(fewer)
        if without - now <= LEAST_SHIFT and without <= GIVEN_UP * LEAST_SHIFT:
            kept, now = fewer, without
    return {k: alone[k] for k in sorted(kept, key=lambda k: -alone[k])}


def _replays(measured: MeasuredSteps) -> tuple[Callable[[list[str]], float], list[str]]:
    """Return the relative change of the mean replay as a function of the kinds kept, and all kinds."""
    dag, gaps = measured.dag, measured.effective_gaps.T
    duration = measured.duration.values.T
    kind = dag.kind

    def mean(gap: np.ndarray) -> float:
        return float(propagate(dag, duration, gap)[1].max(axis=0).mean())

    whole = mean(gaps)

    def shift(kept: list[str]) -> float:
        return 1 - mean(np.where(np.isin(kind, kept)[:, None], gaps, 0.0)) / whole if whole else 0.0

    return shift, list(dict.fromkeys(kind.tolist()))
