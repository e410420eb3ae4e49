"""Scenarios of things that get worse: nodes, GPUs, links, datacenters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from prism.model import StepModel
from prism.pools import DurationPool, LogNormal, Scaled
from prism.signature import Category


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
    may_be_idle = True

    def __post_init__(self) -> None:
        _check_factors(self.factor)

    def __call__(self, model: StepModel) -> StepModel:
        dag = model.dag
        compute = _of_category(model, Category.COMPUTE)[:, None]
        for factor in sorted({f for f in self.factor.values() if f != 1.0}):
            chosen = np.zeros((dag.n_ops, dag.lanes), bool)
            for node in (n for n, f in self.factor.items() if f == factor):
                chosen |= dag.on_node(node) & compute
            if chosen.any():
                model = model.override(chosen, lambda _, pool, f=factor: Scaled(pool, f))
        return model


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
        On call: a rank or replica that the model does not have.
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
        if not 0 <= self.replica < dag.lanes:
            raise ValueError(f"replica {self.replica}: there are {dag.lanes}")
        lanes = np.arange(dag.lanes) == self.replica
        return model.override(here[:, None] & lanes, lambda _, pool: Scaled(pool, self.factor))


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
        _check_factors({0: self.factor})

    def __call__(self, model: StepModel) -> StepModel:
        dag = model.dag
        if self.between is None:
            chosen = dag.is_inter_node & ~_of_category(model, Category.COMPUTE)
        else:
            chosen = _transfers(model, [self.between])
        if self.role is not None:
            chosen &= np.array([s.role == self.role for s in dag.signatures])[dag.signature]
        if not chosen.any():
            what = (
                f"between stages {self.between[0]} and {self.between[1]}"
                if self.between
                else "between nodes"
            )
            raise ValueError(
                f"no communication {what}" + (f" of role {self.role}" if self.role else "")
            )
        return model.override(chosen, lambda _, pool: Scaled(pool, self.factor))


@dataclass(frozen=True)
class CrossDatacenter:
    """A pipeline split over two datacenters: transfers across the cut take a long link.

    Attributes
    ----------
    after : int
        The last stage of the first datacenter.
    bandwidth : float
        byte/s of one transfer.
    latency : float
        Seconds.
    message : float
        Bytes of a transfer.
    jitter : float
        Coefficient of variation of the time that a transfer takes, LogNormal.

    Raises
    ------
    ValueError
        On call: no transfer crosses the cut.
    """

    after: int
    bandwidth: float
    latency: float
    message: float
    jitter: float = 0.0

    def __post_init__(self) -> None:
        for name in ("bandwidth", "message"):
            _check_factors({name: getattr(self, name)})
        if self.latency < 0 or self.jitter < 0:
            raise ValueError("latency and jitter must not be negative")

    def __call__(self, model: StepModel) -> StepModel:
        chosen = _transfers(model, [(self.after, self.after + 1)])
        if not chosen.any():
            raise ValueError(
                f"no transfer crosses between stages {self.after} and {self.after + 1}"
            )
        mean = self.latency + self.message / self.bandwidth
        pool: DurationPool = LogNormal.from_moments(mean, max(self.jitter, 1e-9))
        return model.override(chosen, lambda _op, _pool: pool)


def _check_factors(factor: Mapping) -> None:
    bad = [f"{k}: {v}" for k, v in factor.items() if not (np.isfinite(v) and v > 0)]
    if bad:
        raise ValueError(f"must be positive and finite, got {', '.join(bad)}")


def _of_category(model: StepModel, category: Category) -> np.ndarray:
    """Ops of a category, bool (op,)."""
    dag = model.dag
    return np.array([s.category == category for s in dag.signatures])[dag.signature]


def _transfers(model: StepModel, pairs: Sequence[tuple[int, int]]) -> np.ndarray:
    """Point-to-point ops between pairs of stages in either direction, bool (op,)."""
    links = {f"stage {a}->{b}" for x, y in pairs for a, b in ((x, y), (y, x))}
    dag = model.dag
    sites = np.array([s in links for s in dag.sites])[dag.site]
    return sites & _of_category(model, Category.POINT_TO_POINT)
