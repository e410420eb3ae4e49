"""Fit of the coupling of measured steps, by variance components of normal scores.

Scores are ranks within an op's pool, turned normal: ``z = Phi^-1((rank - 1/2) / n)``, so what is fitted
does not depend on the shape of any distribution. Pairs of ops are sorted by what they share in a step
(nothing but the step, the node, the rank, the microbatch, both), and their mean products give moment
equations for the loadings: two ops of kinds k and k' that share levels L have

    E[z_i z_j] = sum_{l in L} a_kl a_k'l,

which is linear in the matrices ``a_l a_l'``. These come from weighted least squares over the kinds of
pairs, the loadings from their leading eigenvectors. Pairs in *different* steps give the persistent
parts. Standard errors by jackknife over blocks of steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import xarray as xr
from scipy import stats

from prism.base import schema
from prism.model.coupling import Coupling, Loading
from prism.model.dag import WorkloadDAG
from prism.model.pools import DurationPool
from prism.model.signature import PoolKey
from prism.traces.fitting.joint_events import event_scores, find_events, without_events
from prism.traces.measured_steps import MeasuredSteps

LEVELS = ("step", "node", "rank", "microbatch")
#: in which entries that no pair tells are filled from the others
ROUNDS = 20
#: a share below this many standard errors is taken for none; more would lose dependence that is there
SIGNIFICANT = 0.5


@dataclass(frozen=True, eq=False)
class CouplingFit:
    """A fitted coupling and what speaks for it.

    Attributes
    ----------
    coupling : Coupling
    shares : Dataset
        ``variance_share(signature, level, component)`` and its ``standard_error``, dimensionless:
        `signature` runs over op kinds, `component` over transient and persistent.
    tails : Dataset
        Per op kind with several series: ``tail_dependence``, the probability that a second series is
        in its upper tail given that the first is, ``gaussian_tail_dependence``, what the fitted scores
        would give, ``p_value`` of the difference, and ``event_probability`` with its interval where an
        event was fitted (else 0).
    """

    coupling: Coupling
    shares: xr.Dataset
    tails: xr.Dataset


def fit_coupling(
    measured: MeasuredSteps,
    pools: Mapping[PoolKey, DurationPool],
    *,
    blocks: int = 10,
    seed: int = 0,
    ops: np.ndarray | None = None,
) -> CouplingFit:
    """Fit loadings and joint events to measured steps.

    Parameters
    ----------
    measured : MeasuredSteps, at least `blocks` x 2 steps
    pools : mapping
        The pools of the model. An op's scores are taken within the pool that it resolves to; where
        that pool is shared by several ranks, what keeps them apart becomes a persistent loading; it takes
        several ops of the kind on a rank to see it.
    blocks : int
        Blocks of consecutive steps for the jackknife.
    seed : int
        Seed of the simulation that tests for events.
    ops : bool ndarray (op,), optional
        Ops that are looked at, all by default.

    Returns
    -------
    CouplingFit

    Raises
    ------
    ValueError
        With fewer than 2 steps a block.
    """
    dag, steps = measured.dag, measured.n_steps
    if steps < 2 * blocks:
        raise ValueError(
            f"needs at least {2 * blocks} steps for {blocks} jackknife blocks, got {steps}"
        )
    pool = _pool_of_op(dag, pools)
    duration = measured.duration.values.T
    varies = np.ptp(duration, axis=1) > 0
    if ops is not None:
        pool = np.where(ops, pool, pool.max() + 1)
        varies &= ops
    u = _probabilities(duration, pool)
    kinds = dag.kind
    classes = np.array([s.coupling_class for s in dag.signatures])[dag.signature]
    events, tails = find_events(u, kinds, varies, seed, duration)
    z = stats.norm.ppf(without_events(u, kinds, events))
    known = np.isfinite(z)
    z = _standardised(z, pool)
    fitted: dict[str, np.ndarray] = {}
    for name in dict.fromkeys(classes):
        own = np.flatnonzero((classes == name) & varies)
        if own.size:
            fitted |= _fit_class(dag, own, kinds[own], z[own], known[own], blocks)
    coupling = Coupling(
        {k: _loadings(a, se) for k, (a, se) in fitted.items()},
        {k: p for k, (p, _, _) in events.items()},
        event_scores(z[varies], classes[varies], kinds[varies], events),
    )
    return CouplingFit(coupling, _shares(fitted, measured), tails)


def _pool_of_op(dag: WorkloadDAG, pools: Mapping[PoolKey, DurationPool]) -> np.ndarray:
    """Number of the pool that each op resolves to, (op,)."""
    resolved = [
        next((k for k in (key, *key.parents()) if k in pools), key) for key in dag.pool_keys
    ]
    number = {k: i for i, k in enumerate(dict.fromkeys(resolved))}
    return np.array([number[k] for k in resolved])[dag.pool_key_of_op]


def _probabilities(duration: np.ndarray, pool: np.ndarray) -> np.ndarray:
    """Rank of each duration within its op's pool, as a probability, (op, step)."""
    u = np.full(duration.shape, 0.5)
    order = np.argsort(pool, kind="stable")
    for ops in np.split(order, np.flatnonzero(np.diff(pool[order])) + 1):
        ranks = stats.rankdata(duration[ops].ravel())
        u[ops] = ((ranks - 0.5) / ranks.size).reshape(ops.size, -1)
    return u


