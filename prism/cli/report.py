"""Reports of the command line: results as mappings for JSON, and as text."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import xarray as xr

from prism import traces
from prism.base.schema import provenance
from prism.base.stats import guarantee, quantile_interval
from prism.context import analytic
from prism.context.context import Context, StageTimes
from prism.model.engine.montecarlo import simulate
from prism.model.step_model import StepModel

QUANTILES = (0.05, 0.5, 0.95)


def simulation(
    trace: xr.Dataset,
    measured: traces.MeasuredSteps,
    kept: Mapping[str, str],
    model: StepModel,
    runs: xr.Dataset,
) -> dict:
    """Everything about a simulated trace that the command line prints."""
    return _summary(runs, measured) | {
        "replay_largest_error": {
            "with_gaps": _worst(measured, gaps=True),
            "with_kept_gaps": _worst(measured.with_gaps(kept), gaps=False),
            "without_gaps": _worst(measured, gaps=False),
        },
        "gaps_kept": dict(kept),
        "host_share_of_longest_path": _share_of(runs, "host"),
        "graph": _graph_facts(trace, measured),
        "largest_pools": _largest_pools(model, runs),
        "step": "computed" if _is_computed(trace) else "measured",
    }


#: ops x replicas up to which the longest path is looked at in every draw
FEW_OPS = 2_000_000


def context(ctx: Context, model: StepModel, runs: xr.Dataset, took: float) -> dict:
    """Everything about a simulated spec that the command line prints."""
    dag, x = model.dag, runs["step_time"].values
    low, high = quantile_interval(x, 0.95)
    shape = not isinstance(ctx.workload, StageTimes)
    out = {
        "unit": "s",
        "simulated": {f"p{round(100 * q)}": float(np.quantile(x, q)) for q in QUANTILES},
        "p95_interval": [low, high],
        "mean": float(x.mean()),
        "std": float(x.std()),
        "without_variability": float(simulate(model.at_mean, 1)["step_time"][0]),
        "guarantee": _guarantee(runs),
        "gpus": ctx.topology.gpus,
        "memory_bytes": max(analytic.memory_bytes(ctx)) if shape else None,
        "gpu_memory_bytes": ctx.topology.gpu.memory if shape else None,
        "bubble": 1.0 - _busy_share(ctx, model),
        "ops": dag.n_ops,
        "replicas": dag.lanes,
        "draws": runs.sizes["draw"],
        "seconds": took,
        "op_draws_per_second": dag.n_ops * dag.lanes * runs.sizes["draw"] / took,
        "seed": runs.attrs["seed"],
    }
    return out | ({"largest_pools": _largest_pools(model, runs)} if "criticality" in runs else {})


def _busy_share(ctx: Context, model: StepModel) -> float:
    """Part of a step in which ranks compute, mean over pipeline ranks, if nothing varies."""
    dag = model.dag
    compute = dag.component == "compute"
    mean = np.array([p.mean for p in model.distinct_pools[0]])[model.distinct_pools[1]]
    busy = np.bincount(dag.rank[compute], mean[compute]).mean()
    return float(busy / simulate(model.at_mean, 1)["step_time"].values[0])


def context_text(s: dict) -> str:
    """Quantiles with the p95's interval, what the step is made of, how fast it was simulated."""
    q = s["simulated"]
    lines = [
        f"step time (s)   p5 {q['p5']:.4f}   p50 {q['p50']:.4f}   p95 {q['p95']:.4f} "
        f"[{s['p95_interval'][0]:.4f}, {s['p95_interval'][1]:.4f}]   ({s['draws']} draws, synthetic)",
        f"mean {s['mean']:.4f}, standard deviation {s['std']:.4f}; {s['without_variability']:.4f} if nothing varied",
        f"95 % of simulated steps stay under {s['guarantee']['bound']:.4f} s with 95 % confidence "
        f"({s['guarantee']['covers']})",
        f"{s['gpus']} GPUs, {s['bubble']:.0%} of a step without compute"
        + (
            f", {s['memory_bytes'] / 1e9:.1f} of {s['gpu_memory_bytes'] / 1e9:.1f} GB on the fullest"
            if s["memory_bytes"]
            else ""
        ),
        f"{s['ops']} ops x {s['replicas']} replicas, {s['seconds']:.1f} s, "
        f"{s['op_draws_per_second']:.2g} op-draws/s",
        *_compared_lines(s),
    ]
    if "largest_pools" in s:
        lines += [
            "on the longest path, mean (s)            ops       mean        p95",
            *_pool_lines(s),
        ]
    return "\n".join(lines)


