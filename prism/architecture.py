"""What a model is made of: layers and their sizes, parameters, FLOP and bytes."""

from __future__ import annotations

from typing import Any

from pydantic import PositiveFloat, PositiveInt, model_validator

from prism.hardware import with_preset
from prism.specs import Spec


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
        Of each feed-forward; 1 and 1 are a dense model.
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
