"""Propagate duration pools through the graph of a step."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import xarray as xr
from tqdm import tqdm

from prism.base import schema
from prism.base.runner import cores
from prism.model import _graph_loops
from prism.model.dag import WorkloadDAG
from prism.model.engine import kernels
from prism.model.engine.arrays import Arrays, Outputs
from prism.model.engine.lowering import component_of_op, lanes_per_block, lower_model
from prism.model.signature import ROLES
from prism.model.step_model import StepModel

#: op-draws that a thread does in one go: about half a second of work
CHUNK = 1e8


def simulate(
    model: StepModel,
    draws: int = 1000,
    *,
    seed: int = 0,
    jobs: int | None = None,
    finish_of: Sequence[int] = (),
    paths: bool = False,
    threads: int | None = None,
    progress: bool = False,
) -> xr.Dataset:
    """Draw step times: every op from its pool, the graph by its longest path.

    ``finish_i = max_j finish_j + T_i`` over the predecessors j of op i, with ``T_i`` drawn from
    the pool of i and coupled as the model says; the step time is the latest finish. A duration is a
    pure function of (seed, draw, replica, op), so results depend on neither threads nor the number of
    draws asked for (of a job, if there are several jobs), and two models that share an op share its random numbers.

    Parameters
    ----------
    model : StepModel
    draws : int
        Number of simulated steps, at least 1; of each job if `jobs` is given.
    seed : int, not negative
    jobs : int, optional
        Simulate so many jobs, in which what is persistent (which GPU a rank got) stays. Without it
        each draw is a step of a new job, and draws are independent.
    finish_of : sequence of int
        Ops whose finish times are wanted too (of the last replica to finish).
    paths : bool
        Whether to follow the longest path of each draw: who was waited for. Costs memory for
        ops x replicas x a few draws, and about twice the time.
    threads : int, optional
        As many as there are cores if not given; changes nothing but the time.
    progress : bool
        Show a bar. A run can be interrupted either way, within about a second.

    Returns
    -------
    Dataset
        ``step_time(draw)`` or ``step_time(job, draw)``, seconds; ``source`` is ``simulated`` for pools
        from measurements and ``synthetic`` for others. With `finish_of`, ``finish_time(op, draw)``, s.
        With `paths`, ``criticality(op)``, the share of draws whose longest path holds the op (in any
        replica), ``exposed_time(component, draw)``, the time that each component adds to that path, and
        ``busy_time(component, draw)``, the sum of its durations over all ops and replicas; seconds.

    Raises
    ------
    ValueError
        If `draws` or `jobs` is less than 1, the seed is negative, or an op does not exist.

    Examples
    --------
    >>> from prism.model import DagBuilder
    >>> from prism.model.pools import Fixed
    >>> from prism.model import PoolKey, Signature
    >>> b = DagBuilder()
    >>> op = b.add(Signature("forward"), ranks=(0,))
    >>> model = StepModel(b.build([0]), {PoolKey(Signature("forward")): Fixed(0.25)})
    >>> simulate(model, draws=2).step_time.values.tolist()
    [0.25, 0.25]
    """
    seed = operator.index(seed)
    for name, value in (("draws", draws), ("jobs", 1 if jobs is None else jobs)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    chosen = np.array(finish_of, np.int64).reshape(-1)
    if chosen.size and (chosen.min() < 0 or chosen.max() >= model.dag.n_ops):
        raise ValueError(f"finish_of names an op outside 0 to {model.dag.n_ops - 1}")
    total = draws * (jobs or 1)
    arrays = lower_model(
        model,
        seed=seed,
        draws_per_job=1 if jobs is None else draws,
        keep=bool(paths or chosen.size),
    )
    threads = threads or cores()
    found = _run(model.dag, arrays, total, chosen, paths, threads, progress)
    dims = ("draw",) if jobs is None else ("job", "draw")
    shape = (draws,) if jobs is None else (jobs, draws)
    return _dataset(model, found, dims, shape, chosen, paths, seed)


def _run(
    dag: WorkloadDAG, arrays: Arrays, total: int, chosen: np.ndarray, paths: bool, threads: int,
    progress: bool,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Run the engine over ranges of draws, so that it can be spread, watched and interrupted."""
    keep = bool(paths or chosen.size)
    block = lanes_per_block(dag, keep=keep, rows=arrays.shared.row_key.size)
    n_slots = dag.n_ops if keep else dag.slots[1]
    found = {
        "step_time": np.empty(total),
        "finish_time": np.zeros((chosen.size, total)),
        "critical": np.zeros(dag.n_ops if paths else 0, np.int64),
        "exposed": np.zeros((total, len(ROLES)) if paths else (0, 0)),
        "busy": np.zeros((total, len(ROLES)) if paths else (0, 0)),
    }

    def fill(first: int, n: int) -> tuple[int, np.ndarray]:
        part = slice(first, first + n)
        critical = np.zeros_like(found["critical"])
        # contiguous whatever was asked for, so that the engine is compiled for one form only
        finish = np.zeros((chosen.size, n))
        outputs = Outputs(
            found["step_time"][part], finish, critical, found["exposed"][part], found["busy"][part],
        )  # fmt: skip
        kernels.simulate(*arrays, n_slots, first, block, chosen, outputs)
        found["finish_time"][:, part] = finish
        return n, critical

    by_time = int(CHUNK / (dag.n_ops * dag.lanes))
    size = max(block, min(by_time, -(-total // threads)) // block * block)
    ranges = [(first, min(size, total - first)) for first in range(0, total, size)]
    with (
        tqdm(total=total, unit="draw", disable=not progress) as bar,
        ThreadPoolExecutor(threads) as pool,
    ):
        try:
            for n, critical in pool.map(lambda r: fill(*r), ranges):
                found["critical"] += critical
                bar.update(n)
        except BaseException:
            pool.shutdown(cancel_futures=True)  # an interruption waits for one range, not for all
            raise
    return found


def _dataset(model, found, dims, shape, chosen, paths: bool, seed: int) -> xr.Dataset:
    data = {"step_time": (dims, found["step_time"].reshape(shape))}
    coords: dict = {}
    if chosen.size:
        data["finish_time"] = (("op", *dims), found["finish_time"].reshape(chosen.size, *shape))
        coords["op"] = chosen
    if paths:
        share = found["critical"] / found["step_time"].size
        data["criticality"] = ("op", share[chosen] if chosen.size else share)
        used = np.unique(component_of_op(model.dag))
        for name, key in (("exposed_time", "exposed"), ("busy_time", "busy")):
            data[name] = (("component", *dims), found[key].T[used].reshape(used.size, *shape))
        coords["component"] = [ROLES[i] for i in used]
    return schema.dataset(
        data,
        coords=coords,
        made_by="prism.simulate",
        source=schema.derived_source(model.source),
        seed=seed,
        provenance={
            "draws": shape[-1],
            "ops": model.dag.n_ops,
            "replicas": model.dag.replicas,
            "coupling": "independent" if model.coupling.is_independent else "coupled",
        },
    )


def sample_durations(model: StepModel, draws: int, *, seed: int = 0) -> np.ndarray:
    """The op durations behind `simulate`, seconds, (op, draw): the same random numbers.

    For looking inside a small step without replicas: each op is drawn on its own, unconnected.
    """
    dag = model.dag
    if dag.lanes > 1:
        raise ValueError("a template stands for several replicas; unroll it first")
    unconnected = dataclasses.replace(
        dag, pred_ptr=np.zeros(dag.n_ops + 1, np.int64), pred=np.zeros(0, np.int32)
    )
    every = np.arange(dag.n_ops)
    found = simulate(model.replace(dag=unconnected), draws, seed=seed, finish_of=every)
    return found["finish_time"].values


def propagate(dag: WorkloadDAG, duration: np.ndarray, gap: np.ndarray | None = None):
    """Forward pass with given durations: ``finish = max(finish of predecessors) + gap + duration``.

    Parameters
    ----------
    dag : WorkloadDAG without lanes
    duration, gap : ndarray (op, column), seconds

    Returns
    -------
    ready, finish : ndarray (op, column), seconds
        When the last predecessor ended; when the op ended.
    """
    if dag.lanes > 1:
        raise ValueError("a template stands for several replicas; unroll it first")
    duration = np.ascontiguousarray(duration, dtype=np.float64)
    gap = np.zeros_like(duration) if gap is None else np.ascontiguousarray(gap, dtype=np.float64)
    ready, finish = np.empty_like(duration), np.empty_like(duration)
    _graph_loops.propagate(dag.pred_ptr, dag.pred, gap, duration, ready, finish)
    return ready, finish