def comparison(found: xr.Dataset) -> dict:
    """Simulated against measured step times."""
    row = found.isel(scenario=0)
    p95 = row.sel(quantile=0.95)
    return {
        "steps": provenance(found)["steps"],
        "ks_distance": float(row["ks_distance"]),
        "ks_distance_interval": row["ks_distance_interval"].values.tolist(),
        "ks_noise_floor": float(row["ks_noise_floor"]),
        "anderson_darling": float(row["anderson_darling"]),
        "mean_error": float(row["relative_error_mean"]),
        "p95_error": float(p95["relative_error"]),
        "p95_error_interval": p95["relative_error_interval"].values.tolist(),
    }


def _compared_lines(s: dict) -> list[str]:
    if "compared" not in s:
        return []
    c = s["compared"]
    (low, high), (least, most) = c["ks_distance_interval"], c["p95_error_interval"]
    return [
        f"against {c['steps']} measured steps: KS {c['ks_distance']:.3f} [{low:.3f}, {high:.3f}] "
        f"(a perfect model about {c['ks_noise_floor']:.3f}), mean {c['mean_error']:+.1%}, "
        f"p95 {c['p95_error']:+.1%} [{least:+.1%}, {most:+.1%}]"
    ]


def _guarantee(runs: xr.Dataset) -> dict:
    return {
        "quantile": 0.95,
        "confidence": 0.95,
        "bound": guarantee(runs["step_time"], 0.95, 0.95),
        "covers": "simulation error; not errors in pools and graph",
    }


def _share_of(runs: xr.Dataset, component: str) -> float:
    """Part of the longest path that a component is, mean over draws."""
    if component not in runs["component"].values:
        return 0.0
    return float((runs["exposed_time"].sel(component=component) / runs["step_time"]).mean())


def _graph_facts(trace: xr.Dataset, measured: traces.MeasuredSteps) -> dict:
    """Collect the inferences and corrections made between the trace and the graph."""
    read, seen = provenance(trace), measured.provenance
    facts = {k: read[k] for k in ("edges_recorded", "edges_inferred", "aligned") if k in read}
    if "clock_skew_ns" in read:
        facts["largest_clock_correction_s"] = max(abs(s) for s in read["clock_skew_ns"]) * 1e-9
    return facts | {"largest_spread_of_ends_s": seen["end_spread_max"]}


def _worst(measured: traces.MeasuredSteps, *, gaps: bool) -> float:
    """Largest relative error of a replayed step."""
    return float(np.abs(traces.replay(measured, gaps=gaps)["relative_error"]).max())


def _is_computed(trace: xr.Dataset) -> bool:
    """Tell whether the step time was computed from the graph, since the trace has no times."""
    return str(provenance(trace).get("step", "")).startswith("computed")


def _number(value) -> float | None:
    """A number for JSON, which has no NaN."""
    return float(value) if np.isfinite(value) else None


def validation(found: xr.Dataset) -> dict:
    """Everything about a cross-validation that the command line prints."""
    facts = provenance(found)

    def figures(scenario: str) -> dict:
        row = found.sel(scenario=scenario)
        p95 = row.sel(quantile=0.95)

        def pair(name: str, at: xr.Dataset = row) -> list[float | None]:
            return [_number(v) for v in at[name].values]

        return {
            "ks_in_sample": _number(row["ks_in_sample"]),
            "ks_cross_validated": _number(row["ks_distance"]),
            "ks_noise_floor": _number(row["ks_noise_floor"]),
            "crps": _number(row["crps"]),
            "pinball_p95": _number(row["pinball"]),
            "above_p95": _number(row["above_p95"]),
            "mean_error_of_folds": _number(row["fold_error_mean"]),
            "mean_error": _number(row["relative_error_mean"]),
            "mean_error_interval": pair("relative_error_mean_interval"),
            "std_error": _number(row["std_error"]),
            "std_error_interval": pair("std_error_interval"),
            "p95_error": _number(p95["relative_error"]),
            "p95_error_interval": pair("relative_error_interval", p95),
            "coverage": {
                f"{level:g}": {
                    "share": _number(row["coverage"].sel(level=level)),
                    "interval": pair("coverage_interval", row.sel(level=level)),
                }
                for level in found["level"].values
            },
        }

    return {
        **figures("model"),
        "ks_critical": float(found["ks_critical"]),
        "baselines": {str(s): figures(str(s)) for s in found["scenario"].values if s != "model"},
        "steps": facts["steps"],
        "folds": facts["folds"],
        "folds_with_coupling": facts["folds_with_coupling"],
        "gaps_kept": facts["gaps_kept"],
        "loadings": facts["loadings"],
        "events": facts["events"],
        "event_scores": facts["event_scores"],
        "seed": found.attrs["seed"],
    }


