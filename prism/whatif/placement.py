"""Placement of nodes: measured node speeds against the criticality of positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import factorial, prod

import numpy as np
import xarray as xr
from tqdm import tqdm

from prism.base import schema, stats
from prism.model.dag import WorkloadDAG
from prism.model.engine.montecarlo import simulate
from prism.model.step_model import StepModel
from prism.whatif.degradations import NodeSpeeds
from prism.whatif.scenarios import Scenario, increases
from prism.whatif.sweeping import Executor, sweep

#: assignments up to which every one is tried, and op-draws that this may take
EXHAUSTIVE, EXHAUSTIVE_DRAWS = 40_320, 5e9
#: draws of a first look at every assignment, and how many of them are looked at again with all draws
SCREENED, LOOKED_AT = 50, 40
#: nodes up to which all pairs are tried for an exchange, not only those with one of the slowest
ALL_PAIRS = 16
METHODS = ("as given", "sorted", "random, median of 20", "optimised")


def optimise_placement(
    model: StepModel,
    node_speed: Sequence[float],
    *,
    draws: int = 1000,
    seed: int = 0,
    rounds: int = 3,
    progress: bool = False,
) -> xr.Dataset:
    """Assign nodes of known speeds to the positions of a job so that p95 of step time is least.

    A position is a node of the model (the ranks that share a machine). Up to `EXHAUSTIVE` different assignments (eight
    nodes) all are tried, where that takes no more than `EXHAUSTIVE_DRAWS`: with `SCREENED` draws, and the best `LOOKED_AT` of them
    with all. Beyond that the slowest nodes go where slowing costs least (measured one position at a time), or
    nodes are sorted either way, and then pairs are exchanged while that helps; the best of the three is kept. Search and verdict use different random numbers, so that the least of many noisy
    values is not taken for an improvement.

    Parameters
    ----------
    model : StepModel
    node_speed : sequence of float
        Factor on compute of each node, as many as the model has nodes; 1 is nominal, 1.1 ten per cent slower. The
        first stands at the model's node 0, and so on: the placement "as given".
    draws, seed : int
    rounds : int
        Passes of exchanges.
    progress : bool
        Show a bar.

    Returns
    -------
    Dataset
        Per `policy` ("as given", "sorted" slowest last, the median of 20 random ones, "optimised"): ``p95`` with its
        interval, s, and ``node_of_position(policy, node)``.

    Raises
    ------
    ValueError
        Another number of speeds than nodes, speeds that are not positive.
    """
    speed = np.asarray(node_speed, float)
    nodes = np.unique(model.dag.node_of_rank)
    if speed.shape != nodes.shape or not (np.isfinite(speed).all() and (speed > 0).all()):
        raise ValueError(
            f"needs a positive speed for each of {nodes.size} nodes, got {speed.shape}"
        )

    def p95(order: np.ndarray, with_seed: int) -> float:
        return float(stats.p95(_times(model, nodes, speed[order], draws, with_seed)))

    found = _search(model, nodes, speed, p95, seed, rounds, progress)
    rng = np.random.default_rng(seed)
    shuffled = sorted(
        (rng.permutation(nodes.size) for _ in range(20)), key=lambda o: p95(o, seed + 1)
    )
    orders = [np.arange(nodes.size), np.argsort(speed, kind="stable"), shuffled[10], found]
    rows = [_times(model, nodes, speed[o], draws, seed + 1) for o in orders]
    return schema.dataset(
        {
            "p95": ("policy", [float(stats.p95(x)) for x in rows]),
            "p95_interval": (
                ("policy", "ci_bound"),
                [stats.quantile_interval(x, 0.95) for x in rows],
            ),
            "node_of_position": (("policy", "node"), np.array(orders)),
        },
        coords={"policy": list(METHODS), "node": nodes, "ci_bound": ["lower", "upper"]},
        made_by="prism.optimise_placement",
        source=schema.derived_source(model.source),
        seed=seed,
        provenance={"speeds": speed.tolist(), "exhaustive": _every_one_is_tried(model, speed)},
    )


def _times(
    model: StepModel, nodes: np.ndarray, speed: np.ndarray, draws: int, seed: int
) -> np.ndarray:
    placed = NodeSpeeds(dict(zip(nodes.tolist(), speed.tolist(), strict=True)))(model)
    return simulate(placed, draws, seed=seed)["step_time"].values


def _search(model, nodes, speed, p95, seed, rounds, progress) -> np.ndarray:
    if _every_one_is_tried(model, speed):
        return _exhaustive(model, nodes, speed, p95, seed, progress)
    n = nodes.size
    slow = float(speed.max() / np.median(speed))
    cost = [
        float(stats.p95(_times(model, nodes, np.where(np.arange(n) == i, slow, 1.0), 400, seed)))
        for i in tqdm(range(n), disable=not progress, leave=False)
    ]
    greedy = np.empty(n, int)
    greedy[np.argsort(cost, kind="stable")] = np.argsort(-speed, kind="stable")
    starts = [greedy, np.argsort(speed, kind="stable"), np.argsort(-speed, kind="stable")]
    found = [
        _exchanged(s, speed, lambda o: p95(o, seed), rounds)
        for s in tqdm(starts, disable=not progress, leave=False)
    ]
    return min(found, key=lambda f: f[1])[0]


def _exchanged(
    order: np.ndarray, speed: np.ndarray, value, rounds: int
) -> tuple[np.ndarray, float]:
    """Exchange pairs of nodes while that helps."""
    n = order.size
    order, best = order.copy(), value(order)
    # only exchanges that move one of the slowest are worth a simulation where there are many
    movers = np.argsort(-speed, kind="stable")[: n if n <= ALL_PAIRS else max(2, n // 8)]
    for _ in range(rounds):
        improved = False
        for mover in movers:
            for j in range(n):
                i = int(np.flatnonzero(order == mover)[0])
                if speed[order[i]] == speed[order[j]]:
                    continue
                trial = order.copy()
                trial[[i, j]] = trial[[j, i]]
                if (new := value(trial)) < best:
                    order, best, improved = trial, new, True
        if not improved:
            break
    return order, best


def _every_one_is_tried(model: StepModel, speed: np.ndarray) -> bool:
    many = _assignments(speed)
    work = many * model.dag.n_ops * model.dag.lanes * SCREENED
    return many <= EXHAUSTIVE and work <= EXHAUSTIVE_DRAWS


def _exhaustive(model, nodes, speed, p95, seed, progress) -> np.ndarray:
    """The best of all assignments: those that a few draws like, with all draws."""
    every = _distinct(speed)
    if len(every) > LOOKED_AT:
        screened = [
            float(stats.p95(_times(model, nodes, speed[o], SCREENED, seed)))
            for o in tqdm(every, disable=not progress, leave=False)
        ]
        every = [every[i] for i in np.argsort(screened, kind="stable")[:LOOKED_AT]]
    return min(every, key=lambda o: p95(o, seed))


def _assignments(speed: np.ndarray) -> int:
    """Different ways to place the nodes; those of one speed are alike."""
    alike = np.unique(speed, return_counts=True)[1].tolist()
    return factorial(speed.size) // prod(map(factorial, alike))


def _distinct(speed: np.ndarray) -> list[np.ndarray]:
    """One order of nodes for each different assignment of speeds."""

    def place(left: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if not left:
            yield ()
        for i in {speed[n]: n for n in reversed(left)}.values():
            rest = tuple(n for n in left if n != i)
            yield from ((i, *order) for order in place(rest))

    return [np.array(o) for o in place(tuple(range(speed.size)))]


def position_costs(
    model: StepModel,
    degrade: Callable[[int], Scenario],
    *,
    nodes: Sequence[int] | None = None,
    draws: int = 1000,
    seed: int = 0,
    executor: Executor | None = None,
    progress: bool = False,
) -> xr.Dataset:
    """Compute the cost of one slow node at each position, beside its stages' share of the step.

    Parameters
    ----------
    model : StepModel
    degrade : callable, node to scenario
        For instance `prism.HotNode`, or ``lambda node: NodeSpeeds({node: 1.2})``.
    nodes : sequence of int, optional
        Positions, all by default. Replicas of a stage are alike unless the topology tells them apart.
    draws, seed, executor, progress
        Passed on to `prism.sweep`.

    Returns
    -------
    Dataset
        Per `node` ``increase`` of p95 with paired interval, and ``path_share``, the share of the longest path's time that
        ops of the node's pipeline stages make up in the healthy step (op by op: share of draws on the path times
        mean duration, in whichever replica); coordinates ``stage`` (the first that the node holds) and ``replica``.

    Raises
    ------
    ValueError
        Nodes that the model does not have.
    """
    dag = model.dag
    every = np.unique(dag.node_of_rank)
    chosen = every if nodes is None else np.array(nodes)
    scenarios: dict[str, Scenario | None] = {"healthy": None}
    scenarios |= {f"node {n}": degrade(int(n)) for n in chosen}
    runs = sweep(model, scenarios, draws, seed=seed, executor=executor, progress=progress)
    effect = increases(runs, "healthy", seed=seed)
    paths = simulate(model, min(draws, 500), seed=seed, paths=True)
    weight = paths["criticality"].values * np.array([p.mean for p in model.op_pools])
    weight /= float(paths["step_time"].mean())
    held = {int(n): _held(dag, int(n)) for n in chosen}
    return schema.dataset(
        {
            "increase": ("node", effect["increase"].values),
            "increase_interval": (("node", "ci_bound"), effect["increase_interval"].values),
            "path_share": (
                "node",
                [weight[np.isin(dag.stage, sorted(held[n][0]))].sum() for n in chosen.tolist()],
            ),
        },
        coords={
            "node": chosen,
            "stage": ("node", [min(held[n][0], default=-1) for n in chosen.tolist()]),
            "replica": ("node", [held[n][1] for n in chosen.tolist()]),
            "ci_bound": ["lower", "upper"],
        },
        made_by="prism.whatif.position_costs",
        source=runs.attrs["source"],
        seed=seed,
        provenance=schema.provenance(runs),
    )


def _held(dag: WorkloadDAG, node: int) -> tuple[set[int], int]:
    """Stages, and the lowest replica, of the ranks on a node."""
    rank, replica = np.nonzero(dag.node_of_rank == node)
    own = np.isin(dag.rank, rank)
    stages = {int(s) for s in np.unique(dag.stage[own]) if s >= 0}
    return stages, int(replica.min() if dag.lanes > 1 else dag.dp[own].min(initial=0))
