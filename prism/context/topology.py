"""GPUs, links and how they are put together; presets with a source for each figure."""

from __future__ import annotations

from typing import Any

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from prism.base.presets import with_preset
from prism.base.specs import Spec


class Link(Spec):
    """A kind of link: `bandwidth` in byte/s and direction, `latency` in s, `cv` of the transfer time."""

    bandwidth: PositiveFloat
    latency: NonNegativeFloat
    cv: NonNegativeFloat = 0.0


class Gpu(Spec):
    """Peak rates of one GPU.

    Attributes
    ----------
    name : str
    peak_flops : float
        Dense matrix products of 16-bit numbers, FLOP/s.
    memory_bandwidth : float
        byte/s.
    memory : float
        bytes.
    """

    name: str
    peak_flops: PositiveFloat
    memory_bandwidth: PositiveFloat
    memory: PositiveFloat


class Efficiency(Spec):
    """Fractions of peak rates that are achieved: the constants that a calibration fits.

    Attributes
    ----------
    matmul : float
        Share of `Gpu.peak_flops` that a very large matrix product reaches.
    matmul_half : float
        FLOP at which a product reaches half of that: one of f FLOP takes ``(f + half) / (matmul peak)``,
        so half / (matmul peak) is what starting and filling the GPU costs.
    memory : float
        Share of `Gpu.memory_bandwidth` that element-wise kernels reach.
    network : float
        Share of links' bandwidth that collectives reach.
    """

    matmul: PositiveFloat = Field(default=0.75, le=1.0)
    matmul_half: NonNegativeFloat = 5e9
    memory: PositiveFloat = Field(default=0.8, le=1.0)
    network: PositiveFloat = Field(default=0.8, le=1.0)


class Topology(Spec):
    """Machines and what connects GPUs within and between them.

    Attributes
    ----------
    nodes, gpus_per_node : int
    intra_node, inter_node : Link
        In one direction: within a node of a GPU, between nodes of one network interface.
    nics_per_node : int, optional
        Where there are fewer network interfaces than GPUs, one for each by default.
    nodes_per_pod : int, optional
        Nodes below one layer of switches; all by default.
    oversubscription : float
        Between pods there is so much less bandwidth.
    rails : bool
        GPUs of the same place in their nodes share a switch of their own. Groups of such GPUs then stay in
        their rail and see no oversubscription.
    gpu : Gpu, optional
        Needed to compute durations from a model's shape.
    efficiency : Efficiency
        Links are taken at their word by default; presets say what collectives reach of them.
    """

    nodes: PositiveInt
    gpus_per_node: PositiveInt
    intra_node: Link
    inter_node: Link
    nics_per_node: PositiveInt | None = None
    nodes_per_pod: PositiveInt | None = None
    oversubscription: float = Field(default=1.0, ge=1.0)
    rails: bool = False
    gpu: Gpu | None = None
    efficiency: Efficiency = Efficiency(network=1.0)

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, given: Any) -> Any:
        return with_preset("topologies", given)

    @model_validator(mode="after")
    def _pods(self) -> Topology:
        if self.oversubscription > 1 and self.nodes_per_pod is None:
            raise ValueError("oversubscription is between pods: give nodes_per_pod")
        return self

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.gpus_per_node

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Topology:
        """A published machine, `nodes` of it; see `prism/presets/topologies.yaml`.

        Examples
        --------
        >>> Topology.preset("dgx-h100", nodes=4).gpus
        32
        """
        return cls.model_validate({"preset": name} | changes)
