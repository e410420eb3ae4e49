"""From the records of a trace to the graph of its step."""

from __future__ import annotations

import warnings
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import xarray as xr
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from prism.base import schema
from prism.model.dag import WorkloadDAG
from prism.model.dag_builder import DagBuilder
from prism.model.signature import Category, Signature
from prism.traces.records import TraceError, TraceWarning

#: overlaps of ops on one stream below this are rounding, seconds
ROUNDING = 5e-6


@dataclass(frozen=True, eq=False)
class TraceGraph:
    """The graph of a traced step and where each record went.

    Attributes
    ----------
    dag : WorkloadDAG
    op_of_record : ndarray (record,), int64
        Op of the graph that a record (the `op` dimension of the trace) is a member of.
    """

    dag: WorkloadDAG
    op_of_record: np.ndarray


def build_graph(trace: xr.Dataset, *, gpus_per_node: int = 8) -> TraceGraph:
    """Build the graph of a step from a trace of `read_trace`.

    Ops of one stream run in order; records of one group and number are one op, which starts when the last
    member arrives; further dependencies are those that the reader found. Op-level traces of Megatron-like
    pipelines name no dependencies: theirs follow from what the ops are (`prism.traces.megatron`).

    Parameters
    ----------
    trace : Dataset
    gpus_per_node : int
        Which machine a rank sits on is not recorded: ranks are placed in order, this many a node.

    Raises
    ------
    TraceError
        Ranks that communicate with nobody, groups without some of their members, dependencies that form a
        cycle; for op-level traces also unknown op types and sends without their receives.
    """
    if gpus_per_node < 1:
        raise ValueError(f"gpus_per_node must be at least 1, got {gpus_per_node}")
    ranks = sorted(set(trace["rank"].values.tolist()))
    if schema.provenance(trace).get("format") != "op-level parquet":
        graph = _general(trace, gpus_per_node)
        _check_connected(graph.dag, ranks)
        return graph
    from prism.traces import megatron

    graph = megatron.megatron_graph(trace, gpus_per_node)
    _check_connected(graph.dag, ranks)
    megatron.check_stages(graph.dag)
    return graph


def _general(trace: xr.Dataset, gpus_per_node: int) -> TraceGraph:
    builder = DagBuilder()
    numbers = _add_ops(builder, trace, gpus_per_node)
    for before, after in _stream_order(trace):
        builder.wait(numbers[after], [numbers[before]])
    if "edge_from" in trace:
        for before, after in zip(trace["edge_from"].values, trace["edge_to"].values, strict=True):
            builder.wait(numbers[after], [numbers[before]])
    nodes = np.arange(int(trace["rank"].max()) + 1) // gpus_per_node
    try:
        dag = builder.build(nodes)
    except ValueError as fault:
        raise TraceError(f"{_files(trace)}: {fault}") from None
    return TraceGraph(dag, builder.placed[numbers])


def _files(trace: xr.Dataset) -> str:
    return str(schema.provenance(trace).get("files", "trace"))


def _add_ops(builder: DagBuilder, trace: xr.Dataset, gpus_per_node: int) -> np.ndarray:
    """Add every op once; number of the op of each record."""
    fields = ("name", "rank", "seq", "role", "group", "shape", "dtype", "stage", "microbatch", "dp")
    rows = list(zip(*(trace[f].values.tolist() for f in fields), strict=True))
    together: dict[tuple, list[int]] = defaultdict(list)
    for i, (name, rank, seq, role, group, *_) in enumerate(rows):
        alone = group == ""
        key = (i,) if alone else (group, seq, role == "pp")
        together[key].append(i)
        if not alone and rank not in _ranks(group):
            raise TraceError(f"{_files(trace)}: {name} of ranks {group} on rank {rank}")
    numbers = np.empty(len(rows), np.int64)
    signatures: dict[tuple, Signature] = {}
    here = set(trace["rank"].values.tolist())
    for members in together.values():
        name, rank, seq, role, group, shape, dtype, stage, microbatch, dp = rows[members[0]]
        ranks = sorted(rows[i][1] for i in members)
        if group:
            _check_members(_files(trace), {rows[i][0] for i in members}, ranks, seq, group, here)
        kind = (name, shape, dtype, role, group)
        if kind not in signatures:
            try:
                signatures[kind] = _signature(*kind, gpus_per_node)
            except ValueError as fault:
                raise TraceError(f"{_files(trace)}: {fault}") from None
        numbers[members] = builder.add(
            signatures[kind],
            ranks,
            site=f"ranks {group}" if group else None,
            stage=stage,
            microbatch=microbatch,
            dp=dp,
            position=seq,
        )
    return numbers


