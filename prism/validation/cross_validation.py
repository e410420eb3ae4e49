"""Cross-validation: the error of a fitted model on measured steps that it has not seen.

Steps are left out in blocks of neighbours, since machines drift and the step next door is no stranger. Beside
the model stand three baselines that need no model of dependence, or no model at all: the same pools drawn
independently (the PRISM paper's assumption), every op at its mean (a deterministic simulator), and the step
times of the training steps themselves (*resampled*), which can be carried to no other configuration: what
these still miss is drift and the noise of few steps, and no model is to blame for it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import xarray as xr
from scipy.stats import kstwo
from tqdm import tqdm

from prism.base import schema, stats
from prism.model.coupling import Coupling
from prism.model.engine.montecarlo import simulate
from prism.traces import MIN_STEPS, MeasuredSteps, choose_gaps, fit_model, measure_steps, replay
from prism.validation.comparison import QUANTILES, compare

SCENARIOS = ("model", "independent", "means only", "resampled")
LEVELS = (0.5, 0.8, 0.9)
#: steps below which nothing is left out
LEAST_STEPS = 8
#: values of all folds' predictions together
LARGEST_POOLED = 200_000


def validate(
    trace: xr.Dataset, *, gpus_per_node: int = 8, folds: int = 4, draws: int = 4000, block: int = 4,
    seed: int = 0, progress: bool = False,
) -> xr.Dataset:  # fmt: skip
    """Cross-validate the model of a trace against its own measured steps.

    Parameters
    ----------
    trace : Dataset of `prism.read_trace`
    gpus_per_node : int
        Passed on to `prism.traces.build_graph`.
    folds, draws, block, seed, progress
        Passed on to `cross_validate`.

    Returns
    -------
    Dataset
        Result of `cross_validate`.

    Raises
    ------
    TraceError
        If `build_graph` refuses the trace.
    ValueError
        With fewer than 2 steps.
    """
    measured = measure_steps(trace, gpus_per_node=gpus_per_node)
    return cross_validate(
        measured, folds=folds, draws=draws, block=block, seed=seed, progress=progress
    )


def validate_each(traces: Mapping[str, xr.Dataset], **settings) -> xr.Dataset:
    """`validate` of several traces with the same settings, side by side.

    Parameters
    ----------
    traces : mapping of a name to Dataset of `prism.read_trace`
    **settings
        Passed on to `validate`.

    Returns
    -------
    Dataset
        Results of `validate` along `trace`, and ``replay_error(trace, gaps)``: largest relative error of a replayed
        step, with idle gaps and without. Where traces have different numbers of steps,
        ``measured_time(trace, step)`` ends in NaN.
    """
    found = [_with_replay(trace, settings) for trace in traces.values()]
    facts = {name: schema.provenance(f) for name, f in zip(traces, found, strict=True)}
    rows = [f.assign_coords(step=np.arange(f.sizes["step"])) for f in found]
    joined = xr.concat(rows, "trace", join="outer", combine_attrs="drop_conflicts")
    return schema.dataset(
        {name: (v.dims, v.values) for name, v in joined.data_vars.items()},
        coords={n: c.values for n, c in joined.coords.items()} | {"trace": list(traces)},
        made_by="prism.validation.validate_each",
        source=schema.derived_source(*(f.attrs["source"] for f in found)),
        seed=found[0].attrs["seed"],
        provenance={"traces": facts},
    )


def _with_replay(trace: xr.Dataset, settings: dict) -> xr.Dataset:
    nodes = settings.get("gpus_per_node", 8)
    measured = measure_steps(trace, gpus_per_node=nodes)
    worst = [float(np.abs(replay(measured, gaps=g)["relative_error"]).max()) for g in (True, False)]
    rest = {k: v for k, v in settings.items() if k != "gpus_per_node"}
    found = cross_validate(measured, **rest)
    return found.assign(replay_error=("gaps", worst)).assign_coords(gaps=["kept", "left out"])


def cross_validate(
    measured: MeasuredSteps,
    *,
    folds: int = 4,
    draws: int = 4000,
    block: int = 4,
    seed: int = 0,
    progress: bool = False,
) -> xr.Dataset:
    """Fit to all steps and compare with them; leave out each block of steps in turn, fit to the others, and
    compare with those left out. Gaps, pools and coupling are chosen and fitted anew each time.

    Parameters
    ----------
    measured : MeasuredSteps
        With fewer than 8 steps nothing is left out and what needs it is NaN.
    folds : int
        Blocks of neighbouring steps.
    draws : int
        Draws of each prediction.
    block : int
        Serial correlation: lags below this count in the intervals.
    seed : int
    progress : bool

    Returns
    -------
    Dataset
        Per `scenario` (model, independent, means only, resampled): ``ks_in_sample``, with
        ``ks_critical``, what a perfect model of as many independent steps passes in one case of twenty.
        Cross-validated: ``ks_distance``, mean over folds, ``ks_noise_floor``, the median that a perfect
        model would show in a fold; ``crps`` and ``pinball`` (of the predicted p95), means over left-out steps,
        s; ``above_p95``, the share of them above it; ``fold_error_mean``, mean over folds of the absolute
        relative error of the mean; ``coverage(level)``: share of left-out steps inside the central interval
        that was predicted for them, with its binomial interval.
        From the predictions of all folds together against all steps, with block bootstrap intervals of the
        measured side: ``relative_error(quantile)``, ``relative_error_mean``, ``std_error``. Every step is in
        the training set of all folds but one, and what folds miss cancels: these are nearly in sample, and
        resampled steps are right by construction. A fold's few steps have no p95 of their own to compare.
        ``step_time(draw)`` and ``independent_time(draw)``: the model of all steps, and its pools drawn
        independently, beside ``measured_time(step)``, s. The provenance holds gaps, loadings and events of
        that model, and the number of folds with enough steps for a coupling.

    Raises
    ------
    ValueError
        With fewer than 2 steps, or fewer than 2 folds.
    """
    n = measured.n_steps
    if n < 2:
        raise ValueError(f"one measured step has no distribution to validate against (got {n})")
    if folds < 2 or block < 1:
        raise ValueError(f"folds must be at least 2 and block 1, got {folds} and {block}")
    step_time = measured.step_time.values
    chosen = choose_gaps(measured)
    whole = fit_model(measured, gaps=chosen)
    inside = _predictions(whole, step_time, draws, seed)
    label = np.arange(n) * folds // n
    held: list[dict[str, np.ndarray]] = []
    enough = n >= max(LEAST_STEPS, 2 * folds)
    for k in tqdm(range(folds if enough else 0), desc="folds", disable=not progress, leave=False):
        train = measured.select(np.flatnonzero(label != k))
        model = fit_model(train)
        held.append(_predictions(model, train.step_time.values, draws, seed + 1 + k))
    rows = [_scores(s, inside, held, step_time, label, block, seed) for s in SCENARIOS]
    made = {
        "steps": n,
        "folds": len(held),
        "folds_with_coupling": sum(int(np.sum(label != k)) >= MIN_STEPS for k in range(len(held))),
        "draws": draws,
        "block": block,
        "gaps_kept": chosen,
        "loadings": _loadings(whole.coupling),
        "events": dict(whole.coupling.events),
        "event_scores": {k: dict(v) for k, v in whole.coupling.event_scores.items()},
    }
    return _dataset(rows, inside, measured, made, seed)


#: dimensions of figures that have more than one value a scenario
_DIMS = {
    "relative_error": ("scenario", "quantile"),
    "relative_error_interval": ("scenario", "quantile", "ci_bound"),
    "coverage": ("scenario", "level"),
    "coverage_interval": ("scenario", "level", "ci_bound"),
}


def _dataset(rows: list[dict], inside: dict, measured: MeasuredSteps, made: dict, seed: int):
    def dims(name: str) -> tuple[str, ...]:
        usual = ("scenario", "ci_bound") if name.endswith("interval") else ("scenario",)
        return _DIMS.get(name, usual)

    return schema.dataset(
        {
            **{name: (dims(name), np.array([r[name] for r in rows])) for name in rows[0]},
            "ks_critical": ((), float(kstwo.ppf(0.95, made["steps"]))),
            "step_time": ("draw", inside["model"]),
            "independent_time": ("draw", inside["independent"]),
            "measured_time": ("step", measured.step_time.values),
        },
        coords={
            "step": measured.steps["step"].values,
            "scenario": list(SCENARIOS),
            "quantile": list(QUANTILES),
            "level": list(LEVELS),
            "ci_bound": ["lower", "upper"],
        },
        made_by="prism.validate",
        source=schema.derived_source(measured.source),
        seed=seed,
        provenance={**measured.provenance, **made},
    )


def _predictions(model, trained_on: np.ndarray, draws: int, seed: int) -> dict[str, np.ndarray]:
    """Predicted step times, s, by scenario."""
    alone = model.replace(coupling=Coupling.independent())
    return {
        "model": simulate(model, draws, seed=seed)["step_time"].values,
        "independent": simulate(alone, draws, seed=seed)["step_time"].values,
        "means only": simulate(model.at_mean, 1)["step_time"].values,
        "resampled": trained_on,
    }


def _scores(
    scenario: str, inside: dict, held: list[dict], measured: np.ndarray, label: np.ndarray, block: int,
    seed: int,
) -> dict[str, object]:  # fmt: skip
    """All figures of one scenario."""
    out: dict[str, object] = {"ks_in_sample": stats.ks_distance(inside[scenario], measured)}
    if not held:
        return out | _not_available()
    folds = [(p[scenario], measured[label == k]) for k, p in enumerate(held)]
    # each fold counts as often as steps were left out in it
    each = max(1, LARGEST_POOLED // measured.size)
    together = np.concatenate([np.resize(x, each * y.size) for x, y in folds])
    found = compare(together, measured, block=block, seed=seed).isel(scenario=0)
    taken = ("relative_error", "relative_error_interval", "relative_error_mean",
             "relative_error_mean_interval")  # fmt: skip
    return (
        out
        | {
            "ks_distance": float(np.mean([stats.ks_distance(x, y) for x, y in folds])),
            "ks_noise_floor": float(
                np.mean(
                    [
                        stats.ks_noise_floor(x.size, y.size) if x.size > 1 else np.nan
                        for x, y in folds
                    ]
                )
            ),
            "pinball": sum(_pinball(x, y) * y.size for x, y in folds) / measured.size,
            "above_p95": float(
                np.mean(np.concatenate([y > np.quantile(x, 0.95) for x, y in folds]))
            ),
            "fold_error_mean": float(np.mean([abs(x.mean() / y.mean() - 1) for x, y in folds])),
            "crps": sum(stats.crps(x, y) * y.size for x, y in folds) / measured.size,
        }
        | {name: found[name].values for name in taken}
        | _spread_error(together, measured, block, seed)
        | _coverage(folds, block)
    )


def _pinball(predicted: np.ndarray, measured: np.ndarray, q: float = 0.95) -> float:
    """Mean loss of a predicted quantile, s: least for the true one (Koenker and Bassett 1978)."""
    over = measured - np.quantile(predicted, q)
    return float(np.mean(np.maximum(q * over, (q - 1) * over)))


def _spread_error(predicted: np.ndarray, measured: np.ndarray, block: int, seed: int) -> dict:
    """Relative error of the standard deviation, with its block bootstrap interval."""
    rng = np.random.default_rng(seed)
    own = predicted.std()
    drawn = [measured[stats.block_indices(rng, measured.size, block)].std() for _ in range(2000)]
    if min(drawn) <= 1e-9 * abs(measured.mean()):
        return {"std_error": np.nan, "std_error_interval": [np.nan, np.nan]}
    ratio = own / np.array(drawn) - 1
    return {
        "std_error": own / measured.std() - 1,
        "std_error_interval": np.quantile(ratio, [0.025, 0.975]),
    }


def _coverage(folds: list[tuple[np.ndarray, np.ndarray]], block: int) -> dict:
    """Share of left-out steps inside central intervals, and binomial intervals of it."""
    share, interval = [], []
    for level in LEVELS:
        hits = np.concatenate(
            [
                (y >= np.quantile(x, (1 - level) / 2)) & (y <= np.quantile(x, (1 + level) / 2))
                for x, y in folds
            ]
        )
        share.append(float(hits.mean()))
        interval.append(stats.share_interval(hits, block=block))
    return {"coverage": share, "coverage_interval": interval}


def _not_available() -> dict:
    """Return NaN for the figures that need left-out steps."""
    nan = np.nan
    return {
        "ks_distance": nan, "ks_noise_floor": nan, "crps": nan, "pinball": nan, "above_p95": nan,
        "fold_error_mean": nan,
        "relative_error": [nan] * len(QUANTILES), "relative_error_interval": [[nan, nan]] * len(QUANTILES),
        "relative_error_mean": nan, "relative_error_mean_interval": [nan, nan],
        "std_error": nan, "std_error_interval": [nan, nan],
        "coverage": [nan] * 3, "coverage_interval": [[nan, nan]] * 3,
    }  # fmt: skip


def _loadings(coupling: Coupling) -> dict:
    return {
        kind: {level: [v.transient, v.persistent] for level, v in levels.items()}
        for kind, levels in coupling.loadings.items()
    }