def _standardised(z: np.ndarray, pool: np.ndarray) -> np.ndarray:
    """Scores with mean square 1 in each pool (n mid-ranks have a little less); 0 where an event struck."""
    known = np.isfinite(z)
    z = np.where(known, z, 0.0)
    square = np.bincount(pool, np.sum(z**2, axis=1))
    square /= np.maximum(np.bincount(pool, known.sum(axis=1)), 1)
    return z / np.sqrt(np.where(square > 0, square, 1.0))[pool, None]


# loadings


def _fit_class(dag, ops, kinds, z, known, blocks) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Loadings (level, transient or persistent) and their shares' standard errors, by kind."""
    names = list(dict.fromkeys(map(str, kinds)))
    kind = np.array([names.index(k) for k in kinds])
    relations = _Relations(dag, ops, kind, len(names), z, known)
    whole = relations.loadings(np.ones(z.shape[1], bool))
    label = np.arange(z.shape[1]) * blocks // z.shape[1]
    left_out = np.array([relations.loadings(label != b) ** 2 for b in range(blocks)])
    deviation = left_out - left_out.mean(axis=0)
    error = np.sqrt((blocks - 1) / blocks * np.sum(deviation**2, axis=0))
    return {name: (whole[i], error[i]) for i, name in enumerate(names)}


