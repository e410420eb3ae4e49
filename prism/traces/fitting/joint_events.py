"""Joint events: kinds of op whose series are slow together in a few steps, beyond what Gaussian scores of
the same correlation would show.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import xarray as xr
from scipy import stats

from prism.base import schema

#: tails up to this share of the steps are searched for joint events
LARGEST_EVENT = 0.12
#: of each trial: no one in 400 of the reference may be as dependent
EVENT_LEVEL = 0.004
#: where the tail lies apart, its size is given by that and not searched for: one trial, the usual level
APART_LEVEL = 0.05
MOSTLY = 0.6
#: several tails are tried, and each trial is one more chance to be fooled: ask for a clear excess
LEAST_EXCESS = 0.3
#: series whose correlations the reference of a test simulates
LARGEST_NULL = 16
#: a tail lies apart from the rest if it is so many times as long
APART = 2.0
#: standard errors from which a class's score in struck steps is taken to differ
CLEAR = 2.0
#: a class whose ops have less than this in common has no step score to go with
LEAST_RELIABLE = 0.1
#: an event keeps so much of its own score
LARGEST_SHARE = 0.95


def find_events(
    u: np.ndarray,
    kinds: np.ndarray,
    varies: np.ndarray,
    seed: int,
    duration: np.ndarray | None = None,
):
    """Kinds whose series are slow together in a few steps, beyond what Gaussian scores allow.

    Parameters
    ----------
    u : ndarray (op, step)
        Probabilities of durations within their pools.
    kinds, varies : ndarray (op,)
    seed : int
    duration : ndarray (op, step), optional
        Where it is given, a tail that lies far from the rest (`APART`) is tested against the correlation
        of the rest.

    Returns the events as kind -> (probability, struck steps, number of steps), and the table of tails.
    """
    rng = np.random.default_rng(seed)
    n = u.shape[1]
    events, rows = {}, {}
    for kind in dict.fromkeys(map(str, kinds)):
        ops = np.flatnonzero((kinds == kind) & varies)
        if ops.size < 2:
            continue
        tested = [
            _tail(u[ops], size, rng, apart=duration is not None and _apart(duration[ops], size))
            for size in _sizes(u[ops])
        ]
        # of the least p-values, which are often all the least that there is, the most steps that coincide
        best = min(tested, key=lambda t: (t["p_value"], -t["size"] * _excess(t)))
        excess = _excess(best)
        strikes = (
            best["p_value"] <= (APART_LEVEL if best["apart"] else EVENT_LEVEL)
            and best["tail_dependence"] > MOSTLY
            and excess > LEAST_EXCESS
        )
        p = best["size"] / n if strikes else 0.0
        if strikes:
            struck = np.mean(u[ops] > 1 - (best["size"] + 0.25) / n, axis=0) > 0.5
            if struck.any() and not struck.all():
                p = float(struck.mean())
                events[kind] = (p, struck, n)
            else:
                p = 0.0
        rows[kind] = best | {"event_probability": p}
    return events, _tail_table(rows, n)


def _excess(tail: Mapping[str, float]) -> float:
    return tail["tail_dependence"] - tail["gaussian_tail_dependence"]


def _sizes(u: np.ndarray) -> list[int]:
    """Tails to test: one of 5 % in any case, and those whose steps coincide in most series."""
    n = u.shape[1]
    largest = max(1, int(LARGEST_EVENT * n))
    usual = min(largest, max(1, round(0.05 * n)))
    grid = np.unique(np.geomspace(1, largest, 16).round().astype(int))
    alike = [int(k) for k in grid if _dependence(u > 1 - (k + 0.25) / n, int(k)) > MOSTLY]
    return sorted({usual, *alike})


def _apart(duration: np.ndarray, size: int) -> bool:
    """Tell whether the upper `size` values lie far above the others, in most series."""
    ordered = np.sort(duration, axis=1)
    return bool(np.mean(ordered[:, -size] > APART * ordered[:, -size - 1]) > MOSTLY)


def _tail(
    u: np.ndarray, size: int, rng: np.random.Generator, *, apart: bool, trials: int = 400
) -> dict[str, float]:
    """Tail dependence at the upper `size` of n steps, against series with Gaussian dependence.

    The reference has each pair's correlation over all steps. An event inflates these, which makes the test
    conservative; leaving the tail out would make the reference too weak, and invent events. A tail that lies
    apart from the rest is no tail of one distribution: then the correlations are those of the rest.
    """
    u = u[_spread_out(u.shape[0])]
    n = u.shape[1]
    seen = _dependence(u > 1 - (size + 0.25) / n, size)
    rest = ~(u > 1 - (size + 0.25) / n).any(axis=0)
    alike = _correlations(u[:, rest] if apart and rest.sum() >= 10 else u)
    values, vectors = np.linalg.eigh(alike)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    expected = np.empty(trials)
    for t in range(trials):
        g = root @ rng.standard_normal((u.shape[0], n))
        top = g >= np.partition(g, n - size, axis=1)[:, n - size, None]
        expected[t] = _dependence(top, size)
    return {
        "size": size,
        "apart": apart,
        "tail_dependence": seen,
        "gaussian_tail_dependence": float(expected.mean()),
        "p_value": float((1 + np.sum(expected >= seen)) / (trials + 1)),
    }


def _spread_out(m: int) -> np.ndarray:
    """So many of m series that their correlations can be simulated, evenly among them."""
    return np.unique(np.linspace(0, m - 1, min(m, LARGEST_NULL)).round().astype(int))


def _correlations(u: np.ndarray) -> np.ndarray:
    """Correlations between the normal scores of series, (series, series)."""
    rank = np.argsort(np.argsort(u, axis=1), axis=1)
    return np.corrcoef(stats.norm.ppf((rank + 0.5) / u.shape[1]))


def _correlation(z: np.ndarray) -> float:
    """Mean correlation between standardised series, (series, step), not below 0."""
    m = z.shape[0]
    return float(np.clip((np.mean(z.sum(axis=0) ** 2) - m) / (m * (m - 1)), 0.0, 0.999))


def event_scores(
    z: np.ndarray, classes: np.ndarray, kinds: np.ndarray, events: Mapping
) -> dict[str, dict[str, float]]:
    """Loadings of events on the step scores of classes, where steps that are struck differ clearly.

    A class's step score is estimated by the mean score of its ops, standardised over steps; what these do
    not have in common dilutes it, which is undone. If the event has probability p and loads the score by b,
    its mean in struck steps is ``b phi(z_p) / p``. The event's own class is left out: going with it would
    move its pools. On few struck steps only strong loadings are clear, and those come out too strong.

    Parameters
    ----------
    z : ndarray (op, step)
        Normal scores, 0 where an event struck the op itself.
    classes, kinds : ndarray (op,)
    events : mapping of kind to (probability, struck steps, number of steps)
    """
    out: dict[str, dict[str, float]] = {}
    for kind, (p, struck, _) in events.items():
        strength = stats.norm.pdf(stats.norm.isf(p)) / p
        own = set(classes[kinds == kind].tolist())
        found = {}
        for name in [c for c in dict.fromkeys(map(str, classes)) if c not in own]:
            ops = classes == name
            mean = z[ops].mean(axis=0)
            reliable = _reliability(z[ops])
            if np.ptp(mean) == 0 or reliable < LEAST_RELIABLE:
                continue
            shift = float(((mean - mean.mean()) / mean.std())[struck].mean())
            if abs(shift) * np.sqrt(struck.sum()) > CLEAR:
                found[name] = shift / (strength * np.sqrt(reliable))
        total = sum(b * b for b in found.values())
        if total > LARGEST_SHARE:
            found = {c: b * np.sqrt(LARGEST_SHARE / total) for c, b in found.items()}
        if found:
            out[kind] = {c: float(b) for c, b in found.items()}
    return out


def _reliability(z: np.ndarray) -> float:
    """Share of the variance of the mean of several series that they have in common, ``m r / (1 + (m - 1) r)``
    with their mean correlation r (Spearman and Brown)."""
    m, r = z.shape[0], _correlation_of(z)
    return m * r / (1 + (m - 1) * r)


def _correlation_of(z: np.ndarray) -> float:
    """Mean correlation between the series of ops that vary."""
    sd = z.std(axis=1, keepdims=True)
    own = (z[sd[:, 0] > 0] - z[sd[:, 0] > 0].mean(axis=1, keepdims=True)) / sd[sd[:, 0] > 0]
    return _correlation(own) if own.shape[0] > 1 else 0.0


def _dependence(top: np.ndarray, size: int) -> float:
    """Mean over pairs of series of the share of one's top steps that are the other's too."""
    m = top.shape[0]
    together = top.sum(axis=0).astype(float)
    members = top.sum()
    if members == 0:
        return 0.0
    return float(np.sum(together * (together - 1)) / ((m - 1) * members))


def _tail_table(rows: Mapping[str, Mapping[str, float]], n: int) -> xr.Dataset:
    def interval(p: float) -> tuple[float, float]:
        if p == 0.0:
            return np.nan, np.nan
        ci = stats.binomtest(round(p * n), n).proportion_ci(0.95, method="exact")
        return float(ci.low), float(ci.high)

    names = ("tail_dependence", "gaussian_tail_dependence", "p_value", "event_probability")
    data = {v: ("signature", np.array([r[v] for r in rows.values()], float)) for v in names}
    data["event_probability_interval"] = (
        ("signature", "ci_bound"),
        np.array([interval(r["event_probability"]) for r in rows.values()]).reshape(-1, 2),
    )
    return schema.dataset(
        data,
        coords={"signature": np.array(list(rows), dtype="U"), "ci_bound": ["lower", "upper"]},
        made_by="prism.traces.fit_coupling",
        source="simulated",
    )


def without_events(u: np.ndarray, kinds: np.ndarray, events: Mapping) -> np.ndarray:
    """Probabilities with events taken out: NaN where one struck, stretched elsewhere."""
    out = u.copy()
    for kind, (p, struck, _) in events.items():
        ops = kinds == kind
        rest = np.clip(u[ops] / (1 - p), 1e-9, 1 - 0.5 / u.shape[1])
        out[ops] = np.where(struck, np.nan, rest)
    return out
