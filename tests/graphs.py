"""Random graphs of steps, for property tests, and an independent longest path."""

from __future__ import annotations

import networkx as nx
import numpy as np

from prism.model.dag import WorkloadDAG
from prism.model.dag_builder import DagBuilder
from prism.model.signature import PoolKey, Signature


def random_dag(rng: np.random.Generator, n: int, density: float = 0.2) -> WorkloadDAG:
    """n ops with distinct signatures, edges from a random order of them (not the index order)."""
    builder = DagBuilder()
    for i in range(n):
        builder.add(Signature(f"op {i}"), [int(rng.integers(4))])
    order = rng.permutation(n)
    for a in range(n):
        for b in range(a + 1, n):
            if rng.random() < density:
                builder.wait(int(order[b]), [int(order[a])])
    return builder.build(node_of_rank=[0, 0, 1, 1])


def keyed(dag: WorkloadDAG, pools) -> dict:
    """Mapping from the signature of each op to the pool of the same index."""
    return {PoolKey(dag.signatures[s]): p for s, p in zip(dag.signature, pools, strict=True)}


def networkx_longest_path(dag: WorkloadDAG, duration: np.ndarray) -> float:
    """Length of the longest path with op durations, by networkx: an op is an edge of its own."""
    graph = nx.DiGraph()
    for i in range(dag.n_ops):
        graph.add_edge((i, "start"), (i, "end"), weight=float(duration[i]))
        for p in dag.pred[dag.pred_ptr[i] : dag.pred_ptr[i + 1]]:
            graph.add_edge((int(p), "end"), (i, "start"), weight=0.0)
    return nx.dag_longest_path_length(graph)


def chain(n: int) -> WorkloadDAG:
    """n ops one after the other."""
    builder = DagBuilder()
    for i in range(n):
        builder.add(Signature(f"op {i}"), [0], after=[i - 1] if i else [])
    return builder.build([0])


def fork_join(width: int) -> WorkloadDAG:
    """`width` ops side by side."""
    builder = DagBuilder()
    for i in range(width):
        builder.add(Signature(f"branch {i}"), [i])
    return builder.build([0] * width)
