"""Constants of `prism.context.Efficiency` from measurements: whole steps, or single operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from prism.context import analytic
from prism.context.analytic_model import deterministic_step
from prism.context.context import Context
from prism.context.topology import Efficiency, Topology

#: constants that a fit may move, and where they are looked for
BOUNDS = {
    "matmul": (0.1, 1.0),
    "matmul_half": (1e6, 1e12),
    "memory": (0.1, 1.0),
    "network": (0.1, 1.0),
}
#: how far a constant is thought to be from where the fit starts, as a standard deviation of its logarithm; what
#: measurements say nothing about stays there
PRIOR = 0.5


def fit_efficiency(
    contexts: Sequence[Context],
    seconds: Sequence[float],
    *,
    constants: Sequence[str] = tuple(BOUNDS),
    start: Efficiency | None = None,
    error: float = 0.02,
) -> Efficiency:
    """Constants with which contexts take as long as measured.

    Least squares of logarithms of predicted over measured step times (in units of `error`), each constant held near
    where it starts by a weak prior (`PRIOR`), since few steps cannot tell four constants apart.

    Parameters
    ----------
    contexts : sequence of Context
        On one machine; their own efficiencies are not used.
    seconds : sequence of float
        Measured step times.
    constants : sequence of str
        Which of ``matmul, matmul_half, memory, network`` to fit; the others keep their value.
    start : Efficiency, optional
        Of the first context by default.
    error : float
        Relative error that is thought usual.

    Returns
    -------
    Efficiency

    Raises
    ------
    ValueError
        Unknown constants, no contexts, times that are not positive.
    """
    measured = _checked_runs(contexts, seconds, constants)
    begin = start or contexts[0].topology.efficiency
    return _fit(
        [deterministic_step(ctx) for ctx in contexts], measured, list(constants), begin, error
    )


def _checked_runs(
    contexts: Sequence[Context], seconds: Sequence[float], constants: Sequence[str]
) -> np.ndarray:
    unknown = sorted(set(constants) - set(BOUNDS))
    if unknown or not constants:
        raise ValueError(f"constants {unknown or 'none'}: known are {', '.join(BOUNDS)}")
    measured = np.asarray(seconds, float)
    if not contexts or measured.shape != (len(contexts),) or not (measured > 0).all():
        raise ValueError("needs as many positive step times as contexts, and at least one")
    return measured


def _fit(
    steps: Sequence[Callable[[Efficiency], float]], measured: np.ndarray, names: list[str], begin: Efficiency,
    error: float,
) -> Efficiency:  # fmt: skip
    origin = np.log([max(getattr(begin, n), BOUNDS[n][0]) for n in names])

    def changed(x: np.ndarray) -> Efficiency:
        return begin.model_copy(update=dict(zip(names, np.exp(x).tolist(), strict=True)))

    def residuals(x: np.ndarray) -> np.ndarray:
        e = changed(x)
        predicted = np.array([step(e) for step in steps])
        return np.append(np.log(predicted / measured) / error, (x - origin) / PRIOR)

    low, high = np.log([BOUNDS[n] for n in names]).T
    inside = np.clip(origin, low + 1e-6, high - 1e-6)
    return changed(least_squares(residuals, inside, bounds=(low, high), diff_step=1e-3).x)


def leave_one_out(
    contexts: Sequence[Context],
    seconds: Sequence[float],
    *,
    constants: Sequence[str] = tuple(BOUNDS),
    start: Efficiency | None = None,
    error: float = 0.02,
) -> np.ndarray:
    """Relative error of each context's step time, predicted with constants fitted to the others.

    Parameters
    ----------
    contexts, seconds, constants, start, error
        Passed on to `fit_efficiency`.

    Returns
    -------
    ndarray (context,)
        predicted / measured - 1.
    """
    measured = _checked_runs(contexts, seconds, constants)
    if len(contexts) < 2:
        raise ValueError("leaving one out needs at least two runs")
    steps = [deterministic_step(ctx) for ctx in contexts]
    # not a preset's: those were fitted to runs that may be among these
    begin = start or Efficiency()
    out = []
    for i, step in enumerate(steps):
        rest = np.arange(len(steps)) != i
        others = [s for s, kept in zip(steps, rest, strict=True) if kept]
        out.append(step(_fit(others, measured[rest], list(constants), begin, error)) / measured[i])
    return np.array(out) - 1


def calibrate(
    topology: Topology,
    *,
    gemm: pd.DataFrame | None = None,
    collectives: pd.DataFrame | None = None,
) -> Topology:
    """The topology with constants from measured operations.

    Parameters
    ----------
    topology : Topology
        With a `gpu`.
    gemm : DataFrame, optional
        Columns ``m, n, k, duration_s``: matrix products. Gives `matmul` and `matmul_half`: a straight line of
        duration over FLOP, relative errors weighed alike.
    collectives : DataFrame, optional
        Columns ``op`` (all_reduce, all_gather, reduce_scatter, all_to_all), ``bytes`` (of the whole buffer),
        ``ranks`` (the first so many of the job), ``duration_s``. Gives `network`.

    Returns
    -------
    Topology

    Raises
    ------
    ValueError
        Nothing measured, missing columns, times that are not positive, slopes that are not.
    """
    if gemm is None and collectives is None:
        raise ValueError("nothing measured: give gemm, collectives or both")
    if topology.gpu is None:
        raise ValueError("the topology has no gpu to be efficient against")
    found: dict[str, float] = {}
    if gemm is not None:
        found |= _matmul(topology, _checked(gemm, ("m", "n", "k", "duration_s"), "gemm"))
    if collectives is not None:
        table = _checked(collectives, ("op", "bytes", "ranks", "duration_s"), "collectives")
        found["network"] = _network(topology, table)
    return topology.model_copy(update={"efficiency": topology.efficiency.model_copy(update=found)})


def _checked(table: pd.DataFrame, columns: Sequence[str], name: str) -> pd.DataFrame:
    absent = [c for c in columns if c not in table]
    if absent:
        raise ValueError(f"{name}: columns {', '.join(absent)} are missing")
    numbers = table[[c for c in columns if c != "op"]].to_numpy(float)
    if len(table) == 0 or not (np.isfinite(numbers) & (numbers > 0)).all():
        raise ValueError(f"{name}: needs rows of positive numbers")
    return table


def _matmul(topology: Topology, table: pd.DataFrame) -> dict[str, float]:
    flops = 2 * table[["m", "n", "k"]].to_numpy(float).prod(axis=1)
    took = table["duration_s"].to_numpy(float)
    design = np.stack([np.ones_like(flops), flops], axis=1) / took[:, None]
    (overhead, slope), *_ = np.linalg.lstsq(design, np.ones_like(took), rcond=None)
    if slope <= 0 or np.unique(flops).size < 2:
        raise ValueError("gemm: durations do not grow with FLOP; measure several sizes")
    reached = min(1 / (slope * topology.gpu.peak_flops), 1.0)
    return {"matmul": float(reached), "matmul_half": float(max(overhead / slope, 0.0))}


_TIMES: Mapping[str, Callable[[analytic.Route, float], float]] = {
    "all_reduce": analytic.all_reduce, "all_gather": analytic.all_gather,
    "reduce_scatter": analytic.all_gather, "all_to_all": analytic.all_to_all,
}  # fmt: skip


def _network(topology: Topology, table: pd.DataFrame) -> float:
    unknown = sorted(set(table["op"]) - set(_TIMES))
    if unknown:
        raise ValueError(f"collectives: op {unknown[0]!r} is not one of {', '.join(_TIMES)}")
    rows = list(zip(table["op"], table["bytes"], table["ranks"], table["duration_s"], strict=True))

    def residuals(x: np.ndarray) -> np.ndarray:
        e = topology.efficiency.model_copy(update={"network": float(x[0])})
        t = topology.model_copy(update={"efficiency": e})
        return np.array(
            [
                np.log(
                    _TIMES[op](analytic.route(t, range(int(n)), ring=op != "all_to_all"), size) / s
                )
                for op, size, n, s in rows
            ]
        )

    return float(least_squares(residuals, [0.7], bounds=([0.01], [1.0])).x[0])