class _Relations:
    """Products of scores between ops, by what the two share."""

    def __init__(
        self, dag, ops: np.ndarray, kind: np.ndarray, k: int, z: np.ndarray, known: np.ndarray
    ):
        n = ops.size
        rank, microbatch = dag.rank[ops], dag.microbatch[ops]
        # an op without a level shares it with nobody
        alone = -1 - np.arange(n)
        own_rank = np.where(rank >= 0, rank, alone)
        self.node = np.where(rank >= 0, dag.node_of_rank[np.maximum(rank, 0), 0], alone)
        self.mb = np.where(
            microbatch >= 0, dag.dp[ops] * (microbatch.max() + 1) + microbatch, alone
        )
        one_node = np.unique(self.node[rank >= 0]).size <= 1
        if one_node or np.unique(own_rank).size == np.unique(self.node).size:
            self.node = alone  # nodes tell nothing that the step or the rank does not
        self.kind, self.k, self.z = kind, k, z
        # steps that a kind is known in: an event strikes all its ops alike
        self.known = np.array([known[kind == i].all(axis=0) for i in range(k)], float)
        everything = np.zeros(n, np.int64)
        pair = [(everything, 0), (self.node, 1), (own_rank, 2)]
        self.sums = {}
        for i, (place, _) in enumerate(pair):
            self.sums[i, 0] = self._products(place)
            self.sums[i, 1] = self._products(_joint(place, self.mb))

    def _products(self, group: np.ndarray):
        """Per step, sums over groups of products of kinds' sums; the same for numbers of ops."""
        _, code = np.unique(group, return_inverse=True)
        flat = code * self.k + self.kind
        cells = (code.max() + 1) * self.k
        sums = np.zeros((cells, self.z.shape[1]))
        np.add.at(sums, flat, self.z)
        sums = sums.reshape(-1, self.k, self.z.shape[1])
        count = np.bincount(flat, minlength=cells).reshape(-1, self.k).astype(float)
        return sums, count

    def loadings(self, keep: np.ndarray) -> np.ndarray:
        """Loadings (kind, level, transient or persistent) from the steps to `keep`."""
        within, across = self._moments(keep)
        transient, known = _solve(*within)
        persistent, known_across = _solve(*across)
        # pairs in one step see both parts
        matrices = np.stack([transient - persistent, persistent], axis=1)
        matrices[0, 1] = 0.0  # what a job's steps share among all ops is in its pools
        seen = np.stack([known, known_across], axis=1)
        out = np.array(
            [[_leading(m, k) for m, k in zip(*level, strict=True)]
             for level in zip(matrices, seen, strict=True)]
        )  # fmt: skip
        out = np.moveaxis(out, -1, 0)
        total = np.sum(out**2, axis=(1, 2), keepdims=True)
        return out / np.sqrt(np.maximum(total, 1.0))

    def _moments(self, keep: np.ndarray):
        """Mean products and pair counts by relation, within a step and across steps."""
        steps = self.known[:, keep]
        together = np.maximum(steps @ steps.T, 1.0)
        apart = np.maximum(np.outer(steps.sum(axis=1), steps.sum(axis=1)) - together, 1.0)
        own = np.zeros((self.k, self.k))
        own[np.diag_indices(self.k)] = np.bincount(
            self.kind, np.sum(self.z[:, keep] ** 2, axis=1), minlength=self.k
        )
        by_op = self.z[:, keep].sum(axis=1) ** 2 - np.sum(self.z[:, keep] ** 2, axis=1)
        own_across = np.diag(np.bincount(self.kind, by_op, minlength=self.k))
        counts = np.diag(np.bincount(self.kind, minlength=self.k).astype(float))
        same, other, pairs = {}, {}, {}
        for key, (sums, count) in self.sums.items():
            part = sums[:, :, keep]
            total = part.sum(axis=2)
            step = np.einsum("gas,gbs->ab", part, part)
            same[key] = (step - own) / together
            # an op shares everything with itself, whether it has a level or not: leave it out
            other[key] = (total.T @ total - step - own_across) / apart
            pairs[key] = count.T @ count - counts
        number = _exactly(pairs)
        return (_exactly(same), number), (_exactly(other), number)


def _exactly(at_least: dict) -> dict:
    """From sums over pairs that share at least something to those that share exactly that."""
    out = {}
    for i in range(3):
        for m in range(2):
            value = at_least[i, m].copy()
            if i < 2:
                value -= at_least[i + 1, m]
            if m < 1:
                value -= at_least[i, 1] - (at_least[i + 1, 1] if i < 2 else 0.0)
            out[i, m] = value
    return out


