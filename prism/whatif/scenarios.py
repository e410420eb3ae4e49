"""What-ifs: pure functions from a step model to a step model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import xarray as xr

from prism.base import schema, stats
from prism.measure.fleet import relative_pool
from prism.model.dag import WorkloadDAG
from prism.model.pools import DurationPool, Fixed, Scaled
from prism.model.signature import Category
from prism.model.step_model import StepModel

Scenario = Callable[[StepModel], StepModel]


def unchanged(model: StepModel) -> StepModel:
    """The reference scenario."""
    return model


@dataclass(frozen=True)
class Frozen:
    """Some components at their mean: what is left varies alone.

    Attributes
    ----------
    components : tuple of str
        Components of the model (`Signature.component`): ``compute``, ``host``, ``gap``, or roles of process
        groups such as ``tp``, ``dp``.

    Raises
    ------
    ValueError
        On call: a component that no op of the model belongs to.
    """

    components: tuple[str, ...]
    #: no error if the frozen components do not vary
    allows_no_effect = True

    def __call__(self, model: StepModel) -> StepModel:
        present = set(model.dag.component.tolist())
        absent = [c for c in self.components if c not in present]
        if absent:
            raise ValueError(
                f"no op is of component {', '.join(absent)}; the model has {', '.join(sorted(present))}"
            )
        still = np.isin(model.dag.component, self.components)
        pools = {
            key: Fixed(pool.mean) if key.signature.component in self.components else pool
            for key, pool in model.pools.items()
        }
        overrides = {
            (op, lane): Fixed(pool.mean) if still[op] else pool
            for (op, lane), pool in model.overrides.items()
        }
        return model.replace(pools=pools, overrides=overrides)


@dataclass(frozen=True)
class HotNode:
    """A machine, or several, as slow as the slow tail of the fleet, in compute and in inter-node traffic.

    Affects every compute op on `node` and every op in which it communicates with another node: once, however many hot
    nodes take part in it (two such scenarios one after the other would slow it twice). How
    slow is decided by a fleet-wide pool, not by the op's own pool, which knows nothing of bad nodes.

    Attributes
    ----------
    node : int or tuple of int
    at : float
        Quantile of the fleet that the node runs at.
    mode : {"scale", "pin"}
        ``scale`` multiplies the op's pool by the fleet's ``Q(at) / Q(1/2)`` and keeps its spread, so
        a hotter node never makes a step shorter. ``pin`` is the PRISM paper's form, the constant
        ``Q(at)`` of the fleet; it takes the op's variance away, and a constant in place of a random
        duration can lower a maximum and so *shorten* a step.
    fleet : Dataset of `read_fleet`, or DurationPool with mean 1, optional
        How devices differ. A Dataset brings its source along; a bare pool is an assumption, which makes the
        result synthetic. With a fleet, ``scale`` slows the whole node by one factor, and ``pin`` sets its compute. Without it, and for ``pin``
        of communication, the model's own fleet-wide pool of each signature is used. That one also
        holds what varies in *time*: an op that is 500 times slower in a few steps for everybody has
        a p95 / p50 of hundreds, which says nothing about nodes, so give `fleet` where you have it.
    kernel : str, optional
        Kernel of the fleet that stands for compute; its first if not given.

    Raises
    ------
    ValueError
        On call: no such node; no fleet-wide pool. On construction: `at` outside (0, 1).
    """

    node: int | tuple[int, ...]
    at: float = 0.95
    mode: Literal["scale", "pin"] = "scale"
    fleet: xr.Dataset | DurationPool | None = None
    kernel: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.at < 1:
            raise ValueError(f"at must lie strictly between 0 and 1, got {self.at}")
        if self.mode not in ("scale", "pin"):
            raise ValueError(f"mode must be 'scale' or 'pin', got {self.mode!r}")
        if self.node == ():
            raise ValueError("node needs at least one machine, none given")
        made_up = self.fleet is not None
        if isinstance(self.fleet, xr.Dataset):
            made_up = self.fleet.attrs["source"] == "synthetic"
            object.__setattr__(self, "fleet", relative_pool(self.fleet, self.kernel))
        object.__setattr__(self, "_made_up", made_up)

    def __call__(self, model: StepModel) -> StepModel:
        dag = model.dag
        is_compute = dag.is_compute[:, None]
        nodes = self.node if isinstance(self.node, tuple) else (self.node,)
        here = np.logical_or.reduce([dag.on_node(n) for n in nodes])
        affected = here & (is_compute | dag.crosses_nodes)
        factors: dict[int, float] = {}
        hot = model.override(affected, lambda op, pool: self._slowed(model, op, pool, factors))
        return hot.replace(source="synthetic") if self._made_up else hot

    def _slowed(
        self, model: StepModel, op: int, pool: DurationPool, factors: dict[int, float]
    ) -> DurationPool:
        if self.mode == "pin":
            return Fixed(self._pinned(model, op, pool))
        fleet = self.fleet if self.fleet is not None else model.fleet_pool(op)
        # thousands of ops share a fleet-wide pool, whose quantiles take longer than all else here
        if id(fleet) not in factors:
            nominal = float(fleet.quantile(0.5))
            factors[id(fleet)] = float(fleet.quantile(self.at)) / nominal if nominal > 0 else 1.0
        return Scaled(pool, factors[id(fleet)])

    def _pinned(self, model: StepModel, op: int, pool: DurationPool) -> float:
        signature = model.dag.signatures[model.dag.signature[op]]
        if self.fleet is not None and signature.category == Category.COMPUTE:
            return float(self.fleet.quantile(self.at)) * pool.mean
        return float(model.fleet_pool(op).quantile(self.at))


def stages_by_node(dag: WorkloadDAG) -> dict[int, str]:
    """The pipeline stages that each machine holds in replica 0, as a label, by machine.

    Stages that share a machine cannot be told apart by slowing it.

    Examples
    --------
    >>> from prism.model import DagBuilder
    >>> from prism.model import Signature
    >>> b = DagBuilder()
    >>> ops = [b.add(Signature("forward"), [rank], stage=rank) for rank in (0, 1, 2)]
    >>> stages_by_node(b.build(node_of_rank=[0, 0, 4]))
    {0: 'stage 0+1', 4: 'stage 2'}
    """
    stages: dict[int, list[int]] = {}
    for stage in np.unique(dag.stage[dag.stage >= 0]):
        ranks = dag.rank[(dag.stage == stage) & (dag.rank >= 0)]
        if ranks.size:
            stages.setdefault(int(dag.node_of_rank[ranks.min(), 0]), []).append(int(stage))
    return {node: f"stage {'+'.join(map(str, held))}" for node, held in stages.items()}


def increases(
    runs: xr.Dataset, reference: str, *, confidence: float = 0.95, seed: int = 0
) -> xr.Dataset:
    """Relative increase of p95 step time over a reference scenario, with paired intervals.

    Parameters
    ----------
    runs : Dataset of `sweep`
    reference : str
        The scenario to compare with.

    Returns
    -------
    Dataset
        ``increase(scenario)`` and ``increase_interval(scenario, ci_bound)``, dimensionless.
    """
    names = [str(s) for s in runs["scenario"].values if s != reference]
    base = runs["step_time"].sel(scenario=reference)
    found = np.array(
        [
            stats.increase(
                runs["step_time"].sel(scenario=s), base, confidence=confidence, seed=seed
            )
            for s in names
        ]
    )
    return schema.dataset(
        {
            "increase": ("scenario", found[:, 0]),
            "increase_interval": (("scenario", "ci_bound"), found[:, 1:]),
        },
        coords={"scenario": names, "ci_bound": ["lower", "upper"]},
        made_by="prism.whatif.increases",
        source=runs.attrs["source"],
        seed=seed,
        provenance={**schema.provenance(runs), "statistic": "p95", "reference": reference},
    )


class Compose:
    """Several scenarios at once, in their order.

    Parameters
    ----------
    *parts : scenarios

    Raises
    ------
    ValueError
        On call: where a part undoes what an earlier one did (pinning a link that was slowed, two datacenters over one
        cut): such a combination would say less than its name.

    Examples
    --------
    >>> both = Compose(HotNode(3), HotNode(5))
    """

    def __init__(self, *parts: Scenario) -> None:
        if not parts:
            raise ValueError("Compose needs at least one scenario, none given")
        self.parts = parts

    def __call__(self, model: StepModel) -> StepModel:
        done = model
        for i, part in enumerate(self.parts):
            after = part(done)
            undone = _undone(model, done, after, part) if i else 0
            if undone:
                raise ValueError(
                    f"part {i + 1} ({part!r}) undoes what came before on {undone} ops: put it first, or leave one out"
                )
            done = after
        return done


def _undone(model: StepModel, before: StepModel, after: StepModel, part: Scenario) -> int:
    """Ops that were changed, and now are as if they never had been."""
    alone = part(model)
    places = {*model.overrides, *before.overrides, *after.overrides, *alone.overrides}
    places |= {(op, -1) for op in range(model.dag.n_ops)}
    return sum(
        before.pool(*p) != model.pool(*p)
        and after.pool(*p) != before.pool(*p)
        and after.pool(*p) == alone.pool(*p)
        for p in places
    )
