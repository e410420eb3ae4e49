"""One job over two datacenters: from which bandwidth on is it worth it?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import xarray as xr

from prism.base import schema
from prism.model.step_model import StepModel
from prism.whatif.degradations import CrossDatacenter
from prism.whatif.scenarios import increases
from prism.whatif.sweeping import Executor, sweep


def split_cost(
    model: StepModel,
    *,
    bandwidths: Sequence[float],
    latencies: Sequence[float] = (0.01,),
    jitters: Sequence[float] = (0.0,),
    after: int | None = None,
    replicas: int | None = None,
    message: float | None = None,
    draws: int = 1000,
    seed: int = 0,
    executor: Executor | None = None,
    progress: bool = False,
) -> xr.Dataset:
    """Compute the cost of a split over two datacenters by bandwidth, latency and jitter of their link.

    Parameters
    ----------
    model : StepModel
    bandwidths, latencies, jitters : sequences of float
        byte/s, s and coefficients of variation, as in `prism.whatif.CrossDatacenter`.
    after, replicas, message
        The cut, and bytes, as there.
    draws, seed, executor, progress
        Passed on to `prism.sweep`.

    Returns
    -------
    Dataset
        ``increase(bandwidth, latency, jitter)`` of p95 over the job in one place, with paired intervals.

    Raises
    ------
    ValueError
        Nothing crosses the cut; an axis without values or with one twice.
    """
    axes = {"bandwidth": bandwidths, "latency": latencies, "jitter": jitters}
    for name, values in axes.items():
        if len(values) == 0 or len(set(values)) < len(values):
            raise ValueError(f"{name} needs values, each once, got {list(values)}")
    cells = {
        f"{b:g} {la:g} {j:g}": CrossDatacenter(after, b, la, message, j, replicas)
        for b, la, j in product(bandwidths, latencies, jitters)
    }
    runs = sweep(
        model, {"one place": None} | cells, draws, seed=seed, executor=executor, progress=progress
    )
    effect = increases(runs, "one place", seed=seed)
    shape = tuple(len(v) for v in axes.values())
    return schema.dataset(
        {
            "increase": (tuple(axes), effect["increase"].values.reshape(shape)),
            "increase_interval": (
                (*axes, "ci_bound"),
                effect["increase_interval"].values.reshape(*shape, 2),
            ),
        },
        coords={k: np.array(v, float) for k, v in axes.items()} | {"ci_bound": ["lower", "upper"]},
        made_by="prism.whatif.split_cost",
        source=runs.attrs["source"],
        seed=seed,
        provenance={
            **schema.provenance(runs),
            "after": after,
            "replicas": replicas,
            "message_bytes": message,
        },
    )


def bandwidth_needed(found: xr.Dataset, increase: float) -> xr.Dataset:
    """The least bandwidth at which p95 rises by no more than `increase`, between those that were tried.

    Interpolated in the logarithms of bandwidth and of the increase; the interval comes from the
    increase's. Infinite where even the widest link is not enough, the narrowest where that already is.

    Parameters
    ----------
    found : Dataset of `split_cost`
    increase : float
        Positive, 0.05 for five per cent.

    Returns
    -------
    Dataset
        ``bandwidth_needed(latency, jitter)``, byte/s, with interval.

    Raises
    ------
    ValueError
        Fewer than two bandwidths.

    Examples
    --------
    >>> round(_crossing(np.array([1e9, 4e9, 16e9]), np.array([0.4, 0.1, 0.025]), 0.2) / 1e9, 6)
    2.0
    """
    if found.sizes["bandwidth"] < 2 or not increase > 0:
        raise ValueError(
            f"needs a positive increase and at least two bandwidths, got {increase} and {found.sizes['bandwidth']}"
        )
    order = np.argsort(found["bandwidth"].values)
    wide = found["bandwidth"].values[order]

    def needed(values: np.ndarray) -> np.ndarray:
        return np.apply_along_axis(lambda v: _crossing(wide, v[order], increase), 0, values)

    return schema.dataset(
        {
            "bandwidth_needed": (("latency", "jitter"), needed(found["increase"].values)),
            "bandwidth_needed_interval": (
                ("latency", "jitter", "ci_bound"),
                needed(found["increase_interval"].values),
            ),
        },
        coords={k: found[k] for k in ("latency", "jitter", "ci_bound")},
        made_by="prism.whatif.bandwidth_needed",
        source=found.attrs["source"],
        seed=found.attrs.get("seed"),
        provenance={**schema.provenance(found), "increase": increase},
    )


def _crossing(bandwidth: np.ndarray, increase: np.ndarray, limit: float) -> float:
    """Find the bandwidth at which the increase falls below a limit."""
    under = increase <= limit
    if not under[-1]:
        return np.inf
    above = np.flatnonzero(~under)
    if above.size == 0:
        return float(bandwidth[0])
    i = int(above[-1])
    x = np.log(bandwidth[i : i + 2])
    y = np.log(np.maximum(increase[i : i + 2], 1e-12))
    return float(np.exp(x[0] + (y[0] - np.log(limit)) / (y[0] - y[1]) * (x[1] - x[0])))
