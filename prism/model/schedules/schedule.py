"""A pipeline schedule: which rank holds which part of the model, and what it does in which order."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from prism.model import _graph_loops


class ScheduleError(ValueError):
    """A schedule that no pipeline could run; the message names the ops."""


class Op(NamedTuple):
    """Op of a pipeline schedule: one entry in the list of a rank.

    Attributes
    ----------
    kind : {"F", "B", "W", "BW"}
        Forward; backward to the input, after which the stage before can go on; backward to the weights;
        both at once, after which the stage before can go on.
    stage : int
        Virtual stage, counted along the model.
    microbatch : int
        Counted within its flow.
    flow : int
        Which copy of the model, where two run against each other.
    """

    kind: str
    stage: int
    microbatch: int
    flow: int = 0

    def __str__(self) -> str:
        where = f"/{self.flow}" if self.flow else ""
        return f"{self.kind}{self.microbatch}@{self.stage}{where}"


@dataclass(frozen=True)
class Schedule:
    """Ops of every rank in order.

    Attributes
    ----------
    ranks : tuple of tuple of Op
        Each rank runs its list in order, one op at a time.
    placement : tuple of tuple of int (flow)(virtual stage)
        The rank that holds a virtual stage.
    pairs : tuple of frozenset of int (rank)
        Places at which an op and the next one run side by side, as one: they start together, when both
        can, and end together.

    Raises
    ------
    ScheduleError
        Ops that are missing, repeated or on another rank than their stage; ranks that wait for each other.

    Examples
    --------
    >>> Schedule(((Op("F", 0, 0), Op("BW", 0, 0)),), ((0,),)).microbatches
    1
    """

    ranks: tuple[tuple[Op, ...], ...]
    placement: tuple[tuple[int, ...], ...]
    pairs: tuple[frozenset[int], ...] = field(default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(tuple(Op(*o) for o in r) for r in self.ranks))
        pairs = self.pairs or tuple(frozenset() for _ in self.ranks)
        object.__setattr__(self, "pairs", tuple(frozenset(p) for p in pairs))
        self._check_complete()
        self._check_runs()

    @property
    def stages(self) -> int:
        """Virtual stages along the model."""
        return len(self.placement[0])

    @property
    def microbatches(self) -> int:
        """Microbatches of a step, of all flows together."""
        return len({(o.flow, o.microbatch) for r in self.ranks for o in r})

    def ops(self) -> Iterator[tuple[int, int, Op]]:
        """Every op with its rank and its place there."""
        for rank, own in enumerate(self.ranks):
            for place, op in enumerate(own):
                yield rank, place, op

    def waits(self) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """List the ops of other ranks that each op waits for: (rank, place) to the same of others.

        A forward waits for that of the stage before; a backward for its own forward and for the backward of
        the stage behind; weights for the backward to the input.
        """
        at = {}
        for rank, place, op in self.ops():
            for kind in ("B", "W") if op.kind == "BW" else (op.kind,):
                at[kind, op.flow, op.stage, op.microbatch] = (rank, place)
        out = {}
        for rank, place, op in self.ops():
            needed = []
            if op.kind == "F" and op.stage > 0:
                needed.append(("F", op.stage - 1))
            if op.kind in ("B", "BW"):
                needed.append(("F", op.stage))
                if op.stage < self.stages - 1:
                    needed.append(("B", op.stage + 1))
            if op.kind == "W":
                needed.append(("B", op.stage))
            out[rank, place] = [at[k, op.flow, s, op.microbatch] for k, s in needed]
        return out

    def peak_activations(self) -> list[int]:
        """Largest number of forwards whose weights have not seen their backward yet, by rank."""
        change = {"F": 1, "B": 0, "W": -1, "BW": -1}
        return [int(max(np.cumsum([change[o.kind] for o in own]))) for own in self.ranks]

    def start_times(
        self,
        times: Mapping[str, float],
        *,
        latency: float = 0.0,
        slowed: Mapping[int, float] | None = None,
        paired: float | None = None,
    ) -> tuple[list[list[float]], float]:
        """When each op starts if nothing varies, and when the last one ends.

        Parameters
        ----------
        times : mapping of "F", "B", "W" to seconds
            ``BW`` takes both.
        latency : float
            Seconds between ranks; the sender does not wait.
        slowed : mapping of rank to factor, optional
        paired : float, optional
            Seconds that two ops side by side take; both together if not given.

        Returns
        -------
        list of list of float (rank)(place), seconds; float, seconds
        """
        slowed = slowed or {}
        took = dict(times) | {"BW": times["B"] + times["W"]}
        starts = [[0.0] * len(own) for own in self.ranks]
        ends = [[0.0] * len(own) for own in self.ranks]
        waits = self.waits()
        for rank, places in self.slots():
            factor = slowed.get(rank, 1.0)
            length = sum(took[self.ranks[rank][i].kind] for i in places)
            if len(places) > 1 and paired is not None:
                length = paired
            begin = ends[rank][places[0] - 1] if places[0] else 0.0
            for i in places:
                for other, place in waits[rank, i]:
                    begin = max(begin, ends[other][place] + (latency if other != rank else 0.0))
            for i in places:
                starts[rank][i], ends[rank][i] = begin, begin + factor * length
        return starts, max(own[-1] for own in ends)

    def bubble(self, times: Mapping[str, float], **how) -> tuple[float, float]:
        """Share of idle time: over the whole step, and of the worst rank between its first and its last op.

        The second is what papers on zero-bubble schedules report; a step that ends with an optimizer that
        all ranks share pays the first.
        """
        starts, makespan = self.start_times(times, **how)
        took = dict(times) | {"BW": times["B"] + times["W"]}
        busy, span = [], []
        for rank, own in enumerate(self.ranks):
            lengths = []
            for _, places in self._own_slots(rank):
                paired = how.get("paired") if len(places) > 1 else None
                lengths.append(sum(took[own[i].kind] for i in places) if paired is None else paired)
            factor = (how.get("slowed") or {}).get(rank, 1.0)
            busy.append(factor * sum(lengths))
            span.append(starts[rank][-1] + factor * lengths[-1] - starts[rank][0])
        return (
            1 - sum(busy) / (len(busy) * makespan),
            max(1 - b / s for b, s in zip(busy, span, strict=True)),
        )

    def slots(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Ranks and the places there that run as one, in an order in which nothing waits for a later one."""
        return self._order

    def _own_slots(self, rank: int) -> Iterator[tuple[int, tuple[int, ...]]]:
        place = 0
        while place < len(self.ranks[rank]):
            width = 2 if place in self.pairs[rank] else 1
            yield rank, tuple(range(place, place + width))
            place += width

    def _check_complete(self) -> None:
        seen: Counter = Counter()
        for rank, _, op in self.ops():
            if op.kind not in ("F", "B", "W", "BW"):
                raise ScheduleError(f"{op}: kind {op.kind!r} is not F, B, W or BW")
            if not (0 <= op.flow < len(self.placement) and 0 <= op.stage < self.stages):
                raise ScheduleError(f"{op} on rank {rank}: there is no such stage")
            if self.placement[op.flow][op.stage] != rank:
                raise ScheduleError(
                    f"{op} is on rank {rank}; its stage is on rank {self.placement[op.flow][op.stage]}"
                )
            for kind in ("B", "W") if op.kind == "BW" else (op.kind,):
                seen[kind, op.flow, op.stage, op.microbatch] += 1
        present = sorted({(k[1], k[3]) for k in seen})
        for flow, m in present:
            for stage in range(self.stages):
                for kind in "FBW":
                    n = seen[kind, flow, stage, m]
                    if n != 1:
                        raise ScheduleError(
                            f"{Op(kind, stage, m, flow)} is there {n} times; every stage needs each of F, B and "
                            "W (or BW) once a microbatch"
                        )

    def _check_runs(self) -> None:
        """Find an order of slots, or name the ops that wait for each other."""
        slots = [s for r in range(len(self.ranks)) for s in self._own_slots(r)]
        number = {(rank, i): n for n, (rank, places) in enumerate(slots) for i in places}
        src, dst = [], []
        for n, (rank, places) in enumerate(slots):
            if places[0] > 0:
                src.append(number[rank, places[0] - 1])
                dst.append(n)
        for place, others in self.waits().items():
            for other in others:
                src.append(number[other])
                dst.append(number[place])
        a, b = np.array(src, np.int64), np.array(dst, np.int64)
        by_owner = np.argsort(a, kind="stable")
        pointer = np.concatenate([[0], np.cumsum(np.bincount(a, minlength=len(slots)))])
        order = _graph_loops.topological_order(len(slots), pointer.astype(np.int64), b[by_owner])
        if order.size < len(slots):
            first: dict[int, str] = {}
            for n in sorted(set(range(len(slots))) - set(order.tolist())):
                rank, places = slots[n]
                first.setdefault(rank, f"rank {rank} at {self.ranks[rank][places[0]]}")
            raise ScheduleError(f"the schedule deadlocks; waiting: {', '.join(first.values())}")
        object.__setattr__(self, "_order", tuple(slots[n] for n in order))


