"""Graphs to time: built from arrays, since a million ops are too many for a builder in Python."""

from __future__ import annotations

import numpy as np

from prism.model.dag import WorkloadDAG
from prism.model.schedules import one_f_one_b
from prism.model.signature import Signature


def from_edges(src, dst, n: int, rank, microbatch) -> WorkloadDAG:
    """One signature, ops in topological order already, a machine for each 8 ranks."""
    src, dst = np.asarray(src, np.int64), np.asarray(dst, np.int64)
    order = np.lexsort((src, dst))
    zero, none = np.zeros(n, np.int32), np.full(n, -1, np.int32)
    rank = np.asarray(rank, np.int32)
    return WorkloadDAG(
        signatures=(Signature("kernel"),),
        sites=("",),
        signature=zero,
        site=zero.copy(),
        position=none,
        stage=rank.copy(),
        microbatch=np.asarray(microbatch, np.int32),
        rank=rank,
        key=np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15),
        pred_ptr=np.concatenate([[0], np.cumsum(np.bincount(dst, minlength=n))]).astype(np.int64),
        pred=src[order].astype(np.int32),
        member_ptr=np.arange(n + 1, dtype=np.int64),
        member=rank.copy(),
        node_of_rank=(np.arange(rank.max() + 1, dtype=np.int32) // 8)[:, None],
        leaders=np.zeros((2, 1), np.int32),
        grouping=zero.copy(),
        replica=zero.copy(),
        dp=zero.copy(),
        width=np.ones(n, np.int32),
        lanes=1,
    )


def kernels_1f1b(stages: int, microbatches: int, kernels: int) -> WorkloadDAG:
    """1F1B with `kernels` kernels in each forward and backward: chain per rank, edges between stages."""
    orders = one_f_one_b(stages, microbatches).ranks
    size = {s: len(order) * kernels for s, order in enumerate(orders)}
    offset = np.cumsum([0, *size.values()])
    first, rank, microbatch = {}, [], []
    src, dst = [], []
    for s, order in enumerate(orders):
        ops = np.arange(offset[s], offset[s + 1], dtype=np.int32)
        src.append(ops[:-1])
        dst.append(ops[1:])
        rank.append(np.full(ops.size, s, np.int32))
        microbatch.append(np.repeat(np.array([op.microbatch for op in order], np.int32), kernels))
        first |= {(op.kind, s, op.microbatch): int(ops[i * kernels]) for i, op in enumerate(order)}
    links = []
    for (kind, s, m), op in first.items():
        peer = s + 1 if kind == "F" else s - 1
        if (kind, peer, m) in first:
            links.append((op + kernels - 1, first[kind, peer, m]))
    src = np.concatenate([*src, np.array([a for a, _ in links], np.int32)])
    dst = np.concatenate([*dst, np.array([b for _, b in links], np.int32)])
    n = int(offset[-1])
    order = _topological(src, dst, n)
    new = np.empty(n, np.int64)
    new[order] = np.arange(n)
    return from_edges(
        new[src], new[dst], n, np.concatenate(rank)[order], np.concatenate(microbatch)[order]
    )


def _topological(src: np.ndarray, dst: np.ndarray, n: int) -> np.ndarray:
    from prism.model import _graph_loops

    order = np.argsort(src, kind="stable")
    ptr = np.concatenate([[0], np.cumsum(np.bincount(src, minlength=n))]).astype(np.int64)
    return _graph_loops.topological_order(n, ptr, dst[order])
