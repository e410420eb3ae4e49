"""Workload of a model: layers and their sizes, parameters, FLOP and bytes."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from prism.base.presets import with_preset
from prism.base.specs import Spec

Widths = Annotated[tuple[PositiveInt, ...], Field(strict=False, min_length=2)]


class Workload(Spec):
    """A transformer, dense or a mixture of experts.

    Attributes
    ----------
    layers, hidden, ffn, heads : int
    kv_heads : int, optional
        Heads of keys and values; as many as heads by default.
    head_dim : int, optional
        hidden / heads by default.
    vocab, sequence : int
        Tokens known; tokens a sequence.
    gated : bool
        Whether the feed-forward has three matrices (SwiGLU) or two.
    tied_embeddings : bool
        Whether the output projection is the embedding.
    flash_attention : bool
        Whether attention scores stay in the GPU's registers (and masked ones are not computed) or go through
        memory.
    experts, experts_per_token : int
        Numbers for each feed-forward; 1 and 1 are a dense model.
    parameters_b : float, optional
        What the source says, 10^9.
    """

    layers: PositiveInt
    hidden: PositiveInt
    ffn: PositiveInt
    heads: PositiveInt
    vocab: PositiveInt
    sequence: PositiveInt
    kv_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    gated: bool = False
    tied_embeddings: bool = True
    flash_attention: bool = False
    experts: PositiveInt = 1
    experts_per_token: PositiveInt = 1
    parameters_b: PositiveFloat | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, given: Any) -> Any:
        return with_preset("workloads", given)

    @model_validator(mode="after")
    def _consistent(self) -> Workload:
        if self.head_dim is None and self.hidden % self.heads:
            raise ValueError(
                f"hidden {self.hidden} does not divide by {self.heads} heads; give head_dim"
            )
        if self.heads % self.keys:
            raise ValueError(f"heads {self.heads} does not divide by kv_heads {self.kv_heads}")
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"experts_per_token {self.experts_per_token} is over experts {self.experts}"
            )
        return self

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Workload:
        """A published model; see `prism/presets/workloads.yaml`.

        Examples
        --------
        >>> Workload.preset("llama3-70b").layers
        80
        """
        return cls.model_validate({"preset": name} | changes)

    @property
    def keys(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def width(self) -> int:
        """Width of one head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def attention_parameters(self) -> int:
        """Weights of one layer's attention."""
        return self.hidden * self.width * 2 * (self.heads + self.keys)

    @property
    def feed_forward_parameters(self) -> int:
        """Weights of one expert of a layer."""
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def embedding_parameters(self) -> int:
        """Weights of the embedding."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All weights; norms and biases, less than one in a thousand, left aside."""
        router = self.hidden * self.experts if self.experts > 1 else 0
        layer = self.attention_parameters + self.experts * self.feed_forward_parameters + router
        ends = self.embedding_parameters * (1 if self.tied_embeddings else 2)
        return self.layers * layer + ends

    @property
    def flops_per_token(self) -> float:
        """FLOP of one token's forward and backward, as papers count them: recomputation left out; attention scores
        in full (Narayanan et al. 2021), or with flash attention only those that are not masked."""
        active = self.attention_parameters + self.experts_per_token * self.feed_forward_parameters
        scores = (
            4 * self.sequence * self.heads * self.width * (0.5 if self.flash_attention else 1.0)
        )
        return 3 * (self.layers * (2 * active + scores) + 2 * self.embedding_parameters)


class Recommender(Spec):
    """A recommendation model in the shape of DLRM (Naumov et al. 2019): tables of embeddings spread over all
    ranks, dense layers on every rank.

    Attributes
    ----------
    tables, rows, dimension, pooling : int
        Embedding tables of so many rows and numbers each; rows that a sample adds up from each.
    bottom, top : tuple of int
        Widths of the dense layers before and after the interaction, the input's first.
    batch : int
        Samples on a rank.
    """

    tables: PositiveInt
    rows: PositiveInt
    dimension: PositiveInt
    pooling: PositiveInt
    bottom: Widths
    top: Widths
    batch: PositiveInt

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, given: Any) -> Any:
        return with_preset("workloads", given)

    @model_validator(mode="after")
    def _consistent(self) -> Recommender:
        if self.bottom[-1] != self.dimension:
            raise ValueError(
                f"the last of bottom, {self.bottom[-1]}, must be the dimension of embeddings, {self.dimension}"
            )
        return self

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Recommender:
        """A published model; see `prism/presets/workloads.yaml`.

        Examples
        --------
        >>> Recommender.preset("dlrm-mlperf").tables
        26
        """
        return cls.model_validate({"preset": name} | changes)

    @property
    def interaction_width(self) -> int:
        """Products of all pairs of embeddings and the dense features, and these features."""
        n = self.tables + 1
        return n * (n - 1) // 2 + self.dimension

    @property
    def dense_parameters(self) -> int:
        """Weights of the dense layers."""
        bottom = sum(a * b for a, b in pairwise(self.bottom))
        return bottom + sum(a * b for a, b in pairwise((self.interaction_width, *self.top)))