_CELL = re.compile(r"^(\d+)(F|I|W|B)(\d+)$")
_KINDS = {"F": "F", "I": "B", "W": "W", "B": "BW"}


def _lines(reader, path: Path) -> Iterator[tuple[int, list[str]]]:
    """Lines of a table with their numbers; what the csv module refuses is said with its line."""
    try:
        yield from enumerate(reader, start=1)
    except csv.Error as fault:
        raise ScheduleError(f"{path}: line {reader.line_num}: {fault}") from fault


def read_schedule(path: str | Path, *, placement: Sequence[int] | None = None) -> Schedule:
    """Read a schedule in the form of torch's ``_dump_csv``: a line a rank, cells such as ``2F0``.

    ``<stage>F<microbatch>`` is a forward, ``I`` a backward to the input, ``W`` to the weights, ``B`` a whole
    backward; empty cells are idle, ``(0F3;1B2)OVERLAP_F_B`` two ops side by side.

    Parameters
    ----------
    path : path
    placement : sequence of int, optional
        The rank of each virtual stage; by default that on which its ops are.

    Raises
    ------
    ScheduleError
        Cells that are no ops (with line and column), and what `Schedule` refuses.
    """
    path = Path(path)
    if not path.is_file():
        raise ScheduleError(f"{path}: no such file")
    ranks, pairs = [], []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        for line, cells in _lines(csv.reader(file), path):
            own: list[Op] = []
            side: set[int] = set()
            for column, cell in enumerate(cells, start=1):
                ops = _cell(cell.strip(), f"{path}: line {line}, cell {column}")
                if len(ops) == 2:
                    side.add(len(own))
                own += ops
            ranks.append(tuple(own))
            pairs.append(frozenset(side))
    holder: dict[int, int] = {}
    for rank, own in enumerate(ranks):
        for op in own:
            holder.setdefault(op.stage, rank)
    if not holder or sorted(holder) != list(range(len(holder))):
        raise ScheduleError(f"{path}: holds no ops, or stages that do not count from 0")
    where = (
        tuple(placement) if placement is not None else tuple(holder[s] for s in range(len(holder)))
    )
    try:
        return Schedule(tuple(ranks), (where,), tuple(pairs))
    except ScheduleError as fault:
        raise ScheduleError(f"{path}: {fault}") from None


def _cell(text: str, where: str) -> list[Op]:
    if not text:
        return []
    parts = [text]
    if text.endswith("OVERLAP_F_B"):
        parts = text.removesuffix("OVERLAP_F_B").strip("()").split(";")
    found = [_CELL.match(p.strip()) for p in parts]
    if not all(found) or len(found) > 2:
        raise ScheduleError(f"{where}: {text!r} is no op such as 2F0, 2B0, 2I0 or 2W0")
    return [Op(_KINDS[m[2]], int(m[1]), int(m[3])) for m in found]
