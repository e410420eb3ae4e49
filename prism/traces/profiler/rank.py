"""From one rank's events to the ops that every one of its steps has."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pandas as pd

from prism.traces.profiler import gloo_ops
from prism.traces.profiler.dependencies import assemble
from prism.traces.profiler.device_ops import DeviceOps, RankSteps, Windows, device_ops, step_windows
from prism.traces.profiler.events import Events
from prism.traces.records import TraceError

#: steps that share less than this part of their ops with the others are left out
ALIKE = 0.8


def rank_steps(events: Events, rank: int) -> RankSteps:
    """Ops of one rank that every step has, their times, and what waits for what.

    Raises
    ------
    TraceError
        No device op in any step; steps that have too little in common.
    """
    windows = step_windows(events)
    ops = (
        device_ops(events, windows)
        if gloo_ops.has_device(events)
        else gloo_ops.gloo_ops(events, windows)
    )
    notes = Counter(events.lost)
    if not gloo_ops.has_device(events) and len(set(events.groups.values())) > 1:
        notes[
            "process groups of gloo, which names none: all transfers are taken as of every rank"
        ] = len(set(events.groups.values()))
    if not windows.marked:
        notes["no ProfilerStep: the whole file is one step"] = 1
    notes["device ops"] = int(ops.row.size)
    notes["device ops outside of the steps"] = int(np.sum(ops.step < 0))
    member, chosen, share = _aligned(events, ops, windows)
    notes["share of ops aligned, per mille"] = round(1000 * share)
    if chosen.size < windows.number.size:
        notes["steps left out"] = int(windows.number.size - chosen.size)
    return assemble(events, rank, windows, ops, chosen, member, notes)


def _aligned(
    events: Events, ops: DeviceOps, windows: Windows
) -> tuple[np.ndarray, np.ndarray, float]:
    """Ops that every step has: (step, op) rows of `ops`, the steps used, the share of ops kept.

    Ops are the same if they are the n-th of their kind (name, shape) on their stream.
    """
    inside = np.flatnonzero(ops.step >= 0)
    if inside.size == 0:
        raise TraceError(
            f"{events.path}: no kernels, copies or collectives in any step"
            + ("" if ops.row.size else ": it has no device events at all")
        )
    table = pd.DataFrame(
        {"step": ops.step[inside], "stream": ops.stream[inside], "name": ops.name[inside],
         "shape": ops.shape[inside], "row": inside}
    )  # fmt: skip
    kind = ["stream", "name", "shape"]
    table["nth"] = table.groupby(["step", *kind], sort=False).cumcount()
    code, _ = pd.factorize(pd.MultiIndex.from_frame(table[[*kind, "nth"]]))
    table["op"] = code
    steps = _alike(table)
    table = table[table["step"].isin(steps)]
    counts = table["op"].value_counts()
    kept = np.sort(counts.index[counts == len(steps)].to_numpy())
    share = kept.size * len(steps) / len(table)
    if kept.size == 0 or share < 0.5:
        raise TraceError(
            f"{events.path}: only {share:.0%} of its device ops are found in each of {len(steps)} steps; "
            "steps differ too much to be draws of one"
        )
    table = table[np.isin(table["op"], kept)].sort_values(["step", "op"])
    member = table["row"].to_numpy().reshape(len(steps), kept.size)
    first = np.argsort(ops.start[member[len(steps) // 2]], kind="stable")
    return member[:, first], steps, share


def _alike(table: pd.DataFrame) -> np.ndarray:
    """Steps that have most of their ops in common with the usual one."""
    sets = {s: set(g) for s, g in table.groupby("step")["op"]}
    steps = np.array(sorted(sets))
    usual = table["op"].value_counts()
    often = set(usual.index[usual > len(steps) / 2])

    def common(own: set) -> float:
        return len(own & often) / max(len(own | often), 1)

    good = np.array([s for s in steps if not often or common(sets[s]) >= ALIKE], np.int64)
    return good if good.size else steps
