"""Context of a training job: workload, parallelism, topology and assumed variability."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from prism.base.presets import presets
from prism.base.specs import Spec, read_spec
from prism.context.topology import Gpu, Link, Topology
from prism.context.workload import Recommender, Workload
from prism.model.schedules import SCHEDULES, Schedule, read_schedule

__all__ = [
    "Context",
    "Gpu",
    "Link",
    "Parallelism",
    "Recommender",
    "StageTimes",
    "Topology",
    "Variability",
    "Workload",
    "read_context",
]

#: ops of a stage times stages, and ranks that hold the same weights, up to which a graph is built
LARGEST_SCHEDULE, LARGEST_LANES = 1_000_000, 1 << 17
PerStage = Annotated[tuple[PositiveFloat, ...], Field(strict=False, min_length=1)]


class StageTimes(Spec):
    """One training step as seconds of compute and bytes of communication, for a model known by its times.

    Attributes
    ----------
    name : str
    forward_s, backward_s : tuple of float (pp,)
        Mean time of one microbatch on one stage, seconds.
    optimizer_s : float
        Mean time of the optimizer on one rank, seconds.
    activation_bytes : float
        Bytes that one microbatch sends from stage to stage.
    gradient_bytes : float
        Bytes of gradients per rank that data parallelism reduces.
    """

    name: str
    forward_s: PerStage
    backward_s: PerStage
    optimizer_s: PositiveFloat
    activation_bytes: PositiveFloat
    gradient_bytes: PositiveFloat


class Parallelism(Spec):
    """Degrees of parallelism, microbatches of a step, pipeline schedule and what is kept or recomputed.

    Attributes
    ----------
    dp, tp, pp, cp, ep : int
        Data, tensor, pipeline, context and expert parallel. Expert parallelism takes its ranks from the
        data- and context-parallel ones.
    microbatches, microbatch_size : int
        A step and replica; sequences in each.
    schedule : str
        One of `prism.model.schedules.SCHEDULES`, or a file in torch's form (``.csv``, `prism.model.schedules.read_schedule`).
    chunks : int, optional
        Virtual stages a rank, where the schedule has several; 2 then by default.
    sequence_parallel : bool
        Whether norms and residuals are split over tensor-parallel ranks too.
    zero : {0, 1, 2, 3}
        What replicas share out: nothing, optimizer state, gradients too, weights too (ZeRO, Rajbhandari et al.
        2020; 3 is fully sharded data parallel).
    shard : int, optional
        Replicas among which they are shared out, all by default; fewer is hybrid sharding (HSDP).
    recompute : {"none", "selective", "full"}
        Nothing, attention scores, or whole layers in the backward (Korthikanti et al. 2022).
    overlap_gradients : bool
        Whether gradients are reduced layer by layer beside the last backward, or at its end.
    fold_tp : bool
        Whether tensor-parallel ranks, which do the same between two collectives, are one op that stands for
        all of them, or written out.
    """

    dp: PositiveInt = 1
    tp: PositiveInt = 1
    pp: PositiveInt = 1
    cp: PositiveInt = 1
    ep: PositiveInt = 1
    microbatches: PositiveInt = 1
    microbatch_size: PositiveInt = 1
    schedule: str = "1f1b"
    chunks: PositiveInt | None = None
    sequence_parallel: bool = False
    zero: Literal[0, 1, 2, 3] = 0
    shard: PositiveInt | None = None
    recompute: Literal["none", "selective", "full"] = "none"
    overlap_gradients: bool = True
    fold_tp: bool = True

    @model_validator(mode="after")
    def _consistent(self) -> Parallelism:
        if self.schedule not in SCHEDULES and not self.schedule.endswith(".csv"):
            raise ValueError(f"schedule: {self.schedule!r} is not one of {', '.join(SCHEDULES)}")
        if self.pp * self.microbatches > LARGEST_SCHEDULE or self.lanes > LARGEST_LANES:
            raise ValueError(
                f"pp x microbatches is {self.pp * self.microbatches} and dp x cp {self.lanes}; steps are built up to "
                f"{LARGEST_SCHEDULE} and {LARGEST_LANES}"
            )
        if self.lanes % self.ep:
            fit = [e for e in range(1, self.lanes + 1) if self.lanes % e == 0]
            raise ValueError(
                f"ep {self.ep} does not divide dp x cp = {self.lanes}; {', '.join(map(str, fit[:12]))} do"
            )
        if self.shard is not None and (self.zero == 0 or self.lanes % self.shard):
            raise ValueError(
                f"shard {self.shard} needs zero 1, 2 or 3 and to divide dp x cp = {self.lanes}"
            )
        self.plan  # noqa: B018  an impossible schedule is refused here
        return self

    @property
    def lanes(self) -> int:
        """Ranks that hold the same weights: data- times context-parallel."""
        return self.dp * self.cp

    @property
    def plan(self) -> Schedule:
        """The schedule's ops."""
        return _plan(self.schedule, self.pp, self.microbatches, self.chunks)


