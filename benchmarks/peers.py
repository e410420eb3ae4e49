"""Small engines to stand beside: what people write without PRISM. Each returns the longest path."""

from __future__ import annotations

from collections import deque

import networkx as nx
import numpy as np

from prism.model.dag import WorkloadDAG


def networkx_graph(dag: WorkloadDAG, duration: np.ndarray) -> nx.DiGraph:
    """Ops as nodes, the duration of an op on the edges out of it; one sink behind all."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(dag.n_ops + 1))
    owner = np.repeat(np.arange(dag.n_ops), np.diff(dag.pred_ptr))
    graph.add_weighted_edges_from(
        (int(p), int(i), float(duration[p])) for p, i in zip(dag.pred, owner, strict=True)
    )
    graph.add_weighted_edges_from(
        (int(i), dag.n_ops, float(duration[i])) for i in np.flatnonzero(dag.slots[2])
    )
    return graph


def networkx_replay(graph: nx.DiGraph) -> float:
    """`networkx.dag_longest_path_length`."""
    return nx.dag_longest_path_length(graph)


def lists(dag: WorkloadDAG) -> tuple[list[list[int]], list[int]]:
    """Successors and numbers of predecessors as Python lists."""
    successors: list[list[int]] = [[] for _ in range(dag.n_ops)]
    owner = np.repeat(np.arange(dag.n_ops), np.diff(dag.pred_ptr))
    for p, i in zip(dag.pred.tolist(), owner.tolist(), strict=True):
        successors[p].append(i)
    return successors, np.diff(dag.pred_ptr).tolist()


def list_replay(successors: list[list[int]], waiting: list[int], duration: list[float]) -> float:
    """Kahn's algorithm on plain lists."""
    waiting = list(waiting)
    start = [0.0] * len(duration)
    ready = deque(i for i, n in enumerate(waiting) if n == 0)
    last = 0.0
    while ready:
        i = ready.popleft()
        end = start[i] + duration[i]
        last = max(last, end)
        for j in successors[i]:
            start[j] = max(start[j], end)
            waiting[j] -= 1
            if waiting[j] == 0:
                ready.append(j)
    return last


def simpy_replay(dag: WorkloadDAG, duration: list[float]) -> float:
    """SimPy, a process for each op: wait for the predecessors' events, then for the duration."""
    import simpy

    env = simpy.Environment()
    done = [env.event() for _ in range(dag.n_ops)]

    def run(i: int, preds: list[int]):
        for p in preds:
            if not done[p].processed:
                yield done[p]
        yield env.timeout(duration[i])
        done[i].succeed()

    for i in range(dag.n_ops):
        env.process(run(i, dag.pred[dag.pred_ptr[i] : dag.pred_ptr[i + 1]].tolist()))
    env.run()
    return env.now


def numpy_monte_carlo(
    dag: WorkloadDAG, mu: float, sigma: float, draws: int, seed: int
) -> np.ndarray:
    """numpy over the draws, a Python loop over the ops: the usual vectorised Monte Carlo."""
    rng = np.random.default_rng(seed)
    finish: list[np.ndarray | None] = [None] * dag.n_ops
    last = np.zeros(draws)
    for i in range(dag.n_ops):
        preds = dag.pred[dag.pred_ptr[i] : dag.pred_ptr[i + 1]]
        start = np.max([finish[p] for p in preds], axis=0) if preds.size else 0.0
        finish[i] = start + rng.lognormal(mu, sigma, draws)
        np.maximum(last, finish[i], out=last)
    return last
