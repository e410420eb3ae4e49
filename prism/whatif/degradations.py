"""Scenarios of things that get worse: nodes, GPUs, links, datacenters.

Their factors and links are given by hand, so that a model under them is ``synthetic`` (`prism.base.schema.derived_source`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from prism.model.pools import DurationPool, LogNormal, Scaled, Shifted
from prism.model.signature import Category
from prism.model.step_model import StepModel


@dataclass(frozen=True)
class NodeSpeeds:
    """Nodes of different speeds: mixed generations, power caps, a placement.

    Attributes
    ----------
    factor : mapping of node to float
        On the duration of all compute there; nodes that are not named stay as they are.

    Raises
    ------
    ValueError
        On call: a node that the model does not have. On construction: factors that are not positive.
    """

    factor: Mapping[int, float]
    #: all nodes may be alike
    allows_no_effect = True

    def __post_init__(self) -> None:
        _check_factors(self.factor)

    def __call__(self, model: StepModel) -> StepModel:
        dag = model.dag
        compute = _of_category(model, Category.COMPUTE)[:, None]
        on = {n: dag.on_node(n) for n in self.factor}
        for factor in sorted({f for f in self.factor.values() if f != 1.0}):
            chosen = np.zeros((dag.n_ops, dag.lanes), bool)
            for node in (n for n, f in self.factor.items() if f == factor):
                chosen |= on[node] & compute
            if chosen.any():
                model = model.override(chosen, lambda _, pool, f=factor: Scaled(pool, f))
        return (
            model.replace(source="synthetic")
            if any(f != 1.0 for f in self.factor.values())
            else model
        )


@dataclass(frozen=True)
class HotGpu:
    """One GPU of one replica that computes slower.

    Attributes
    ----------
    rank : int
        Of the graph (of the template, where replicas are lanes).
    factor : float
    replica : int

    Raises
    ------
    ValueError
        On call: a rank or replica that the model does not have; a rank that is folded with others into one op, where
        one GPU cannot be told from the rest.
    """

    rank: int
    factor: float
    replica: int = 0

    def __post_init__(self) -> None:
        _check_factors({self.rank: self.factor})

    def __call__(self, model: StepModel) -> StepModel:
        dag = model.dag
        here = (dag.rank == self.rank) & _of_category(model, Category.COMPUTE)
        if not here.any():
            raise ValueError(
                f"rank {self.rank} computes nothing: ranks are 0 to {int(dag.rank.max())}"
            )
        if not 0 <= self.replica < dag.replicas:
            raise ValueError(f"replica {self.replica}: there are {dag.replicas}")
        if (dag.width[here] > 1).any():
            raise ValueError(
                f"rank {self.rank} stands for {int(dag.width[here].max())} tensor-parallel GPUs: write them out (fold_tp: false)"
            )
        if dag.lanes == 1:
            chosen = (here & (dag.replica == self.replica))[:, None]
        else:
            chosen = here[:, None] & (np.arange(dag.lanes) == self.replica)
        return model.override(chosen, lambda _, pool: Scaled(pool, self.factor)).replace(
            source="synthetic"
        )


@dataclass(frozen=True)
class SlowLink:
    """Transfers of some kind that take longer: a congested switch, a link that has lost lanes.

    Attributes
    ----------
    factor : float
    between : (int, int), optional
        Pipeline stages whose transfers, in both directions, are meant; all communication between nodes by default.
    role : str, optional
        Only collectives of this role (``dp``, ``tp`` and so on).

    Raises
    ------
    ValueError
        On call: no op is affected.
    """

    factor: float
    between: tuple[int, int] | None = None
    role: str | None = None

    def __post_init__(self) -> None:
        _check_factors({"factor": self.factor})
        if self.between is not None and len(self.between) != 2:
            raise ValueError(f"between needs two stages, got {self.between!r}")

    def __call__(self, model: StepModel) -> StepModel:
        dag = model.dag
        if self.between is None:
            chosen = dag.is_inter_node & ~_of_category(model, Category.COMPUTE)
        else:
            wanted = {tuple(self.between), tuple(self.between)[::-1]}
            chosen = _links(model, lambda a, b: (a, b) in wanted)
        if self.role is not None:
            chosen &= dag.component == self.role
        if not chosen.any():
            what = (
                f"between stages {self.between[0]} and {self.between[1]}"
                if self.between
                else "between nodes"
            )
            raise ValueError(
                f"no communication {what}" + (f" of role {self.role}" if self.role else "")
            )
        return model.override(chosen, lambda _, pool: Scaled(pool, self.factor)).replace(
            source="synthetic"
        )


@dataclass(frozen=True)
class CrossDatacenter:
    """A job split over two datacenters, within its pipeline or between its replicas.

    With `after`, transfers between stages on both sides take the long link instead of their own: ``latency + message /
    bandwidth``; collectives with members on both sides (of embeddings, of the whole job) take it on top of their own time,
    with the bytes that their signatures say, or with the latency alone. With `replicas`, each collective of replicas that have members on both sides takes, on top of its own time
    within the sites, what must cross, once each way at the same time: ``latency + crossing / bandwidth``, where an
    all-gather or reduce-scatter of `message` bytes sends the larger site's part, ``max(k, n - k) / n`` of it, and an
    all-reduce all of it (sites reduce first, then exchange sums).

    Attributes
    ----------
    after : int, optional
        The last stage of the first datacenter.
    replicas : int, optional
        How many replicas are in the first datacenter; either this or `after`.
    bandwidth : float
        byte/s of one transfer, or of one group's traffic each way: the share of it, where several cross at once.
    latency : float
        Seconds.
    message : float, optional
        Bytes of a transfer or collective; those of its signature (``4e+08 B``) if not given.
    jitter : float
        Coefficient of variation of the time that crossing takes, LogNormal (of a collective's whole time: a LogNormal
        with the mean and variance of the sum).

    Raises
    ------
    ValueError
        On call: nothing crosses the cut; no number of bytes is known.
    """

    after: int | None = None
    bandwidth: float = 1e9
    latency: float = 0.01
    message: float | None = None
    jitter: float = 0.0
    replicas: int | None = None

    def __post_init__(self) -> None:
        if (self.after is None) == (self.replicas is None):
            raise ValueError("a cut is either after a stage or between replicas: give one of them")
        known = {"bandwidth": self.bandwidth}
        known |= {} if self.message is None else {"message": self.message}
        for name, value in known.items():
            _check_factors({name: value})
        if not (0 <= self.latency < np.inf and 0 <= self.jitter < np.inf):
            raise ValueError("latency and jitter must be finite and not negative")

    def __call__(self, model: StepModel) -> StepModel:
        if self.replicas is not None:
            crossing = self._collectives(model)
            changed = model.override(crossing, lambda op, pool: self._both_sites(model, op, pool))
        else:
            crossing = _links(model, lambda a, b: (a <= self.after) != (b <= self.after))
            if not crossing.any():
                raise ValueError(
                    f"no transfer crosses between stages {self.after} and {self.after + 1}"
                )
            changed = model.override(crossing, lambda op, _: self._long_link(model, op))
            changed = changed.override(
                self._straddling(model), lambda op, pool: self._straddled(model, op, pool)
            )
        # nobody measured the link between the sites
        return changed.replace(source="synthetic")

    def _straddling(self, model: StepModel) -> np.ndarray:
        """Collectives with members of stages on both sides, bool (op,)."""
        dag = model.dag
        owned = (dag.rank >= 0) & (dag.stage >= 0)
        near, far = (
            np.isin(dag.member, dag.rank[owned & side]).astype(bool)
            for side in (dag.stage <= self.after, dag.stage > self.after)
        )
        both = np.logical_or.reduceat(near, dag.member_ptr[:-1]) & np.logical_or.reduceat(
            far, dag.member_ptr[:-1]
        )
        several = np.diff(dag.member_ptr) > 1
        return both & several & _of_category(model, Category.COLLECTIVE)

    def _straddled(self, model: StepModel, op: int, pool: DurationPool) -> DurationPool:
        try:
            size = self._bytes(model, op, None)
        except ValueError:
            size = 0.0
        return self._on_top(pool, size)

    def _collectives(self, model: StepModel) -> np.ndarray:
        """Joining ops with members on both sides, bool (op, lane)."""
        dag, k = model.dag, self.replicas
        if dag.lanes == 1 or not 0 < k < dag.lanes:
            raise ValueError(
                f"{k} replicas in the first datacenter: needs a model of lanes, and 1 to {dag.lanes - 1} of them"
            )
        chosen = np.zeros((dag.n_ops, dag.lanes), bool)
        for g in range(1, dag.leaders.shape[0]):
            leader = dag.leaders[g]
            both = np.intersect1d(leader[:k], leader[k:])
            chosen[dag.grouping == g] = np.isin(leader, both)
        if not chosen.any():
            raise ValueError(f"no collective crosses between replicas {k - 1} and {k}")
        return chosen

    def _bytes(self, model: StepModel, op: int, given: float | None) -> float:
        if given is not None:
            return given
        shape = model.dag.signatures[model.dag.signature[op]].shape
        number, _, unit = shape.rpartition(" ")
        try:
            if unit == "B":
                return float(number)
        except ValueError:
            pass
        raise ValueError(f"{model.dag.describe(op)} does not say its bytes: give message")

    def _crossing(self, size: float) -> tuple[float, float]:
        """Mean and standard deviation of what crossing takes, s."""
        mean = self.latency + size / self.bandwidth
        return mean, self.jitter * mean

    def _long_link(self, model: StepModel, op: int) -> DurationPool:
        return _moments(*self._crossing(self._bytes(model, op, self.message)))

    def _both_sites(self, model: StepModel, op: int, pool: DurationPool) -> DurationPool:
        dag = model.dag
        size = self._bytes(model, op, self.message)
        name = dag.signatures[dag.signature[op]].op.replace("-", "_")
        if not name.endswith("all_reduce"):
            size *= max(self.replicas, dag.lanes - self.replicas) / dag.lanes
        return self._on_top(pool, size)

    def _on_top(self, pool: DurationPool, size: float) -> DurationPool:
        mean, std = self._crossing(size)
        if std == 0:
            return Shifted(pool, mean)
        return _moments(pool.mean + mean, float(np.hypot(pool.std, std)))


def _moments(mean: float, std: float) -> DurationPool:
    # a spread of nothing is one of next to nothing: another family could not be scaled in single replicas
    return LogNormal.from_moments(mean, max(std / mean, 1e-9))


def _check_factors(factor: Mapping) -> None:
    bad = [f"{k}: {v}" for k, v in factor.items() if not (np.isfinite(v) and v > 0)]
    if bad:
        raise ValueError(f"must be positive and finite, got {', '.join(bad)}")


def _of_category(model: StepModel, category: Category) -> np.ndarray:
    """Ops of a category, bool (op,)."""
    dag = model.dag
    return dag.category == category


def _links(model: StepModel, wanted: Callable[[int, int], bool]) -> np.ndarray:
    """Point-to-point ops on links between stages that are wanted, bool (op,)."""
    dag = model.dag

    def chosen(site: str) -> bool:
        ends = re.fullmatch(r"stage (\d+)->(\d+)", site)
        return ends is not None and wanted(int(ends[1]), int(ends[2]))

    return np.array([chosen(s) for s in dag.sites])[dag.site] & _of_category(
        model, Category.POINT_TO_POINT
    )
