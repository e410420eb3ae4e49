"""Breakdown of a trace's time by kind of op, and comparison of two traces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import xarray as xr
from scipy import stats
from scipy.special import comb

from prism.base import schema
from prism.model.signature import Category, Signature
from prism.traces import megatron
from prism.traces.graph import TraceGraph, build_graph
from prism.traces.measured_steps import MeasuredSteps, observe

QUANTILES = (0.05, 0.5, 0.95)
COMPUTE, HOST, COMMUNICATION = "compute", "host", "communication"


def breakdown(trace: xr.Dataset, *, gpus_per_node: int = 8) -> xr.Dataset:
    """Step time and the time in each kind of op, over ranks and steps.

    Parameters
    ----------
    trace : Dataset of `read_trace`
    gpus_per_node : int
        Passed on to `build_graph`.

    Returns
    -------
    Dataset
        ``step_time(step)``, s. By kind (dimension `kind`: compute, host, and each kind of collective with
        the role of its group), each a quantile (p5, p50, p95) over ranks and steps of the sum over the ops
        of a rank in a step, s: ``busy_quantile`` (without waiting), ``waiting_quantile`` (a collective's
        time until its last member arrives), ``exposed_quantile`` (the part during which the rank computes
        nothing); ranks without a kind do not count for it. ``step_time_quantile(quantile)``, s. ``rank_cv``: how sums of compute differ between
        ranks (std / mean of means over steps), ``step_cv``: between steps (mean over ranks of std / mean;
        NaN for one step). ``extra_share``: share of the run time lost to variability if every step meets
        the p95 of everything, see `extra_days`.

    Raises
    ------
    TraceError
        If `build_graph` refuses the trace.

    Examples
    --------
    ``prism.breakdown(prism.read_trace("traces")).busy_quantile.to_pandas()``
    """
    sums = _sums(trace, build_graph(trace, gpus_per_node=gpus_per_node))
    kinds = [k for k in sums.busy if np.nansum(sums.raw[k]) > 0] or list(sums.busy)

    def quantiles(values: Mapping[str, np.ndarray]) -> np.ndarray:
        # over the ranks that take part
        return np.array([np.nanquantile(values[k], QUANTILES) for k in kinds]).reshape(-1, 3)

    step = sums.step_time
    typical = float(np.median(step))
    compute = sums.busy.get(COMPUTE, sums.busy.get(HOST))
    spread = quantiles(sums.busy)
    lost = spread[:, 2] - spread[:, 1]
    of_kind = np.array([k not in (COMPUTE, HOST) for k in kinds])
    own = float(np.quantile(step, 0.95) - typical)
    return schema.dataset(
        {
            "step_time": ("step", step),
            "step_time_quantile": ("quantile", np.quantile(step, QUANTILES)),
            "busy_quantile": (("kind", "quantile"), spread),
            "waiting_quantile": (("kind", "quantile"), quantiles(sums.waiting)),
            "exposed_quantile": (("kind", "quantile"), quantiles(sums.exposed)),
            "rank_cv": ((), _cv(compute.mean(axis=1)) if compute is not None else np.nan),
            "step_cv": ((), _step_cv(compute) if compute is not None else np.nan),
            "extra_share": ((), (own + float(lost[of_kind].sum())) / typical),
        },
        coords={
            "step": trace["step"].values,
            "kind": np.array(kinds, dtype="U"),
            "quantile": list(QUANTILES),
        },
        made_by="prism.breakdown",
        source=trace.attrs["source"],
        provenance=schema.provenance(trace),
    )


def extra_days(found: xr.Dataset, run_days: float) -> float:
    """Days that variability adds to a run of `run_days` if every step meets the p95 of everything.

    ``run_days (p95 - p50 of the step time, plus p95 - p50 of each kind of collective) / p50 step time``, the
    reckoning that gives the PRISM paper's twenty days. Nothing of a collective is taken to be hidden behind
    compute, and collectives are part of the step, so this counts them twice: pessimistic, no estimate.
    Quantiles run over ranks and steps, so a collective that some ranks always find slow counts too.

    Examples
    --------
    The paper's production run: p50 18.8 s, spreads of 0.5 s (step), 2.7 s (all-reduce) and 0.3 s
    (reduce-scatter); over 107 days:

    >>> ds = xr.Dataset({"extra_share": ((), (0.5 + 2.7 + 0.3) / 18.8)})
    >>> round(extra_days(ds, 107.0), 1)
    19.9
    """
    if not run_days > 0:
        raise ValueError(f"run_days must be positive, got {run_days}")
    return float(found["extra_share"]) * run_days


def compare_traces(
    before: xr.Dataset, after: xr.Dataset, *, gpus_per_node: int = 8, level: float = 0.01
) -> xr.Dataset:
    """Two traces of the same kind of job side by side: another week, another scale, another build.

    Parameters
    ----------
    before, after : Dataset of `read_trace`
    gpus_per_node : int
    level : float
        Family-wise level at which a signature is called moved (Holm over all signatures).

    Returns
    -------
    Dataset
        ``std_ratio(kind)`` for compute, host and communication: standard deviation over ranks and steps of
        the sum of a rank in a step, after / before (the paper's figure 1). Per signature in both
        (dimension `signature`): ``median_ratio``, after / before, ``p_value`` of a Mann-Whitney test on the
        means of steps (corrected by Holm), ``moved``. Where the steps are too few for any difference to
        pass, nothing is tested: NaN, not moved.
        The provenance counts signatures that only one has.

    Raises
    ------
    ValueError
        If the traces have no signature in common.
    """
    sides = [
        (_sums(t, g), observe(t, g))
        for t in (before, after)
        for g in (build_graph(t, gpus_per_node=gpus_per_node),)
    ]
    samples = [_by_signature(m) for _, m in sides]
    common = [s for s in samples[0] if s in samples[1]]
    if not common:
        raise ValueError("the traces have no signature in common: they do not run the same ops")
    ratio, p = [], []
    for s in common:
        a, b = samples[0][s], samples[1][s]
        ratio.append(np.median(b) / np.median(a) if np.median(a) > 0 else np.nan)
        # the least p-value that so few steps can give has to be able to pass
        least = 2 / comb(a.size + b.size, a.size)
        tested = least * len(common) <= level and max(np.ptp(a), np.ptp(b)) > 0
        p.append(stats.mannwhitneyu(a, b).pvalue if tested else np.nan)
    corrected = _holm(np.array(p))
    kinds = [k for k in (COMPUTE, HOST, COMMUNICATION) if all(s.has(k) for s, _ in sides)]
    spread = [np.std(sides[1][0].total(k)) / np.std(sides[0][0].total(k)) for k in kinds]
    return schema.dataset(
        {
            "std_ratio": ("kind", np.array(spread, float)),
            "median_ratio": ("signature", np.array(ratio)),
            "p_value": ("signature", corrected),
            "moved": ("signature", corrected <= level),
        },
        coords={"kind": np.array(kinds, dtype="U"), "signature": np.array(common, dtype="U")},
        made_by="prism.traces.compare_traces",
        source="synthetic"
        if "synthetic" in (before.attrs["source"], after.attrs["source"])
        else "measured",
        provenance={
            "before": schema.provenance(before).get("files", ""),
            "after": schema.provenance(after).get("files", ""),
            "only_before": len(samples[0]) - len(common),
            "only_after": len(samples[1]) - len(common),
            "level": level,
        },
    )


@dataclass(frozen=True)
class _Sums:
    """Sums over the ops of a rank in a step, s, (rank, step) by kind."""

    step_time: np.ndarray
    busy: dict[str, np.ndarray]
    raw: dict[str, np.ndarray]
    exposed: dict[str, np.ndarray]

    @property
    def waiting(self) -> dict[str, np.ndarray]:
        return {k: np.maximum(self.raw[k] - self.busy[k], 0.0) for k in self.busy}

    def has(self, kind: str) -> bool:
        return kind in self.busy or (
            kind == COMMUNICATION and bool(set(self.busy) - {COMPUTE, HOST})
        )

    def total(self, kind: str) -> np.ndarray:
        if kind != COMMUNICATION:
            return self.busy[kind]
        return np.nansum([v for k, v in self.busy.items() if k not in (COMPUTE, HOST)], axis=0)


def _sums(trace: xr.Dataset, graph: TraceGraph) -> _Sums:
    measured = observe(trace, graph)
    start, raw = trace["start"].values, trace["duration"].values
    rank, kind = trace["rank"].values, np.array(_kinds(trace))
    net = np.minimum(measured.duration.values[:, graph.op_of_record], raw)
    ranks = np.unique(rank)
    names = [k for k in dict.fromkeys(kind.tolist()) if k]
    shape = (ranks.size, trace.sizes["step"])
    busy, total, exposed = ({k: np.zeros(shape) for k in names} for _ in range(3))
    for i, r in enumerate(ranks):
        own = rank == r
        computing = own & np.isin(kind, (COMPUTE, HOST) if COMPUTE not in names else (COMPUTE,))
        for k in names:
            ops = np.flatnonzero(own & (kind == k))
            if ops.size == 0:
                busy[k][i] = total[k][i] = exposed[k][i] = np.nan
                continue
            busy[k][i], total[k][i] = net[:, ops].sum(axis=1), raw[:, ops].sum(axis=1)
            if k in (COMPUTE, HOST):
                exposed[k][i] = busy[k][i]
                continue
            for s in range(shape[1]):
                exposed[k][i, s] = _uncovered(
                    start[s, ops], raw[s, ops], start[s, computing], raw[s, computing]
                )
    return _Sums(measured.step_time.values, busy, total, exposed)


def _kinds(trace: xr.Dataset) -> list[str]:
    """Return the kind that each record counts as; empty for gaps."""
    out = []
    for name, role in zip(trace["name"].values, trace["role"].values, strict=True):
        category = Signature(str(name), role=_role(str(name), str(role))).category
        if category == Category.GAP:
            out.append("")
        elif category == Category.COMPUTE:
            out.append(str(role) if role == HOST else COMPUTE)
        else:
            shown = _role(str(name), str(role))
            out.append(f"{name} ({shown})")
    return out


def _role(name: str, role: str) -> str:
    # op-level records say what they are by their names
    return megatron.ROLES.get(name, role)


def _uncovered(start: np.ndarray, length: np.ndarray, c_start: np.ndarray, c_length: np.ndarray):
    """Length of the union of intervals that no covering interval overlaps."""
    both = _union(np.append(start, c_start), np.append(length, c_length))
    return both - _union(c_start, c_length)


def _union(start: np.ndarray, length: np.ndarray) -> float:
    if start.size == 0:
        return 0.0
    order = np.argsort(start, kind="stable")
    begin, end = start[order], (start + length)[order]
    reach = np.maximum.accumulate(end)
    before = np.concatenate([[begin[0]], reach[:-1]])
    return float(np.sum(np.maximum(end - np.maximum(begin, before), 0.0)))


def _cv(values: np.ndarray) -> float:
    return float(np.std(values) / np.mean(values)) if np.mean(values) > 0 else float("nan")


def _step_cv(values: np.ndarray) -> float:
    if values.shape[1] < 2:
        return float("nan")
    return float(np.mean([_cv(row) for row in values]))


def _by_signature(measured: MeasuredSteps) -> dict[str, np.ndarray]:
    """Mean duration of each signature in each step."""
    duration, dag = measured.duration.values, measured.dag
    return {
        str(s): duration[:, dag.signature == i].mean(axis=1) for i, s in enumerate(dag.signatures)
    }


def _holm(p: np.ndarray) -> np.ndarray:
    """Holm's step-down correction; NaN stays."""
    out = np.full(p.size, np.nan)
    known = np.flatnonzero(np.isfinite(p))
    order = known[np.argsort(p[known])]
    running = 0.0
    for k, i in enumerate(order):
        running = max(running, min(1.0, (known.size - k) * p[i]))
        out[i] = running
    return out
