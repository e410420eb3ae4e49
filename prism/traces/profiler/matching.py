"""Ranks of one job as one trace: which collectives are the same, whose clock is off, which steps match.

A process group is keyed by its list of ranks, never by its name, which differs between processes. Within a
group, collectives match by order and must be of one kind. Members of a collective end together, which
checks the match and tells how far apart clocks are.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.linalg import lsqr

from prism.traces.profiler.device_ops import RankSteps
from prism.traces.profiler.fields import Communication
from prism.traces.records import TraceError

#: kinds by what names contain, the first that fits
KINDS = (
    ("all_reduce", ("allreduce", "all_reduce")),
    ("reduce_scatter", ("reducescatter", "reduce_scatter")),
    ("all_gather", ("allgather", "all_gather")),
    ("all_to_all", ("alltoall", "all_to_all")),
    ("broadcast", ("broadcast",)),
    ("send", ("send",)),
    ("recv", ("recv", "receive")),
    ("reduce", ("reduce",)),
    ("gather", ("gather",)),
    ("scatter", ("scatter",)),
    ("barrier", ("barrier",)),
)
ROLE_WORDS = (
    ("tp", ("tensor", "tp")), ("pp", ("pipeline", "pp")), ("cp", ("context", "cp")),
    ("ep", ("expert", "ep")), ("dp", ("data", "dp", "fsdp", "ddp", "replicate", "shard")),
)  # fmt: skip
#: members of one collective that end further apart than this part of the step do not belong together
APART = 0.1
#: or than this, ns
APART_NS = 2_000_000
#: in more than so many of the steps
HELD_UP = 0.2
#: clocks of one job differ by less than this, or than ten steps, ns
LARGEST_SKEW = 1_000_000_000


@dataclass(frozen=True)
class Member:
    """One rank's part in a collective: which op, of which group, the how many-th of it."""

    rank: int
    op: int
    group: tuple[int, ...]
    kind: str
    nth: int
    said: Communication


def kind_of(name: str, said: Communication) -> str:
    """Kind of a collective from what it says, else from its kernel's name.

    NCCL's ``SendRecv`` may be an all-to-all, a send, a receive or a batch: that name alone tells nothing.
    """
    for text in (said.name.lower(), "" if "sendrecv" in name.lower() else name.lower()):
        for kind, words in KINDS:
            if any(w in text for w in words):
                return kind
    return "send_recv" if "sendrecv" in name.lower() else "collective"


def role_of(group: tuple[int, ...], world: int, about: str) -> str:
    """Role of a process group: from its description, else ``world`` if it holds every rank."""
    words = set(re.split(r"[^a-z]+", about.lower()))
    for role, known in ROLE_WORDS:
        if words & set(known):
            return role
    return "world" if len(group) == world else "group"


def members(ranks: list[RankSteps]) -> list[Member]:
    """Every rank's part in every collective.

    Raises
    ------
    TraceError
        A rank takes part in a group that it does not belong to; ranks whose collectives do not match.
    """
    present = tuple(r.rank for r in ranks)
    groups = [s.ranks for r in ranks for s in r.communication.values() if s.ranks]
    world = max(
        max(present) + 1, *(r.world_size or 0 for r in ranks), *(1 + max(g) for g in groups)
    )
    out = []
    for r in ranks:
        count: Counter = Counter()
        start = np.median(r.start, axis=0)
        told = all(s.seq is not None for s in r.communication.values())
        order = sorted(
            r.communication, key=lambda op: (r.communication[op].seq if told else 0, start[op])
        )
        for op in order:
            said = r.communication[op]
            group = _group(said, r.rank, world)
            kind = kind_of(r.name[op], said)
            if kind in ("send", "recv"):
                peer = said.dst if kind == "send" else said.src
                if peer is None or peer < 0:
                    kind = "send_recv"
                else:
                    group = (r.rank, peer) if kind == "send" else (peer, r.rank)
                    kind = "transfer"
            if r.rank not in group:
                raise TraceError(
                    f"rank {r.rank} takes part in a {kind} of ranks {_text(group)}, to which it does not "
                    "belong: its rank or its groups are wrong"
                )
            # one queue for each group: kinds in it must follow each other alike on all its ranks
            queue = (group, kind == "transfer")
            out.append(Member(r.rank, op, group, kind, count[queue], said))
            count[queue] += 1
    _check(out, set(present), world)
    return out


def _group(said: Communication, rank: int, world: int) -> tuple[int, ...]:
    if said.ranks is not None:
        return said.ranks
    if said.group_size is not None and said.group_size != world:
        # unknown which ranks: alone with its size, so that it is not joined with anybody
        return (rank,)
    return tuple(range(world))


def _check(found: list[Member], present: set[int], world: int) -> None:
    by_group: dict[tuple, dict[int, list[str]]] = defaultdict(dict)
    for m in found:
        by_group[m.group, m.kind == "transfer"].setdefault(m.rank, []).append(m.kind)
    for (group, _), kinds in by_group.items():
        here = [r for r in group if r in present]
        absent = [r for r in here if r not in kinds]
        if absent:
            raise TraceError(
                f"rank {absent[0]} has none of the collectives of ranks {_text(group)} that rank "
                f"{next(iter(kinds))} has; its trace lacks them"
            )
        lengths = {len(v) for v in kinds.values()}
        first = kinds[here[0]]
        if len(lengths) > 1:
            a, b = (
                min(kinds, key=lambda r: len(kinds[r])),
                max(kinds, key=lambda r: len(kinds[r])),
            )
            raise TraceError(
                f"collectives of ranks {_text(group)} do not match: rank {a} has {len(kinds[a])} in a step, "
                f"rank {b} has {len(kinds[b])}"
            )
        for r in here[1:]:
            wrong = [
                i for i, (a, b) in enumerate(zip(first, kinds[r], strict=True)) if not _alike(a, b)
            ]
            if wrong:
                raise TraceError(
                    f"collectives of ranks {_text(group)} do not match: number {wrong[0]} is a "
                    f"{first[wrong[0]]} on rank {here[0]} and a {kinds[r][wrong[0]]} on rank {r}"
                )


