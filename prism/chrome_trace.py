"""A simulated step as a Chrome trace, to look at in Perfetto: ranks as processes, the longest path marked."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import xarray as xr

from prism.base.files import write_atomically
from prism.model.dag import WorkloadDAG
from prism.model.engine.montecarlo import propagate, sample_durations
from prism.model.step_model import StepModel


def draw_at(runs: xr.Dataset, q: float) -> int:
    """The draw whose step time is the q-quantile (the nearest one from below).

    Parameters
    ----------
    runs : Dataset of `simulate`, ``step_time(draw)``
    q : float in [0, 1]

    Examples
    --------
    >>> draw_at(xr.Dataset({"step_time": ("draw", [3.0, 1.0, 2.0])}), 0.5)
    2
    """
    if not 0 <= q <= 1:
        raise ValueError(f"q must lie in [0, 1], got {q}")
    times = runs["step_time"].values
    if times.ndim != 1:
        raise ValueError("needs step_time(draw), not several jobs")
    order = np.argsort(times, kind="stable")
    return int(order[int(q * (times.size - 1))])


def chrome_trace(model: StepModel, draw: int, *, seed: int = 0) -> dict:
    """One draw of `simulate` as a document of Chrome trace events.

    Parameters
    ----------
    model : StepModel
        Without lanes; unroll a template first.
    draw : int
        Which draw, as in ``simulate(model, draws, seed=seed)``; see `draw_at`.
    seed : int

    Returns
    -------
    dict
        Complete events (``ph`` X, microseconds), a process a rank, a thread a category (more
        where ops of one category overlap); a collective shows
        on every member. Ops of the longest path have ``args.critical`` and a colour of their own.

    Raises
    ------
    ValueError
        For a template, or a negative draw.
    """
    if draw < 0:
        raise ValueError(f"draw must not be negative, got {draw}")
    dag = model.dag
    duration = sample_durations(model, draw + 1, seed=seed)[:, draw : draw + 1]
    ready, finish = propagate(dag, duration)
    critical = _longest_path(dag, finish[:, 0])
    events = [*_names(dag)]
    lanes = _Lanes()
    for op in np.argsort(ready[:, 0], kind="stable").tolist():
        signature = dag.signatures[dag.signature[op]]
        event = {
            "ph": "X",
            "name": signature.op,
            "cat": signature.role,
            "ts": 1e6 * float(ready[op, 0]),
            "dur": 1e6 * float(duration[op, 0]),
            "args": {
                "signature": str(signature),
                "site": dag.sites[dag.site[op]],
                "critical": bool(critical[op]),
            },
        }
        if critical[op]:
            event["cname"] = "terrible"
        for rank in dag.member[dag.member_ptr[op] : dag.member_ptr[op + 1]].tolist():
            tid = lanes.place(
                rank, _thread(signature.role), event["ts"], event["ts"] + event["dur"]
            )
            events.append(event | {"pid": rank, "tid": tid})
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"made_by": "prism.chrome_trace", "source": model.source, "draw": draw, "seed": seed},
    }  # fmt: skip


def write_chrome_trace(model: StepModel, path: str | Path, draw: int, *, seed: int = 0) -> Path:
    """Write `chrome_trace` to a file (``.gz``: compressed), under another name first."""
    path = Path(path)
    text = json.dumps(chrome_trace(model, draw, seed=seed)).encode()
    packed = gzip.compress(text, mtime=0) if path.suffix == ".gz" else text
    write_atomically({path: lambda part: part.write_bytes(packed)})
    return path


def _longest_path(dag: WorkloadDAG, finish: np.ndarray) -> np.ndarray:
    """Ops that the step waited for, bool (op,)."""
    critical = np.zeros(dag.n_ops, bool)
    op = int(np.argmax(finish))
    while True:
        critical[op] = True
        before = dag.pred[dag.pred_ptr[op] : dag.pred_ptr[op + 1]]
        if before.size == 0:
            return critical
        op = int(before[np.argmax(finish[before])])


_TITLES = {0: "compute", 1: "host", 2: "communication", 3: "gaps"}
_THREADS = {"compute": 0, "host": 1, "gap": 3}


def _thread(role: str) -> int:
    return _THREADS.get(role, 2)


class _Lanes:
    """Threads on which no two slices overlap in part, as the format wants it."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, int], list[float]] = {}

    def place(self, rank: int, thread: int, begin: float, end: float) -> int:
        """The first lane of a thread that is free at `begin` (events come by begin)."""
        ends = self._ends.setdefault((rank, thread), [])
        for lane, taken in enumerate(ends):
            if taken <= begin:
                ends[lane] = end
                return thread + len(_TITLES) * lane
        ends.append(end)
        return thread + len(_TITLES) * (len(ends) - 1)


def _names(dag: WorkloadDAG):
    for rank in np.unique(dag.member):
        node = int(dag.node_of_rank[rank, 0])
        yield {"ph": "M", "name": "process_name", "pid": int(rank),
               "args": {"name": f"rank {rank} (node {node})"}}  # fmt: skip
        for tid, title in _TITLES.items():
            yield {"ph": "M", "name": "thread_name", "pid": int(rank), "tid": tid,
                   "args": {"name": title}}  # fmt: skip
