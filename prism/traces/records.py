"""Op records: the one Dataset that every reader of traces returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from prism.base import schema


class TraceError(ValueError):
    """A trace that cannot give a trustworthy graph; the message names file and place."""


class TraceWarning(UserWarning):
    """A limitation of a trace that affects its results."""


#: coordinates of every trace, one value an op, and what stands for "not known"
COORDINATES: dict[str, tuple[Any, Any]] = {
    "name": ("U", ""),
    "rank": (np.int32, 0),
    "stream": ("U", ""),
    "dp": (np.int32, 0),
    "stage": (np.int32, -1),
    "microbatch": (np.int32, -1),
    "seq": (np.int32, 0),
    "role": ("U", "compute"),
    "group": ("U", ""),
    "shape": ("U", ""),
    "dtype": ("U", ""),
}


def trace_dataset(
    *,
    steps: Sequence[int] | np.ndarray,
    start: np.ndarray,
    duration: np.ndarray,
    coordinates: Mapping[str, Any],
    edges: Sequence[tuple[int, int, str]] = (),
    provenance: Mapping[str, Any],
    source: str = "measured",
    extra: Mapping[str, tuple[str, Any]] | None = None,
) -> xr.Dataset:
    """The common Dataset of a trace.

    Parameters
    ----------
    steps : (step,)
        Step numbers.
    start, duration : ndarray (step, op), seconds
        Start from the beginning of the step, as recorded, and duration.
    coordinates : mapping of a name in `COORDINATES` to (op,)
        ``name`` and ``rank`` at least. `group` is the list of ranks that meet in an op, as text
        (``0,1``), `seq` its number within the group (and of a kind on its rank where there is no group),
        `stream` the queue within which ops run in order.
    edges : sequence of (earlier op, later op, why)
        Dependencies that the reader found, beside the order of streams.
    provenance : mapping

    Returns
    -------
    Dataset
        ``start(step, op)``, ``duration(step, op)``, seconds; `edge_from`, `edge_to` and `edge_kind` over
        `edge`.
    """
    n = start.shape[1]
    columns = {}
    for name, (kind, missing) in COORDINATES.items():
        values = coordinates.get(name, missing)
        if kind is np.int32 and np.max(np.abs(np.asarray(values, np.float64)), initial=0) >= 2**31:
            raise TraceError(f"{name} goes beyond {2**31}")
        columns[name] = ("op", np.array(np.broadcast_to(np.asarray(values, dtype=kind), (n,))))
    data: dict[str, Any] = {
        "start": (("step", "op"), start),
        "duration": (("step", "op"), duration),
        **(extra or {}),
    }
    if edges:
        data["edge_from"] = ("edge", np.array([e[0] for e in edges], np.int32))
        data["edge_to"] = ("edge", np.array([e[1] for e in edges], np.int32))
        columns["edge_kind"] = ("edge", np.array([e[2] for e in edges], dtype="U"))
    return schema.dataset(
        data,
        coords={"step": np.asarray(steps, np.int64), **columns},
        made_by="prism.read_trace",
        source=source,
        provenance=provenance,
    )
