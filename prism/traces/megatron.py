"""From op records of a pipeline-parallel step to its graph.

What waits for what in a Megatron-like step, per rank (Lin et al., OSDI 2025, whose replay this
reproduces):

- compute ops run in the recorded order; each of the four point-to-point streams (forward and
  backward, send and receive) runs in its own order;
- a receive waits for the compute op before the one it feeds; that one waits for the receive; a
  send waits for the compute op whose result it carries;
- the first backward send and receive wait for the second-last forward before the first backward;
- the parameter all-gathers precede the first forward; after the last backward come ``gc``, layernorm
  and embedding gradients, reduce-scatters, gradient clipping and the optimizer, in this order.

Send and matching receive are one op, as is a collective: it starts when the last member arrives.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import xarray as xr

from prism.model.dag import WorkloadDAG
from prism.model.dag_builder import DagBuilder
from prism.model.signature import Signature
from prism.traces.graph import TraceGraph
from prism.traces.records import TraceError

FORWARD, BACKWARD = "forward-compute", "backward-compute"
GATHER, SCATTER = "params-all-gather", "grads-reduce-scatter"
EMBEDDING, CLIP, OPTIMIZER = "embedding-grads-all-reduce", "optimizer-clip-main-grad", "optimizer"
LAYERNORM, GC = "layernorm-grads-all-reduce", "gc"

#: op type -> role of the group that meets in it
ROLES = {
    FORWARD: "compute", BACKWARD: "compute", GC: "compute", OPTIMIZER: "compute",
    LAYERNORM: "tp", GATHER: "dp", SCATTER: "dp", EMBEDDING: "embedding", CLIP: "world",
    "forward-send": "pp", "forward-recv": "pp", "backward-send": "pp", "backward-recv": "pp",
}  # fmt: skip


@dataclass(frozen=True)
class _Record:
    index: int
    name: str
    rank: int
    dp: int
    stage: int
    microbatch: int
    seq: int
    start: float


def megatron_graph(trace: xr.Dataset, gpus_per_node: int) -> TraceGraph:
    """Graph of an op-level trace; see `prism.traces.build_graph`.

    Raises
    ------
    TraceError
        Unknown op types, a send without its receive, a rank without compute ops, members of a
        collective missing.
    """
    records = _records(trace)
    last_stage = max(r.stage for r in records)
    node = {r.rank: r.rank // gpus_per_node for r in records}
    builder = DagBuilder()
    op_of: dict[tuple[str, int, int], int] = {}  # (name, rank, seq) -> op
    numbers = np.empty(len(records), np.int64)
    for key, members in _groups(records, last_stage).items():
        op = _add(builder, key[0], members, node)
        for r in members:
            op_of[r.name, r.rank, r.seq] = numbers[r.index] = op
    for rank, own in _by_rank(records).items():
        for op, after in _dependencies(rank, own, op_of):
            builder.wait(op, after)
    nodes = np.arange(max(node) + 1) // gpus_per_node
    dag = builder.build(nodes)
    return TraceGraph(dag, builder.placed[numbers])


def check_stages(dag: WorkloadDAG) -> None:
    """Stages meet their neighbours."""
    stages = {int(s) for s in dag.stage[dag.stage >= 0]}
    links = {s.shape for s in dag.signatures if s.role == "pp"}
    for a, b in itertools.pairwise(sorted(stages)):
        if not {f"stage {a}->{b}", f"stage {b}->{a}"} <= links:
            raise TraceError(
                f"no transfers both ways between stage {a} and stage {b}: sends and receives are "
                "missing from the trace"
            )


def _records(trace: xr.Dataset) -> list[_Record]:
    start = trace["start"].values.mean(axis=0)
    columns = (trace[c].values for c in ("name", "rank", "dp", "stage", "microbatch", "seq"))
    records = [
        _Record(i, str(name), *(int(v) for v in ints), float(t))
        for i, ((name, *ints), t) in enumerate(zip(zip(*columns, strict=True), start, strict=True))
    ]
    unknown = sorted({r.name for r in records} - set(ROLES))
    if unknown:
        raise TraceError(f"op types {', '.join(unknown)} are not known; known: {', '.join(ROLES)}")
    return records


def _by_rank(records: list[_Record]) -> dict[int, list[_Record]]:
    """Records of each rank in order of their mean start."""
    out: dict[int, list[_Record]] = defaultdict(list)
    for r in sorted(records, key=lambda r: (r.rank, r.start, r.seq, r.name)):
        out[r.rank].append(r)
    return out


def _groups(records: list[_Record], last_stage: int) -> dict[tuple, list[_Record]]:
    """Records that are one op: key -> members. Incomplete groups are refused."""
    groups: dict[tuple, list[_Record]] = defaultdict(list)
    for r in records:
        groups[_group_key(r)].append(r)
    ranks = {r.rank for r in records}
    per_stage: dict[int, set[int]] = defaultdict(set)
    for r in records:
        per_stage[r.stage].add(r.rank)
    for key, members in groups.items():
        role = ROLES[members[0].name]
        expected = {
            "pp": 2,
            "dp": len(per_stage[members[0].stage]),
            "embedding": 2 if last_stage > 0 else 1,
            "world": len(ranks),
        }.get(role, 1)
        if len(members) != expected:
            r = members[0]
            raise TraceError(
                f"{r.name} {r.seq} on rank {r.rank}: {len(members)} of {expected} members are in the "
                f"trace (group: {' '.join(str(k) for k in key)}); a rank or an op is missing"
            )
    return groups


def _group_key(r: _Record) -> tuple:
    """Return the key that members of one op share; its first entry is the name of the op."""
    match ROLES[r.name]:
        case "pp":
            direction, side = r.name.split("-")
            towards = 1 if direction == "forward" else -1
            sender = r.stage if side == "send" else r.stage - towards
            return (f"{direction}-send-recv", f"stage {sender}->{sender + towards}", r.dp, r.seq)
        case "dp":
            return (r.name, "stage", r.stage, r.seq)
        case "embedding":
            return (r.name, "dp", r.dp, r.seq)
        case "world":
            return (r.name, "seq", r.seq)
        case _:
            return (r.name, "rank", r.rank, r.seq)


def _add(builder: DagBuilder, name: str, members: list[_Record], node: dict[int, int]) -> int:
    r = members[0]
    role = ROLES[r.name]
    ranks = sorted(m.rank for m in members)
    link = None
    if role == "pp":
        sender, receiver = sorted(members, key=lambda m: not m.name.endswith("send"))
        link = f"stage {sender.stage}->{receiver.stage}"
    one_node = len({node[m] for m in ranks}) == 1
    scope = "local" if role == "compute" else "intra_node" if one_node else "inter_node"
    stages = {m.stage for m in members}
    # no shapes in these traces: the stage decides how much work an op is
    shape = link or (f"stage {r.stage}" if len(stages) == 1 else "")
    return builder.add(
        Signature(name, shape, role=role, scope=scope),
        ranks,
        site=link,
        stage=r.stage if len(stages) == 1 else -1,
        microbatch=r.microbatch,
        dp=r.dp,
        position=r.seq if role == "pp" or name in (FORWARD, BACKWARD) else -1,
    )


def _dependencies(rank: int, own: list[_Record], op_of: dict):
    """Yield ``(op, [ops it waits for])`` of one rank."""

    def op(name: str, seq: int) -> int | None:
        return op_of.get((name, rank, seq))

    def chain(ops: list[int]):
        for before, after in itertools.pairwise(ops):
            yield after, [before]

    compute = [r for r in own if r.name in (FORWARD, BACKWARD)]
    if not any(r.name == FORWARD for r in compute) or not any(r.name == BACKWARD for r in compute):
        raise TraceError(f"rank {rank} has no forward or no backward compute op")
    yield from chain([op(r.name, r.seq) for r in compute])
    for stream in ("forward-send", "forward-recv", "backward-send", "backward-recv"):
        yield from chain([op(r.name, r.seq) for r in own if r.name == stream])
    for r in compute:
        direction = r.name.split("-")[0]
        received, sent = op(f"{direction}-recv", r.seq), op(f"{direction}-send", r.seq)
        previous = op(r.name, r.seq - 1)
        if received is not None:
            yield op(r.name, r.seq), [received]
            if previous is not None:
                yield received, [previous]
        if sent is not None:
            yield sent, [op(r.name, r.seq)]
    first_backward = next(i for i, r in enumerate(compute) if r.name == BACKWARD)
    if first_backward >= 2:
        before = compute[first_backward - 2]
        for name in ("backward-recv", "backward-send"):
            if op(name, 0) is not None:
                yield op(name, 0), [op(before.name, before.seq)]
    yield from _around_the_pipeline(rank, own, compute, op, chain)


def _around_the_pipeline(rank: int, own: list[_Record], compute: list[_Record], op, chain):
    gathers = [op(r.name, r.seq) for r in own if r.name == GATHER]
    yield from chain(gathers)
    first_forward = next(r for r in compute if r.name == FORWARD)
    if gathers:
        yield op(FORWARD, first_forward.seq), [gathers[-1]]
    last = compute[-1]
    tail = [op(last.name, last.seq)]
    for name in (GC, LAYERNORM, EMBEDDING, SCATTER, CLIP, OPTIMIZER):
        tail += [op(r.name, r.seq) for r in own if r.name == name]
    if op(OPTIMIZER, 0) is None:
        raise TraceError(f"rank {rank} has no {OPTIMIZER} op, so the end of its step is not known")
    yield from chain(tail)
