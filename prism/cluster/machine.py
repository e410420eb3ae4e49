"""The cluster, and what stopping, going on and failing costs on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

ROUNDING = 1e-9
#: seconds between checkpoints that are never written: finite, so that arithmetic stays so
NEVER = 1e300
DAY = 86_400.0
#: node failures of one job that are drawn; beyond these they repeat
FAILURES = 64


@dataclass(frozen=True)
class Cluster:
    """A GPU cluster that reallocates its GPUs every round, or at every event.

    Attributes
    ----------
    gpus : int
        GPUs in the cluster.
    rounds : int
        Number of rounds of `round_s`: the horizon, also where time goes by events.
    round_s : float
        Seconds between decisions.
    events : bool
        Decide at every arrival, end, failure and planned end instead.
    gpus_per_node : int
        How many nodes, and so failures, a job has.
    types : mapping of name to int, optional
        GPUs of each type (adding up to `gpus`); a job waits for those of its own.
    locality : float
        Factor on speed for each doubling of the nodes that a job spans; a type's nodes are filled compactly.

    Raises
    ------
    ValueError
        Numbers that no cluster has.
    """

    gpus: int
    rounds: int = 2000
    round_s: float = 300.0
    events: bool = False
    gpus_per_node: int = 8
    types: Mapping[str, int] = field(default_factory=dict)
    locality: float = 1.0

    def __post_init__(self) -> None:
        counts = (self.gpus, self.rounds, self.gpus_per_node)
        whole = all(isinstance(v, int | np.integer) for v in counts)
        if not whole or min(counts) < 1 or not 0 < self.round_s < np.inf:
            raise ValueError(
                f"{self}: gpus and rounds must be whole and positive, round_s positive and finite"
            )
        if not all(isinstance(v, int | np.integer) and v > 0 for v in self.types.values()):
            raise ValueError(f"types need whole positive numbers of GPUs, got {dict(self.types)}")
        if self.types and sum(self.types.values()) != self.gpus:
            raise ValueError(f"types have {sum(self.types.values())} GPUs, the cluster {self.gpus}")
        if not 0 < self.locality <= 1:
            raise ValueError(f"locality must lie in (0, 1], got {self.locality}")

    @property
    def horizon(self) -> float:
        """Seconds that are simulated."""
        return self.rounds * self.round_s

    def nodes(self, gpus: np.ndarray) -> np.ndarray:
        """Nodes that so many GPUs fill."""
        return np.ceil(gpus / self.gpus_per_node)

    def compactness(self, gpus: np.ndarray) -> np.ndarray:
        """Factor on speed by locality."""
        return self.locality ** np.ceil(np.log2(np.maximum(self.nodes(gpus), 1)))


def arena_cluster(rounds: int = 2000) -> Cluster:
    """The set-up of Arena and of the PRISM paper: 320 GPUs each of A100, V100, A40 and A10."""
    types = {"a100": 320, "v100": 320, "a40": 320, "a10": 320}
    return Cluster(1280, rounds, types=types)


@dataclass(frozen=True)
class Checkpoint:
    """Costs of checkpoints, restarts and node failures.

    A running job writes a checkpoint every `interval_s` of work (infinite: never), which stalls it for `write_s`. Whoever
    starts or resumes spends `restart_s` first. A job that a policy stops writes one more checkpoint and loses nothing (that
    write is charged when it resumes, since GPUs change hands between rounds), or, if `graceful` is false, goes on from its last
    one. A node fails `failures_per_node_day` times a day on average, and takes its job back to the last checkpoint.

    Defaults: 30 min, 30 s, 300 s, no failures. Published: 2.3e-3 to 6.5e-3 failures a node and day (Kokolis et al., HPCA
    2025), restarts from a minute to half an hour.

    Attributes
    ----------
    interval_s : float or "young-daly"
        ``sqrt(2 write_s M)`` with M the mean time to failure of the job's nodes (Young 1974, Daly 2006).
    """

    interval_s: float | str = 1800.0
    write_s: float = 30.0
    restart_s: float = 300.0
    graceful: bool = True
    failures_per_node_day: float = 0.0

    def __post_init__(self) -> None:
        optimal = self.interval_s == "young-daly"
        if not optimal and (isinstance(self.interval_s, str) or not self.interval_s > 0):
            raise ValueError(f"{self}: interval_s must be positive, or young-daly")
        if not (0 <= self.write_s < np.inf and 0 <= self.restart_s < np.inf):
            raise ValueError(f"{self}: costs must be finite and not negative")
        if not 0 <= self.failures_per_node_day < np.inf:
            raise ValueError(f"{self}: failures must be finite and not negative")
        if optimal and not (self.failures_per_node_day > 0 and self.write_s > 0):
            raise ValueError(f"{self}: young-daly needs failures and a cost of writing")

    def interval(self, nodes: np.ndarray) -> np.ndarray:
        """Work between checkpoints of jobs on so many nodes, s."""
        if self.interval_s != "young-daly":
            return np.full(np.shape(nodes), min(float(self.interval_s), NEVER))
        mean = DAY / (np.maximum(nodes, 1) * self.failures_per_node_day)
        return np.sqrt(2 * self.write_s * mean)

    def worked(self, at: np.ndarray, interval: np.ndarray) -> np.ndarray:
        """Work done by cycle time `at`: a cycle is `interval` of work and `write_s` of stall."""
        whole = self._cycles(at, interval)
        within = at - whole * (interval + self.write_s)
        return whole * interval + np.minimum(np.maximum(within, 0.0), interval)

    def unsaved(self, at: np.ndarray, interval: np.ndarray) -> np.ndarray:
        """Work since the last checkpoint that was written, s."""
        within = at - self._cycles(at, interval) * (interval + self.write_s)
        return np.minimum(np.maximum(within, 0.0), interval)

    def time_for(self, work: np.ndarray, interval: np.ndarray) -> np.ndarray:
        """Earliest cycle time by which `work` is done (inverse of `worked`)."""
        whole = np.maximum(np.ceil(work / interval - ROUNDING) - 1, 0)
        return work + whole * self.write_s

    def _cycles(self, at: np.ndarray, interval: np.ndarray) -> np.ndarray:
        # a cycle that is over but for rounding counts as over
        return np.floor(at / (interval + self.write_s) + ROUNDING)


@dataclass(frozen=True)
class Speed:
    """Relative speed of a job on more or fewer GPUs than it asked for.

    Attributes
    ----------
    factor, speed : tuple of float
        GPUs over those asked for, ascending, and speed over that with those; between them logarithms are interpolated.

    Examples
    --------
    >>> Speed()(np.array([0.5, 1.0, 2.0])).tolist()
    [0.55, 1.0, 1.8]
    """

    factor: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0)
    speed: tuple[float, ...] = (0.29, 0.55, 1.0, 1.8, 3.1)

    def __post_init__(self) -> None:
        f, s = np.asarray(self.factor, float), np.asarray(self.speed, float)
        if (
            f.shape != s.shape
            or f.size < 1
            or (f <= 0).any()
            or not ((s > 0) & np.isfinite(s)).all()
            or (np.diff(f) <= 0).any()
        ):
            raise ValueError(f"{self}: needs ascending positive factors with a positive speed each")
        if 1.0 not in self.factor or s[self.factor.index(1.0)] != 1.0:
            raise ValueError(f"{self}: speed is 1 at the GPUs that were asked for")

    def __call__(self, factor: np.ndarray) -> np.ndarray:
        f = np.log(np.maximum(factor, 1e-9))
        return np.exp(np.interp(f, np.log(self.factor), np.log(self.speed)))
