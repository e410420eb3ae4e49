"""Overrun rules: the treatment of a job that outlives its estimate. The same for every estimator; only for policies that plan."""

from __future__ import annotations

from dataclasses import dataclass

OVERRUNS = {
    "clamp": "its planned remaining time stays 0: it keeps its place",
    "reestimate": "it is planned with the mean of what is left, given how long it has run",
    "demote": "it yields to everyone else from then on, and is stopped as a policy stops any job",
    "killable": "it runs on, planned with more time, until a waiting job that goes before it needs its GPUs; then it goes back to its last checkpoint",
    "requeue": "it is stopped there and then, goes back to its last checkpoint, and is given more time",
    "restart": "it is stopped there and then, begins anew, and is given more time",
}


@dataclass(frozen=True)
class Overrun:
    """Rule, and by how much a limit grows.

    Attributes
    ----------
    rule : str
        One of `OVERRUNS`. ``killable`` by default: it is what users of batch systems ask for, and what a cluster
        without it does by hand.
    growth : float
        Factor on the limit of a job that was stopped at it.
    """

    rule: str = "killable"
    growth: float = 1.5

    def __post_init__(self) -> None:
        if self.rule not in OVERRUNS:
            raise ValueError(f"overrun rule {self.rule!r} is not one of {', '.join(OVERRUNS)}")
        if not 1 < self.growth < float("inf"):
            raise ValueError(f"growth must be more than 1 and finite, got {self.growth}")
