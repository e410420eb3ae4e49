"""Which node should sit where: measured node speeds against positions that matter more and less."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import numpy as np
import xarray as xr
from tqdm import tqdm

from prism import schema, stats
from prism.degradations import NodeSpeeds
from prism.model import StepModel
from prism.montecarlo import simulate

#: positions up to which every assignment is tried
EXHAUSTIVE = 6
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

    A position is a node of the model (the ranks that share a machine). Up to `EXHAUSTIVE` positions every assignment is
    tried. Beyond that the slowest nodes go where slowing costs least (measured one position at a time), and then pairs are
    exchanged while that helps. Search and verdict use different random numbers, so that the least of many noisy
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
        source="synthetic" if model.source == "synthetic" else "simulated",
        seed=seed,
        provenance={"speeds": speed.tolist(), "exhaustive": nodes.size <= EXHAUSTIVE},
    )


def _times(
    model: StepModel, nodes: np.ndarray, speed: np.ndarray, draws: int, seed: int
) -> np.ndarray:
    placed = NodeSpeeds(dict(zip(nodes.tolist(), speed.tolist(), strict=True)))(model)
    return simulate(placed, draws, seed=seed)["step_time"].values


def _search(model, nodes, speed, p95, seed, rounds, progress) -> np.ndarray:
    n = nodes.size
    if n <= EXHAUSTIVE:
        # nodes of one speed are alike
        distinct = {tuple(speed[list(o)]): np.array(o) for o in permutations(range(n))}
        return min(
            tqdm(distinct.values(), disable=not progress, leave=False), key=lambda o: p95(o, seed)
        )
    slow = float(speed.max() / np.median(speed))
    cost = [
        float(stats.p95(_times(model, nodes, np.where(np.arange(n) == i, slow, 1.0), 400, seed)))
        for i in tqdm(range(n), disable=not progress, leave=False)
    ]
    order = np.empty(n, int)
    order[np.argsort(cost, kind="stable")] = np.argsort(-speed, kind="stable")
    best = p95(order, seed)
    for _ in range(rounds):
        improved = False
        # only exchanges that move a slow node are worth a simulation
        for i in np.argsort(-speed[order], kind="stable")[: max(2, n // 8)]:
            for j in np.argsort(cost, kind="stable"):
                trial = order.copy()
                trial[[i, j]] = trial[[j, i]]
                if speed[order[i]] == speed[order[j]] or (value := p95(trial, seed)) >= best:
                    continue
                order, best, improved = trial, value, True
        if not improved:
            break
    return order