@cache
def _plan(schedule: str, pp: int, microbatches: int, chunks: int | None) -> Schedule:
    if not schedule.endswith(".csv"):
        sizes = {} if chunks is None else {"chunks": chunks}
        return SCHEDULES[schedule](pp, microbatches, **sizes)
    read = read_schedule(schedule)
    if (len(read.ranks), read.microbatches) != (pp, microbatches):
        raise ValueError(
            f"{schedule}: {len(read.ranks)} ranks and {read.microbatches} microbatches; "
            f"pp is {pp}, microbatches {microbatches}"
        )
    return read


Share = Annotated[float, Field(ge=-1.0, le=1.0)]


class Variability(Spec):
    """Assumed variability, used until a measured fleet is given.

    Attributes
    ----------
    compute_cv : float
        Coefficient of variation of compute, LogNormal. That of transfers belongs to the links.
    step, node, rank, microbatch : float
        What compute ops that share these have in common: loadings of their scores (`prism.Coupling`).
    communication_step : float
        The same for all transfers of a step.
    """

    compute_cv: NonNegativeFloat = 0.0
    step: Share = 0.0
    node: Share = 0.0
    rank: Share = 0.0
    microbatch: Share = 0.0
    communication_step: Share = 0.0

    @model_validator(mode="after")
    def _at_most_one(self) -> Variability:
        total = self.step**2 + self.node**2 + self.rank**2 + self.microbatch**2
        if total > 1.0:
            raise ValueError(
                f"squares of step, node, rank and microbatch add up to {total:.3g}, over 1"
            )
        return self


def _workload(given: Any) -> Any:
    """Stage times or a model's shape, by what is there."""
    if isinstance(given, StageTimes | Recommender | Workload):
        return given
    if not isinstance(given, dict):
        raise ValueError(f"needs keys, such as {{preset: llama3-8b}}, got {given!r}")
    fields = set(given) | set(presets("workloads").get(str(given.get("preset")), ()))
    kind = StageTimes if "forward_s" in fields else Recommender if "tables" in fields else Workload
    return kind.model_validate(given)