def validation_text(s: dict) -> str:
    """A table of the model and its baselines, and what the model is made of."""

    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    def row(name: str, f: dict) -> str:
        left = [(f["ks_cross_validated"], ".3f", 9), (f["crps"], ".5f", 10), (f["pinball_p95"], ".5f", 10),
                (f["mean_error_of_folds"], ".1%", 8), (f["above_p95"], ".0%", 8)]  # fmt: skip
        left += [(c["share"], ".0%", 9) for c in f["coverage"].values()]
        pooled = [
            (f["mean_error"], "+.1%", 7),
            (f["std_error"], "+.0%", 7),
            (f["p95_error"], "+.1%", 7),
        ]
        return (
            f"{name:<13}{shown(f['ks_in_sample'], '.3f'):>10}|"
            + "".join(f"{shown(v, form):>{w}}" for v, form, w in left)
            + " |"
            + "".join(f"{shown(v, form):>{w}}" for v, form, w in pooled)
        )

    lines = [
        f"{s['steps']} steps, {s['folds']} blocks left out in turn"
        + (f", {s['folds_with_coupling']} with enough steps for a coupling" if s["folds"] else ""),
        f"{'':<13}{'KS, all':>10}|{'KS, left':>9}{'CRPS (s)':>10}{'pinball':>10}{'mean':>8}{'> p95':>8}"
        f"{'in 50 %':>9}{'in 80 %':>9}{'in 90 %':>9} |{'mean':>7}{'std':>7}{'p95':>7}",
        row("model", s),
        *[row(name, f) for name, f in s["baselines"].items()],
        "between the bars: steps that were left out; right of them: all folds together, nearly in sample",
        f"KS of a perfect model: under {s['ks_critical']:.3f} on all steps in 19 cases of 20; about "
        f"{shown(s['ks_noise_floor'], '.3f')} in a block",
    ]
    if s["folds"]:
        low, high = s["p95_error_interval"]
        lines.append(
            f"error of p95 {s['p95_error']:+.1%} [{low:+.1%}, {high:+.1%}]: the measured p95 is uncertain"
        )
    else:
        lines.append("too few steps to leave any out: nothing is known about other steps")
    if s["gaps_kept"]:
        kept = ", ".join(f"{k} ({how})" for k, how in s["gaps_kept"].items())
        lines.append(f"idle gaps kept before {kept}")
    for kind, levels in s["loadings"].items():
        parts = ", ".join(f"{level} {t:+.2f}" + (f" (stays {p:+.2f})" if p else "")
                          for level, (t, p) in levels.items())  # fmt: skip
        if parts:
            lines.append(f"shared by {kind}: {parts}")
    for kind, p in s["events"].items():
        goes = ", ".join(f"{c} {b:+.2f}" for c, b in s["event_scores"].get(kind, {}).items())
        lines.append(
            f"joint event of {kind} in {p:.1%} of steps"
            + (f", with the score of {goes}" if goes else "")
        )
    return "\n".join(lines + [f"note: {n}" for n in s["notes"]])


