"""PyTorch execution traces beside profiler traces: what collectives are whose kernels do not say.

An execution trace has no times. It records every collective of a rank in order, with name and sizes; where
it has as many as the profiler has collective kernels in a step, they are the same ones in order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from prism.traces.formats.chakra import whole_file
from prism.traces.profiler.device_ops import RankSteps
from prism.traces.profiler.fields import Communication
from prism.traces.records import TraceError

RECORD = "record_param_comms"
#: names that are no collectives
_NOT = ("wait", "init", "barrier_wait")


class _Node(msgspec.Struct):
    name: str = ""
    id: int = 0
    inputs: Any = None


class _Document(msgspec.Struct):
    nodes: list[_Node]


def read_executions(files: Sequence[Path]) -> dict[int, list[Communication]]:
    """Collectives of each rank, in order; the rank is the last number in the file's name.

    Raises
    ------
    TraceError
        A file that is no execution trace, or no number in its name.
    """
    out: dict[int, list[Communication]] = {}
    for path in files:
        found = re.findall(r"\d{1,7}", path.name.removesuffix(".gz").removesuffix(".json"))
        if not found:
            raise TraceError(f"{path}: no rank in the name of this execution trace")
        try:
            nodes = msgspec.json.decode(whole_file(path), type=_Document, strict=False).nodes
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
            raise TraceError(f"{path}: not an execution trace: {fault}") from None
        records = [n for n in sorted(nodes, key=lambda n: n.id) if n.name == RECORD]
        said = [_said(n) for n in records]
        out[int(found[-1])] = [s for s in said if s is not None]
    return out


def _said(node: _Node) -> Communication | None:
    values = node.inputs.get("values", []) if isinstance(node.inputs, dict) else node.inputs
    texts = [v for v in values if isinstance(v, str) and v] if isinstance(values, list) else []
    if not texts or any(n in texts[0] for n in _NOT):
        return None
    return Communication(texts[0], "", 0, None, None, "", None, None, None)


def enrich(steps: RankSteps, said: Sequence[Communication]) -> bool:
    """Give a rank's collectives their names where the kernels tell none; whether the numbers agreed."""
    start = np.median(steps.start, axis=0)
    order = sorted(steps.communication, key=lambda op: start[op])
    if len(order) != len(said):
        return False
    for op, told in zip(order, said, strict=True):
        own = steps.communication[op]
        if not own.name:
            steps.communication[op] = own._replace(name=told.name)
    return True
