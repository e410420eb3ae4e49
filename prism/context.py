"""Who computes what, where: the three parts of a training job's context."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from prism.specs import Spec, read_spec

PerStage = Annotated[tuple[PositiveFloat, ...], Field(strict=False, min_length=1)]


class Workload(Spec):
    """One training step, as seconds of compute and bytes of communication.

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
    """Degrees of parallelism, microbatches per step and pipeline schedule."""

    dp: PositiveInt = 1
    pp: PositiveInt = 1
    microbatches: PositiveInt = 1
    schedule: Literal["1f1b", "gpipe"] = "1f1b"


class Link(Spec):
    """A kind of link: `bandwidth` in byte/s, `latency` in s, `cv` of the transfer time."""

    bandwidth: PositiveFloat
    latency: NonNegativeFloat
    cv: NonNegativeFloat = 0.0


class Topology(Spec):
    """Machines and what connects GPUs within and between them."""

    nodes: PositiveInt
    gpus_per_node: PositiveInt
    intra_node: Link
    inter_node: Link


class Context(Spec):
    """Workload, parallelism and topology of one job.

    Ranks are numbered with data parallelism fastest (``rank = stage * dp + replica``) and fill
    nodes in order.

    Raises
    ------
    SpecError, pydantic.ValidationError
        If the degrees do not multiply up to the GPUs, or stages have no times.

    Examples
    --------
    >>> link = Link(bandwidth=1e11, latency=1e-6)
    >>> Context(
    ...     workload=Workload(name="tiny", forward_s=[0.1], backward_s=[0.2], optimizer_s=0.01,
    ...                       activation_bytes=1e6, gradient_bytes=1e9),
    ...     parallelism=Parallelism(dp=2),
    ...     topology=Topology(nodes=1, gpus_per_node=2, intra_node=link, inter_node=link),
    ... ).node_of_rank
    (0, 0)
    """

    workload: Workload
    parallelism: Parallelism
    topology: Topology

    @model_validator(mode="after")
    def _consistent(self) -> Context:
        p, t, w = self.parallelism, self.topology, self.workload
        if p.dp * p.pp != t.nodes * t.gpus_per_node:
            raise ValueError(
                f"dp {p.dp} x pp {p.pp} = {p.dp * p.pp} ranks, but {t.nodes} nodes x "
                f"{t.gpus_per_node} GPUs = {t.nodes * t.gpus_per_node}; make them equal"
            )
        for field in ("forward_s", "backward_s"):
            n = len(getattr(w, field))
            if n != p.pp:
                raise ValueError(f"workload.{field} has {n} times for pp = {p.pp} stages")
        return self

    @property
    def node_of_rank(self) -> tuple[int, ...]:
        """Machine of each rank."""
        size = self.topology.nodes * self.topology.gpus_per_node
        return tuple(rank // self.topology.gpus_per_node for rank in range(size))

    def rank(self, stage: int, replica: int) -> int:
        """Rank of a pipeline stage in a data-parallel replica."""
        return stage * self.parallelism.dp + replica


def read_context(path: str | Path) -> Context:
    """Read a context from YAML. Raises `prism.specs.SpecError` with every fault in one line."""
    return read_spec(Context, path)
