"""Guarantees that cover the fit.

A guarantee from draws covers the error of drawing finitely often. The larger error is usually that the
pools come from finitely many steps: refit on resampled steps, simulate again, and both show.
"""

from __future__ import annotations

import numpy as np
import xarray as xr

from prism import schema, stats
from prism.dag import WorkloadDAG
from prism.montecarlo import simulate
from prism.traces import fit_model


def refitted(
    dag: WorkloadDAG,
    observed: xr.Dataset,
    *,
    q: float = 0.95,
    resamples: int = 100,
    draws: int = 1000,
    block: int = 4,
    seed: int = 0,
) -> xr.Dataset:
    """Quantile of the step time under refits to resampled steps.

    Whole steps are resampled in circular blocks (their ops vary together, neighbours too), pools and
    coupling fitted anew, and the step simulated with random numbers of its own: the spread of the
    quantile over resamples holds the error of the fit and of the simulation. It does not hold errors of
    the graph, nor that later steps may be of another kind.

    Parameters
    ----------
    dag : WorkloadDAG without lanes
    observed : Dataset of `prism.traces.observe`
    q : float
    resamples, draws : int
    block : int
        Length of the blocks of steps.

    Returns
    -------
    Dataset
        ``quantile_value(trial)``: the quantile in each resample, seconds; ``estimate_value``: from the
        steps as they are.
    """
    rng = np.random.default_rng(seed)
    n = observed.sizes["step"]
    values = np.empty(resamples)
    for r in range(resamples):
        steps = observed.isel(step=stats.block_indices(rng, n, block))
        runs = simulate(fit_model(dag, steps), draws, seed=int(rng.integers(2**62)))
        values[r] = np.quantile(runs["step_time"], q)
    whole = simulate(fit_model(dag, observed), draws, seed=seed)
    return schema.dataset(
        {
            "quantile_value": ("trial", values),
            "estimate_value": ((), float(np.quantile(whole["step_time"], q))),
        },
        made_by="prism.uncertainty.refitted",
        source="synthetic" if observed.attrs["source"] == "synthetic" else "simulated",
        seed=seed,
        provenance={**schema.provenance(observed), "q": q, "draws": draws, "block": block},
    )


def guarantee_with_fit(refits: xr.Dataset, confidence: float = 0.95) -> float:
    """Upper confidence bound on a quantile that covers the fit as well as the simulation.

    The larger of the two usual bootstrap bounds: basic, ``2 estimate - Q_(1 - confidence)`` of the
    refits, which undoes their bias (refits to few steps lie low, since a resample holds fewer distinct
    ones), and percentile, ``Q_confidence``, which keeps their skewness.

    Parameters
    ----------
    refits : Dataset of `refitted`
    confidence : float

    Returns
    -------
    float, seconds

    Raises
    ------
    ValueError
        With fewer than 40 resamples.
    """
    values = refits["quantile_value"].values
    if values.size < 40:
        raise ValueError(f"needs at least 40 resamples, got {values.size}")
    estimate = float(refits["estimate_value"])
    basic = 2 * estimate - float(np.quantile(values, 1 - confidence))
    percentile = float(np.quantile(values, confidence))
    return max(basic, percentile)