def _alike(a: str, b: str) -> bool:
    vague = ("collective", "send_recv")
    return a == b or a in vague or b in vague


def _text(group: tuple[int, ...]) -> str:
    shown = ",".join(map(str, group[:8]))
    return shown + (f",... ({len(group)})" if len(group) > 8 else "")


def common_steps(ranks: list[RankSteps]) -> np.ndarray:
    """Numbers of the steps that every rank has.

    Raises
    ------
    TraceError
        If there are none.
    """
    steps = ranks[0].steps
    for r in ranks[1:]:
        steps = np.intersect1d(steps, r.steps)
    if steps.size == 0:
        a, b = ranks[0], next(r for r in ranks if not set(r.steps) & set(ranks[0].steps))
        raise TraceError(
            f"no step in common: rank {a.rank} has {_text(tuple(a.steps.tolist()))}, rank {b.rank} has "
            f"{_text(tuple(b.steps.tolist()))}; record the same steps on every rank"
        )
    return steps


def align_clocks(ranks: list[RankSteps], found: list[Member]) -> np.ndarray:
    """Clock offsets, ns (rank,), from ends of collectives; times are corrected in place.

    Members of a collective end together, so the median lead of one member over another, over the
    collectives of their group and steps, is that of its clock: ``o_a - o_b``. Overlapping groups make a
    system of such equations, solved by least squares. Offsets that are all within three standard errors
    of these medians are none: then it is not clocks that differ.
    """
    index = {r.rank: i for i, r in enumerate(ranks)}
    leads: dict[tuple[int, int], list[np.ndarray]] = defaultdict(list)
    for ms in _instances(found):
        first, *others = (index[m.rank] for m in ms)
        for m, other in zip(ms[1:], others, strict=True):
            # whole nanoseconds since the epoch do not fit a float: their difference does
            lead = ranks[other].end[:, m.op] - ranks[first].end[:, ms[0].op]
            leads[first, other].append(lead)
    if not leads:
        return np.zeros(len(ranks), np.int64)
    pairs = np.array(list(leads))
    # clocks may differ by more whole nanoseconds than a float holds
    base = [int(np.median(r.origin) - np.median(ranks[0].origin)) for r in ranks]
    values = [
        (np.concatenate(v) - (base[b] - base[a])).astype(float) for (a, b), v in leads.items()
    ]
    middle = np.array([np.median(v) for v in values])
    rows = np.repeat(np.arange(len(pairs)), 2)
    signs = np.tile([-1.0, 1.0], len(pairs))
    system = coo_array((signs, (rows, pairs.ravel())), shape=(len(pairs), len(ranks)))
    offset = lsqr(system.tocsr(), middle, atol=1e-12, btol=1e-12)[0]
    offset += np.array(base) - np.median(base)
    offset -= np.median(offset)
    # the error of a median, from the median of absolute deviations of normal values
    error = max(
        1.86 * np.median(np.abs(v - m)) / np.sqrt(v.size)
        for v, m in zip(values, middle, strict=True)
    )
    if np.max(np.abs(offset)) <= 3 * error:
        return np.zeros(len(ranks), np.int64)
    whole = np.rint(offset).astype(np.int64)
    for r, o in zip(ranks, whole, strict=True):
        r.start, r.end, r.origin = r.start - o, r.end - o, r.origin - o
    return whole


def _instances(found: list[Member]) -> list[list[Member]]:
    """Members of each collective of which more than one is there."""
    rows = defaultdict(list)
    for m in found:
        rows[m.group, m.nth, m.kind == "transfer"].append(m)
    return [ms for ms in rows.values() if len(ms) > 1]


def check_skew(ranks: list[RankSteps], skew: np.ndarray, length: np.ndarray) -> None:
    """Refuse clocks that are further apart than clocks of one job can be: files of different runs.

    Parameters
    ----------
    skew : ndarray (rank,), ns
    length : ndarray (step,), ns
    """
    worst = int(np.argmax(np.abs(skew)))
    allowed = max(LARGEST_SKEW, 10 * int(np.median(length)))
    if abs(int(skew[worst])) > allowed:
        raise TraceError(
            f"rank {ranks[worst].rank}: its clock is {abs(int(skew[worst])) * 1e-9:.3g} s from those of the "
            "others: the files are of different runs, or only some count from the epoch"
        )


def check_ends(ranks: list[RankSteps], found: list[Member], length: np.ndarray) -> None:
    """Refuse collectives of devices whose members do not end together: they are not the same one.

    Transfers of gloo end when their process gets to run again, which on a busy machine says nothing.

    Parameters
    ----------
    length : ndarray (step,), ns
        Of the steps.
    """
    if any("" in r.stream for r in ranks):
        return
    by_rank = {r.rank: r for r in ranks}
    for ms in _instances(found):
        ends = np.array([by_rank[m.rank].end[:, m.op] for m in ms])
        apart = np.ptp(ends, axis=0)
        share = apart / np.maximum(length, 1)
        far = (share > APART) & (apart > APART_NS)
        # a process may be held up once in a while between the end and its record
        if np.mean(far) > HELD_UP:
            raise TraceError(
                f"{ms[0].kind} number {ms[0].nth} of ranks {_text(ms[0].group)} ends {np.max(share):.0%} of a step apart on its "
                "members: they are not the same collective, or clocks are far off"
            )