#: names that tell no kind of collective
_VAGUE = {"collective", "send_recv"}


def _check_members(
    files: str, names: set[str], ranks: list[int], seq: int, group: str, here: set[int]
) -> None:
    """All members of a group that are in the trace take part, once each, in one and the same thing."""
    expected = [r for r in _ranks(group) if r in here]
    if ranks != expected:
        absent = sorted(set(expected) - set(ranks))
        fault = f"rank {absent[0]} does not" if absent else f"rank {ranks[0]} does more than once"
        raise TraceError(
            f"{files}: number {seq} of ranks {group} ({', '.join(sorted(names))}): {fault} take part"
        )
    if len(names - _VAGUE) > 1:
        raise TraceError(
            f"{files}: number {seq} of ranks {group} is {' on one rank and '.join(sorted(names))} on another"
        )


def _ranks(group: str) -> list[int]:
    return [int(r) for r in group.split(",")]


def _signature(
    name: str, shape: str, dtype: str, role: str, group: str, gpus_per_node: int
) -> Signature:
    """Signature of a record; its scope from the machines that its group spans."""
    if Signature(name, role=role).category in (Category.COMPUTE, Category.GAP):
        return Signature(name, shape, dtype, role)
    nodes = {r // gpus_per_node for r in _ranks(group)} if group else {0}
    scope = "intra_node" if len(nodes) == 1 else "inter_node"
    return Signature(name, shape, dtype, role, scope)


def _stream_order(trace: xr.Dataset) -> list[tuple[int, int]]:
    """Order within each stream of each rank. Ops that overlap there run side by side: both follow what
    came before, and the next one waits for both."""
    start = trace["start"].values
    end = start + trace["duration"].values
    typical = np.median(start, axis=0)
    streams: dict[tuple, list[int]] = defaultdict(list)
    for i, key in enumerate(
        zip(trace["rank"].values.tolist(), trace["stream"].values.tolist(), strict=True)
    ):
        streams[key].append(i)
    edges = []
    for (_, stream), ops in streams.items():
        if not stream:
            continue
        ops.sort(key=lambda i: (typical[i], i))
        before: list[int] = []
        running: list[int] = []
        for op in ops:
            over = [r for r in running if (start[:, op] >= end[:, r] - ROUNDING).all()]
            edges += [(r, op) for r in over]
            if len(over) == len(running):
                before, running = running, [op]
            else:
                edges += [(b, op) for b in before]
                running = [r for r in running if r not in over] + [op]
    return edges


def _check_connected(dag: WorkloadDAG, ranks: list[int]) -> None:
    """Every rank of a job meets some other; a job in parts that never meet is worth a warning."""
    first = dag.member[dag.member_ptr[:-1]].repeat(np.diff(dag.member_ptr))
    size = int(max(ranks)) + 1
    met = coo_array((np.ones(first.size), (first, dag.member)), shape=(size, size))
    _, component = connected_components(met, directed=False)
    part = component[ranks]
    alone = [r for r, p in zip(ranks, part, strict=True) if np.sum(part == p) == 1]
    if len(ranks) > 1 and alone:
        raise TraceError(
            f"rank {alone[0]} ({len(alone)} of {len(ranks)} ranks) communicates with none of the others: "
            "communication ops are missing from the trace"
        )
    parts = len(set(part.tolist()))
    if parts > 1:
        warnings.warn(
            f"the ranks form {parts} parts that never meet: communication between them is missing from the "
            "trace, or there is none",
            TraceWarning,
            stacklevel=3,
        )
