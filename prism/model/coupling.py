"""Why ops of a step vary together: shared normal scores, and events that strike a kind of op at once.

Op i takes ``T_i(Phi(z))`` with ``z = sum_l a_l Z_l + sqrt(1 - sum_l a_l^2) e``: shared scores `Z_l`, own
noise `e`, all standard normal. A sum of squares of 1 keeps z standard normal, so for any loadings the
marginal distributions are exactly the pools. Scores exist per level and per class of op:

- ``step``: one for all ops of a class in a step (a hot step, a congested step);
- ``node``, ``rank``: one for each machine, each rank;
- ``microbatch``: one for each microbatch of a replica, shared by its forward and backward on all stages.

An op without some level (an optimizer has no microbatch, a collective no rank) gives that share to its
own noise. A loading has a part that is redrawn each step and one that stays with the job.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

LEVELS = ("step", "node", "rank", "microbatch")


@dataclass(frozen=True)
class Loading:
    """Loading of one level: `transient` is redrawn each step, `persistent` stays with the job.

    The variance share of the level is ``transient^2 + persistent^2``. The sign tells whether ops move
    with the shared score or against it.
    """

    transient: float = 0.0
    persistent: float = 0.0

    @property
    def share(self) -> float:
        """Share of the variance of the normal score."""
        return self.transient**2 + self.persistent**2


@dataclass(frozen=True)
class Coupling:
    """Loadings per op kind (`Signature.op`) and level, and joint events per op kind.

    Parameters
    ----------
    loadings : mapping of op kind to mapping of level to Loading (or to a transient loading)
    events : mapping of op kind to probability
        In that share of steps all ops of the kind take the upper tail of their pools together, of that
        same probability, and never otherwise: what Gaussian scores cannot do, since they have no tail
        dependence. The marginals stay as they are.
    event_scores : mapping of op kind to mapping of class to loading
        By how much an event goes with the step score of a class (`Signature.coupling_class`): it strikes where
        ``sum_c b_c Z_c + sqrt(1 - sum_c b_c^2) e`` is in its upper tail. Positive: rather in steps that are
        slow for the class, negative: in fast ones. Without it the event comes on its own.

    Raises
    ------
    ValueError
        Unknown level; squares that sum to more than 1; probabilities outside (0, 1); scores of an event
        that there is not.

    Examples
    --------
    >>> c = Coupling({"forward-compute": {"step": 0.6, "rank": Loading(persistent=0.7)}})
    >>> round(c.own("forward-compute"), 6)
    0.387298
    """

    loadings: Mapping[str, Mapping[str, Loading]] = field(default_factory=dict)
    events: Mapping[str, float] = field(default_factory=dict)
    event_scores: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checked = {}
        for kind, levels in self.loadings.items():
            unknown = set(levels) - set(LEVELS)
            if unknown:
                raise ValueError(
                    f"{kind}: unknown level {', '.join(sorted(unknown))}; one of {', '.join(LEVELS)}"
                )
            own = {k: v if isinstance(v, Loading) else Loading(float(v)) for k, v in levels.items()}
            total = sum(v.share for v in own.values())
            if not total <= 1 + 1e-12:  # also refuses NaN
                raise ValueError(
                    f"{kind}: squared loadings sum to {total:.4g}, so no correlation has them; "
                    "they must sum to 1 at most"
                )
            checked[kind] = MappingProxyType(own)
        for kind, p in self.events.items():
            if not 0 < p < 1:
                raise ValueError(
                    f"{kind}: the probability of its event must lie in (0, 1), got {p}"
                )
        object.__setattr__(self, "loadings", MappingProxyType(checked))
        object.__setattr__(self, "events", MappingProxyType(dict(self.events)))
        scores = {k: MappingProxyType(dict(v)) for k, v in self.event_scores.items() if v}
        for kind, classes in scores.items():
            if kind not in self.events:
                raise ValueError(f"{kind}: scores of an event that has no probability")
            total = sum(b * b for b in classes.values())
            if not total <= 1 + 1e-12:
                raise ValueError(
                    f"{kind}: squared loadings of its event sum to {total:.4g}; they must sum to 1 at most"
                )
        object.__setattr__(self, "event_scores", MappingProxyType(scores))

    def __reduce__(self):
        # read-only views of mappings cannot be sent to another process
        loadings = {kind: dict(levels) for kind, levels in self.loadings.items()}
        scores = {kind: dict(classes) for kind, classes in self.event_scores.items()}
        return Coupling, (loadings, dict(self.events), scores)

    @classmethod
    def independent(cls) -> Coupling:
        """No coupling: the assumption of the PRISM paper."""
        return cls()

    @property
    def is_independent(self) -> bool:
        """Whether ops share no score and no event."""
        shared = any(v.share > 0 for levels in self.loadings.values() for v in levels.values())
        return not shared and not self.events

    def own(self, kind: str) -> float:
        """Loading of an op's own noise when it has every level of its kind."""
        levels = self.loadings.get(kind, {})
        return math.sqrt(max(0.0, 1.0 - sum(v.share for v in levels.values())))