class Context(Spec):
    """Workload, parallelism and topology of one job, and how it is thought to vary.

    Ranks count tensor parallel fastest, then context, data and pipeline
    (``rank = ((stage dp + replica) cp + part) tp + slice``), and fill nodes in order.

    Raises
    ------
    SpecError, pydantic.ValidationError
        Degrees that do not multiply up to the GPUs, sizes that do not divide, each with what would do.

    Examples
    --------
    >>> ctx = Context(
    ...     workload=Workload.preset("llama3-70b"),
    ...     parallelism=Parallelism(dp=2, tp=8, pp=4, microbatches=8),
    ...     topology=Topology.preset("dgx-h100", nodes=8),
    ... )
    >>> ctx.layers_of_stage
    (20, 20, 20, 20)
    """

    workload: Annotated[StageTimes | Recommender | Workload, BeforeValidator(_workload)]
    parallelism: Parallelism
    topology: Topology
    variability: Variability = Variability()

    @model_validator(mode="after")
    def _consistent(self) -> Context:
        p, t = self.parallelism, self.topology
        degrees = {"dp": p.dp, "tp": p.tp, "pp": p.pp, "cp": p.cp}
        ranks = p.lanes * p.tp * p.pp
        if ranks != t.gpus:
            shown = " x ".join(f"{k} {v}" for k, v in degrees.items() if v > 1 or k in ("dp", "pp"))
            raise ValueError(
                f"{shown} = {ranks} ranks, but {t.nodes} nodes x {t.gpus_per_node} GPUs = {t.gpus}; "
                "make them equal"
            )
        if isinstance(self.workload, StageTimes):
            self._check_times()
        elif t.gpu is None:
            raise ValueError(
                "topology.gpu is missing; a model's shape needs it (or a topology preset)"
            )
        elif isinstance(self.workload, Recommender):
            if (p.tp, p.cp, p.ep, p.pp, p.zero) != (1, 1, 1, 1, 0):
                raise ValueError(
                    "a recommender spreads its tables over dp; tp, cp, ep, pp are 1, zero is 0"
                )
        else:
            self._check_shape()
        return self

    def _check_times(self) -> None:
        p = self.parallelism
        if (p.tp, p.cp, p.ep) != (1, 1, 1):
            raise ValueError(
                "stage times know nothing of tp, cp and ep; give a model's shape instead"
            )
        if p.zero:
            raise ValueError("stage times know nothing of zero; give a model's shape instead")
        for field in ("forward_s", "backward_s"):
            n = len(getattr(self.workload, field))
            if n != p.plan.stages:
                raise ValueError(f"workload.{field} has {n} times for pp = {p.plan.stages} stages")

    def _check_shape(self) -> None:
        w, p, t = self.workload, self.parallelism, self.topology
        for name, whole in (("heads", w.heads), ("ffn", w.ffn)):
            if whole % p.tp:
                fit = [n for n in (1, 2, 4, 8, 16, 32) if whole % n == 0]
                raise ValueError(
                    f"{name} {whole} does not divide by tp {p.tp}; {', '.join(map(str, fit))} do"
                )
        if w.keys % p.tp and p.tp % w.keys:
            raise ValueError(f"{w.keys} heads of keys and tp {p.tp}: one has to divide the other")
        if t.gpus_per_node % p.tp and p.fold_tp and p.tp > 1:
            raise ValueError(
                f"tp {p.tp} does not fill nodes of {t.gpus_per_node} GPUs, so that its groups differ: set fold_tp to false"
            )
        if w.sequence % p.cp:
            raise ValueError(f"a sequence of {w.sequence} does not divide by cp {p.cp}")
        if p.ep > 1 and w.experts % p.ep:
            raise ValueError(f"{w.experts} experts do not divide by ep {p.ep}")
        self.layers_of_stage  # noqa: B018
        if p.tp > t.gpus_per_node and p.fold_tp:
            raise ValueError(
                f"tp {p.tp} spans nodes of {t.gpus_per_node} GPUs: set fold_tp to false, its ranks differ"
            )

    @property
    def layers_of_stage(self) -> tuple[int, ...]:
        """Layers of each virtual stage: all alike, or one less at both ends, where the embedding and the
        output projection count as one each (Llama 3 report, section 3.3.2)."""
        layers, stages = self.workload.layers, self.parallelism.plan.stages
        if layers % stages == 0:
            return (layers // stages,) * stages
        if (layers + 2) % stages == 0 and stages > 1:
            each = (layers + 2) // stages
            return (each - 1, *(each,) * (stages - 2), each - 1)
        fit = [s for s in range(1, layers + 3) if layers % s == 0 or (layers + 2) % s == 0]
        near = sorted(sorted(fit, key=lambda s: abs(s - stages))[:6])
        raise ValueError(
            f"{layers} layers (or {layers + 2} with embedding and output) do not divide by {stages} virtual "
            f"stages; {', '.join(map(str, near))} do"
        )

    def with_parallelism(self, **changes: Any) -> Context:
        """The same job, parallel in another way, checked anew.

        Examples
        --------
        >>> ctx = Context(
        ...     workload=Workload.preset("llama3-70b"),
        ...     parallelism=Parallelism(dp=2, tp=8, pp=4, microbatches=8),
        ...     topology=Topology.preset("dgx-h100", nodes=8),
        ... )
        >>> ctx.with_parallelism(schedule="zbv").parallelism.schedule
        'zbv'
        """
        parallelism = Parallelism.model_validate(self.parallelism.model_dump() | changes)
        return Context(
            workload=self.workload,
            parallelism=parallelism,
            topology=self.topology,
            variability=self.variability,
        )

    @property
    def node_of_rank(self) -> tuple[int, ...]:
        """Machine of each rank."""
        return tuple(rank // self.topology.gpus_per_node for rank in range(self.topology.gpus))

    def rank(self, stage: int, lane: int = 0, tp: int = 0) -> int:
        """Rank of a pipeline stage, of a data- and context-parallel lane, of a tensor-parallel slice."""
        p = self.parallelism
        return (stage * p.lanes + lane) * p.tp + tp


def read_context(path: str | Path) -> Context:
    """Read a context from YAML. Raises `prism.base.specs.SpecError` with every fault in one line."""
    return read_spec(Context, path)