def _solve(sums: dict, pairs: dict) -> tuple[np.ndarray, np.ndarray]:
    """Least squares for the level matrices (level, kind, kind), weighted by numbers of pairs; and which of
    their entries any pair tells something about."""
    k = next(iter(sums.values())).shape[0]
    # relation (place, microbatch): which levels it shares
    shared = {
        (i, m): np.array([1.0, float(i >= 1), float(i >= 2), float(m)])
        for i in range(3)
        for m in range(2)
    }
    out = np.zeros((len(LEVELS), k, k))
    known = np.zeros((len(LEVELS), k, k), bool)
    for a in range(k):
        for b in range(k):
            rows = [key for key in shared if pairs[key][a, b] > 0.5]
            if not rows:
                continue
            design = np.array([shared[key] for key in rows])
            mean = np.array([sums[key][a, b] / pairs[key][a, b] for key in rows])
            weight = np.sqrt([pairs[key][a, b] for key in rows])[:, None]
            used = _separable(tuple(map(tuple, design.tolist())))
            solution = np.linalg.lstsq(weight * design[:, used], weight[:, 0] * mean, rcond=None)[0]
            out[used, a, b] = solution
            known[used, a, b] = True
    return (out + np.swapaxes(out, 1, 2)) / 2, known


@cache
def _separable(design: tuple[tuple[float, ...], ...]) -> list[int]:
    """Levels that these kinds of pairs can tell apart: of two that always come together, the first."""
    rows = np.array(design)
    used: list[int] = []
    for level in (0, 2, 3, 1):  # a node is the last explanation to take
        if np.linalg.matrix_rank(rows[:, [*used, level]]) > len(used):
            used.append(level)
    return used


def _leading(matrix: np.ndarray, known: np.ndarray) -> np.ndarray:
    """The vector a whose outer product is nearest to a symmetric matrix (0 if that is negative).

    A kind of which no two ops share the level says nothing about its own entry on the diagonal: that takes
    the kind's largest entry with another (Thurstone's estimate of a communality; iterating it would let
    noise run to 1). Two kinds that never meet say nothing about theirs: it follows from a itself.
    """
    if not known.any():
        return np.zeros(matrix.shape[0])
    filled = np.where(known, matrix, 0.0)
    diagonal = np.diag_indices_from(filled)
    strongest = np.abs(filled - np.diag(filled[diagonal])).max(axis=1)
    filled[diagonal] = np.where(known[diagonal], filled[diagonal], np.minimum(strongest, 1.0))
    meet = known.copy()
    meet[diagonal] = True
    a = np.zeros(matrix.shape[0])
    for _ in range(1 if meet.all() else ROUNDS):
        values, vectors = np.linalg.eigh(filled)
        if values[-1] <= 0:
            return np.zeros(matrix.shape[0])
        a = np.sqrt(values[-1]) * vectors[:, -1]
        a = a if a.sum() >= 0 else -a
        filled = np.where(meet, filled, np.outer(np.clip(a, -1, 1), np.clip(a, -1, 1)))
    return a


def _joint(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """One code for equal pairs; an op that lacks either level (negative) stays alone."""
    _, code = np.unique(np.stack([a, b]), axis=1, return_inverse=True)
    return np.where((a < 0) | (b < 0), -1 - np.arange(a.size), code)


def _loadings(a: np.ndarray, error: np.ndarray) -> dict[str, Loading]:
    """Significant loadings of one kind; `a` and the errors of its squares are (level, part)."""
    clear = a**2 > SIGNIFICANT * error
    kept = np.where(clear, a, 0.0)
    return {
        level: Loading(float(t), float(p))
        for level, (t, p) in zip(LEVELS, kept, strict=True)
        if t != 0.0 or p != 0.0
    }


def _shares(fitted: Mapping, measured: MeasuredSteps) -> xr.Dataset:
    shape = (len(fitted), len(LEVELS), 2)
    a = np.array([v[0] for v in fitted.values()]).reshape(shape)
    error = np.array([v[1] for v in fitted.values()]).reshape(shape)
    dims = ("signature", "level", "component")
    return schema.dataset(
        {"variance_share": (dims, a**2), "standard_error": (dims, error)},
        coords={
            "signature": np.array(list(fitted), dtype="U"),
            "level": list(LEVELS),
            "component": ["transient", "persistent"],
        },
        made_by="prism.traces.fit_coupling",
        source=measured.source,
    )
