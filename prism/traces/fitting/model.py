"""Fit of a step model to measured steps: duration pools, idle gaps and coupling."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import xarray as xr

from prism.base import schema
from prism.base.stats import crps
from prism.model.coupling import Coupling
from prism.model.engine.montecarlo import simulate
from prism.model.pools import DurationPool, fitting
from prism.model.signature import PoolKey
from prism.model.step_model import StepModel
from prism.traces.fitting.coupling import fit_coupling
from prism.traces.fitting.gaps import kept_kinds
from prism.traces.gap_ops import EFFECTIVE, WHOLE
from prism.traces.measured_steps import MeasuredSteps, measure_steps

MIN_SAMPLES = 10
MIN_STEPS = 20
#: how much better a prediction has to be for gaps to be taken whole
CLEARLY = 0.01


def fit_pools(
    measured: MeasuredSteps,
    *,
    family: str = "empirical",
    min_samples: int = MIN_SAMPLES,
    ops: np.ndarray | None = None,
) -> dict[PoolKey, DurationPool]:
    """A pool per (signature, site, position), and the coarser pools that small ones borrow from.

    Parameters
    ----------
    measured : MeasuredSteps
    family : str
        Family that `prism.model.pools.fit` takes; ops whose samples have no spread, or are zero at times, stay empirical.
    min_samples : int
        A key with fewer samples gets no pool of its own, so that its ops borrow from the next
        coarser key. The fleet-wide pool of a signature is always there.
    ops : bool ndarray (op,), optional
        Ops whose samples are used, all by default; signatures of no such op get no pool.

    Returns
    -------
    dict of PoolKey to DurationPool
    """
    duration = measured.duration.values.T
    dag, samples = measured.dag, defaultdict(list)
    for op, index in enumerate(dag.pool_key_of_op):
        if ops is not None and not ops[op]:
            continue
        key = dag.pool_keys[index]
        for k in {key, *key.parents()}:
            samples[k].append(duration[op])
    fitted = {}
    for key, parts in samples.items():
        x = np.concatenate(parts)
        if x.size >= min_samples or key == key.fleet:
            # gaps that are not always there have an atom at zero, which no family has
            as_they_are = x.size < 3 or np.ptp(x) == 0 or x.min() <= 0
            fitted[key] = fitting.fit(x, "empirical" if as_they_are else family).pool
    return fitted


def borrowing(measured: MeasuredSteps, pools: Mapping[PoolKey, DurationPool]) -> xr.Dataset:
    """Count the samples of each place of the step, and tell how far it borrows from others.

    Parameters
    ----------
    measured : MeasuredSteps
    pools : mapping
        Pools of `fit_pools`.

    Returns
    -------
    Dataset
        Per finest pool key (dimension `pool`, named by its text): ``count``, samples of its own;
        ``borrowed``: 0 for a pool of its own, 1 for one of any position, 2 for one of any site;
        ``samples_used``, of the pool that its ops draw from.
    """
    steps = measured.n_steps
    dag = measured.dag
    own = np.bincount(dag.pool_key_of_op, minlength=len(dag.pool_keys)) * steps
    lines = [[key, *key.parents()] for key in dag.pool_keys]
    used = [next(k for k in line if k in pools) for line in lines]
    total: dict[PoolKey, int] = defaultdict(int)
    for line, n in zip(lines, own, strict=True):
        for k in line:
            total[k] += int(n)

    def depth(key: PoolKey, found: PoolKey) -> int:
        if found == key:
            return 0
        return 1 if found.site == key.site else 2

    return schema.dataset(
        {
            "count": ("pool", own),
            "borrowed": ("pool", [depth(a, b) for a, b in zip(dag.pool_keys, used, strict=True)]),
            "samples_used": ("pool", [total[k] for k in used]),
        },
        coords={"pool": np.array([str(k) for k in dag.pool_keys], dtype="U")},
        made_by="prism.traces.borrowing",
        source=measured.source,
    )


def model_from_trace(
    trace: xr.Dataset,
    *,
    gpus_per_node: int = 8,
    family: str = "empirical",
    min_samples: int = MIN_SAMPLES,
) -> StepModel:
    """The step model of a trace: graph, idle gaps that delay the step, pools and coupling.

    Most idle gaps are left out: they are waits on what the graph does not have, and drawing them counts
    them twice. Kinds of op whose gaps move the replay keep them (`choose_gaps`).

    Parameters
    ----------
    trace : Dataset of `read_trace`
    gpus_per_node, family, min_samples
        Passed on to `build_graph` and `fit_pools`.

    Returns
    -------
    StepModel

    Raises
    ------
    TraceError
        If `build_graph` refuses the trace.
    """
    measured = measure_steps(trace, gpus_per_node=gpus_per_node)
    return fit_model(measured, family=family, min_samples=min_samples)


def fit_model(
    measured: MeasuredSteps,
    *,
    family: str = "empirical",
    min_samples: int = MIN_SAMPLES,
    gaps: Mapping[str, str] | None = None,
) -> StepModel:
    """The step model of a graph and its measured steps: pools, gaps, and coupling if there are enough steps.

    With fewer than `MIN_STEPS` steps ops are taken as independent, since dependence cannot be seen.

    Parameters
    ----------
    measured, family, min_samples
        Passed on to `fit_pools`.
    gaps : mapping of op kind to ``effective`` or ``whole``, optional
        Kinds that keep their idle gaps; as `choose_gaps` chooses on these steps if not given.

    Returns
    -------
    StepModel
        Its graph has the kept gaps as ops; `remove_gaps` gives back the one that was handed in.
    """
    chosen = choose_gaps(measured) if gaps is None else gaps
    return _fit(measured.with_gaps(chosen), family, min_samples)


def _fit(wide: MeasuredSteps, family: str, min_samples: int) -> StepModel:
    """Fit pools and coupling to steps whose kept gaps are ops."""
    fitted = fit_pools(wide, family=family, min_samples=min_samples)
    enough = wide.n_steps >= MIN_STEPS
    coupling = fit_coupling(wide, fitted).coupling if enough else Coupling.independent()
    return StepModel(wide.dag, fitted, coupling, source=wide.source)


def choose_gaps(measured: MeasuredSteps, *, draws: int = 1000, seed: int = 0) -> dict[str, str]:
    """Kinds of op that keep their idle gaps, and whether whole or only the effective part.

    Gaps are kept where the replay needs them (`kept_kinds`), and only their effective part; a kind's gaps
    are taken whole if the model then predicts the steps it was fitted to clearly better: their CRPS falls
    by more than `CLEARLY`. Kinds are tried one after the other, the one that moves the replay most first.

    Parameters
    ----------
    measured : MeasuredSteps
        The steps used for fitting, never those of a test.
    draws : int
        Draws of each trial.
    seed : int

    Returns
    -------
    dict of op kind to ``effective`` or ``whole``
    """
    kept = list(kept_kinds(measured))
    chosen = dict.fromkeys(kept, EFFECTIVE)

    def score(choice: Mapping[str, str]) -> float:
        model = _fit(measured.with_gaps(choice), "empirical", MIN_SAMPLES)
        return crps(simulate(model, draws, seed=seed)["step_time"], measured.step_time)

    best = score(chosen) if kept else 0.0
    for kind in kept:
        trial = chosen | {kind: WHOLE}
        found = score(trial)
        if found < (1 - CLEARLY) * best:
            chosen, best = trial, found
    return chosen