def _largest_pools(model: StepModel, runs: xr.Dataset, count: int = 8) -> list[dict]:
    """Signatures by the time that they add to the longest path, mean over draws."""
    dag = model.dag
    mean = np.array([pool.mean for pool in model.op_pools])
    share = runs["criticality"].values
    on_path = np.bincount(dag.signature, mean * share, minlength=len(dag.signatures))
    found = []
    for index in np.argsort(-on_path)[:count]:
        ops = np.flatnonzero(dag.signature == index)
        fleet = model.fleet_pool(int(ops[0]))
        found.append(
            {
                "signature": str(dag.signatures[index]),
                "ops": int(ops.size),
                "mean": float(fleet.mean),
                "p95": float(fleet.quantile(0.95)),
                "on_longest_path": float(on_path[index]),
            }
        )
    return found


def _summary(runs: xr.Dataset, measured: traces.MeasuredSteps) -> dict:
    def quantiles(x) -> dict[str, float]:
        return {f"p{round(100 * q)}": float(np.quantile(x, q)) for q in QUANTILES}

    return {
        "unit": "s",
        "simulated": quantiles(runs["step_time"]),
        "guarantee": _guarantee(runs),
        "measured": quantiles(measured.step_time),
        "steps": measured.n_steps,
        "draws": runs.sizes["draw"],
        "ops": measured.dag.n_ops,
        "seed": runs.attrs["seed"],
    }


def _trusted(s: dict) -> bool:
    """Tell whether the graph returns measured step times to 1 % with all gaps, to 5 % with none."""
    worst = s["replay_largest_error"]
    return worst["with_gaps"] < 0.01 and worst["without_gaps"] < 0.05


def simulation_text(s: dict) -> str:
    """Simulated beside measured, how far the graph is to be trusted, and the longest path."""

    def row(name: str, q: dict[str, float]) -> str:
        return f"{name:<10}" + "".join(f"{q[f'p{round(100 * p)}']:>11.4f}" for p in QUANTILES)

    lines = [
        f"step time (s)      p5        p50        p95   ({s['ops']} ops a step)",
        row("simulated", s["simulated"]) + f"   ({s['draws']} draws)",
        row(s["step"], s["measured"]) + f"   ({_steps(s['steps'])})",
        f"replay     off by {s['replay_largest_error']['with_gaps']:.2%} at most with all idle gaps, "
        f"{s['replay_largest_error']['with_kept_gaps']:.2%} with those kept, "
        f"{s['replay_largest_error']['without_gaps']:.2%} with none: "
        + (
            "the graph explains the steps"
            if _trusted(s)
            else "THE GRAPH DOES NOT EXPLAIN THE STEPS"
        ),
        _graph_line(s["graph"]),
        f"95 % of simulated steps stay under {s['guarantee']['bound']:.4f} s with 95 % confidence "
        f"({s['guarantee']['covers']})",
        "on the longest path, mean (s)            ops       mean        p95",
    ]
    if s["host_share_of_longest_path"] > 0.5:
        lines.insert(
            4,
            f"           {s['host_share_of_longest_path']:.0%} of the longest path is work of the host, a chain that "
            "replays exactly whatever it waits for: replay says little here",
        )
    return "\n".join(
        lines + _pool_lines(s) + _compared_lines(s) + [f"note: {n}" for n in s["notes"]]
    )


def _pool_lines(s: dict) -> list[str]:
    return [
        f"{p['on_longest_path']:>11.6f}  {p['signature'][:34]:<34}{p['ops']:>5}"
        f"{p['mean']:>11.6f}{p['p95']:>11.6f}"
        for p in s["largest_pools"]
    ]


def _graph_line(facts: dict) -> str:
    parts = [
        f"members of a collective end {1e6 * facts['largest_spread_of_ends_s']:.0f} us apart at most"
    ]
    if "edges_inferred" in facts:
        parts.append(f"{facts['edges_inferred']} of its waits are inferred")
    if "largest_clock_correction_s" in facts:
        parts.append(
            f"clocks corrected by up to {1e6 * facts['largest_clock_correction_s']:.0f} us"
        )
    return "graph      " + ", ".join(parts)


def _steps(n: int) -> str:
    """How many steps, and what so few cannot tell."""
    if n == 1:
        return "1 step: how steps differ is not known"
    return f"{n} steps" + (
        f": under {traces.MIN_STEPS}, ops are drawn independently" if n < traces.MIN_STEPS else ""
    )
