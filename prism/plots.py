"""Datasets to axes. Nothing is computed here but positions on paper.

Every function takes a Dataset and an `ax` and returns the `ax`. What was generated says so in the
figure itself.
"""

from __future__ import annotations

from importlib.resources import files

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
import xarray as xr
from scipy.stats import norm

GOLDEN_RATIO = 0.6180339887498949
STYLE = str(files("prism") / "prism.mplstyle")


def column(rows: int = 1, columns: int = 1, **kwargs):
    """Figure and axes for one paper column, in the package's style."""
    plt.style.use(STYLE)
    return plt.subplots(rows, columns, **kwargs)


def label_source(ax, ds: xr.Dataset, extra: str = ""):
    """Write where the numbers come from above the axes."""
    text = ds.attrs["source"] + (f", {extra}" if extra else "")
    ax.set_title(text, loc="right", color="0.45", fontsize=6)
    return ax


def fleet(ds: xr.Dataset, ax):
    """Per-device median duration relative to the fleet's median, one box a kernel, points are
    devices. `ds` has ``duration(signature, gpu, trial)``."""
    median = ds["duration"].median("trial")
    relative = 100 * (median / median.median("gpu") - 1)
    frame = relative.to_series().rename("deviation").reset_index()
    sns.boxplot(
        frame, x="deviation", y="signature", ax=ax, color="0.92", fliersize=0, linewidth=0.7
    )
    # seaborn's jitter draws from numpy's global state, which would change the bytes at every run
    for row, values in enumerate(relative.values):
        height = row + 0.5 * ((np.arange(values.size) * GOLDEN_RATIO) % 1 - 0.5)
        ax.plot(values, height, ".", color="C0", markersize=2, alpha=0.6, markeredgewidth=0)
    ax.set(xlabel="device median against fleet median (%)", ylabel="")
    return label_source(ax, ds, f"{ds.sizes['gpu']} GPUs")


def over_time(duration: xr.DataArray, ds: xr.Dataset, ax):
    """Runs of one device in order of time, relative to their median, kernels one above the other."""
    for i, name in enumerate(duration["signature"].values):
        x = duration.sel(signature=name).values
        x = x[np.isfinite(x)]
        ax.plot(100 * (x / np.median(x) - 1) + 20 * i, linewidth=0.4, label=str(name))
    ax.set(xlabel="run", ylabel="from its median (%), 20 apart")
    ax.legend(fontsize=5)
    return label_source(ax, ds, f"{duration.sizes['trial']} runs")


def clock_and_power(ds: xr.Dataset, ax):
    """SM clock and power of every run (a fleet with both)."""
    for i, name in enumerate(ds["signature"].values):
        row = ds.sel(signature=name)
        ax.plot(
            row["clock_sm"].values.ravel(),
            row["power"].values.ravel(),
            ".",
            color=f"C{i}",
            markersize=1,
            label=str(name),
        )
    ax.set(xlabel="SM clock (MHz)", ylabel="power (W)")
    ax.legend(fontsize=5)
    return label_source(ax, ds)


def latency(ds: xr.Dataset, ax):
    """p50 over message size with the band to p99, a colour a collective (`prism.measure.collectives.size_quantiles`)."""
    for i, name in enumerate(dict.fromkeys(ds["collective"].values.astype(str))):
        row = ds.isel(signature=np.flatnonzero(ds["collective"].values == name)).sortby(
            "message_bytes"
        )
        x, y = row["message_bytes"], 1e6 * row["transfer_quantile"]
        ax.plot(x, y.sel(quantile=0.5), "o-", color=f"C{i}", markersize=2.5, label=name)
        ax.fill_between(
            x, y.sel(quantile=0.5), y.sel(quantile=0.99), color=f"C{i}", alpha=0.2, linewidth=0
        )
    ax.set(xscale="log", yscale="log", xlabel="message (B)", ylabel="time, p50 to p99 (us)")
    ax.legend(fontsize=5)
    return label_source(ax, ds)


def pool_fits(samples: np.ndarray, fits, ax, *, source: xr.Dataset):
    """Fitted quantiles over the sample's, by normal score: on the zero line the fit is right.

    `fits` maps a label to a `prism.model.pools.Fit`.
    """
    observed = np.sort(samples)
    q = (np.arange(observed.size) + 0.5) / observed.size
    for label, fitted in fits.items():
        ax.plot(norm.ppf(q), 100 * (fitted.pool.quantile(q) / observed - 1), label=label)
    ax.axhline(0, color="0.5", linewidth=0.6, zorder=0)
    ax.set(xlabel="normal score of the quantile", ylabel="fitted / measured - 1 (%)")
    ax.legend()
    return label_source(ax, source)


def step_times(ds: xr.Dataset, ax, *, marks=None):
    """Distribution function of ``step_time(draw)``; `marks` maps labels to seconds."""
    sns.ecdfplot(x=ds["step_time"].values, ax=ax, color="C0")
    for i, (label, at) in enumerate((marks or {}).items(), start=1):
        ax.axvline(at, color=f"C{i}", linewidth=0.9, label=f"{label} {at:.4g} s")
    ax.set(xlabel="step time (s)", ylabel="share of steps")
    if marks:
        ax.legend(loc="upper left")
    return label_source(ax, ds, f"{ds.sizes['draw']} draws")


def comparison(ds: xr.Dataset, ax):
    """Distribution functions: measured with its 95 % band, predicted, and drawn independently.

    `ds` is of `prism.validate`. The band is that of Dvoretzky, Kiefer, Wolfowitz and Massart for independent
    steps; serially correlated ones stray further.
    """
    measured = np.sort(ds["measured_time"].dropna("step").values)
    share = np.arange(1, measured.size + 1) / measured.size
    half = np.sqrt(np.log(2 / 0.05) / (2 * measured.size))
    ax.fill_between(
        measured, np.clip(share - half, 0, 1), np.clip(share + half, 0, 1),
        step="post", color="C0", alpha=0.25, linewidth=0, label="measured, 95 % band",
    )  # fmt: skip
    ax.step(measured, share, where="post", color="C0", linewidth=0.8)
    for i, (name, label) in enumerate(
        (("step_time", "predicted"), ("independent_time", "independent")), start=1
    ):
        sns.ecdfplot(x=ds[name].values, ax=ax, color=f"C{i}", label=label)
    ax.set(xlabel="step time (s)", ylabel="share of steps")
    ax.legend(loc="lower right")
    where = f", {ds['trace'].item()}" if "trace" in ds.coords else ""
    ax.set_title(f"measured and {ds.attrs['source']}{where}", loc="right", color="0.45", fontsize=6)
    return ax


def quantile_quantile(ds: xr.Dataset, ax):
    """Measured over predicted quantiles, and where 95 % of them would lie if the prediction were right.

    `ds` is of `prism.validation.quantile_quantile`.
    """
    x = ds["predicted"].values
    ax.fill_between(x, *ds["band"].values.T, color="C1", alpha=0.25, linewidth=0)
    ax.plot(x, x, color="C1", linewidth=0.6)
    ax.plot(x, ds["measured"].values, ".", color="C0", markersize=1.5, markeredgewidth=0)
    ax.set(xlabel="predicted (s)", ylabel="measured (s)")
    return ax


def growth(ds: xr.Dataset, component: str, ax):
    """Standard deviation of step time over the size of a job, with intervals; one line a scenario. `ds` is of
    `prism.whatif.weak_scaling`."""
    for name in ds["scenario"].values:
        row = ds.sel(scenario=name, component=component)
        y, (low, high) = 1e3 * row["step_std"].values, 1e3 * row["step_std_interval"].values.T
        error = np.maximum([y - low, high - y], 0)
        ax.errorbar(row["size"], y, yerr=error, fmt="o-", markersize=3, capsize=2, label=str(name))
    ax.set(xscale="log", yscale="log", xlabel="GPUs", ylabel=f"std of step, {component} (ms)")
    return label_source(ax, ds)


def exceedance(ds: xr.Dataset, slowdown: float, ax):
    """Share of steps slower than the step without variability by more than `slowdown`, over size."""
    for name in ds["scenario"].values:
        row = ds.sel(scenario=name, component="all", slowdown=slowdown)
        y, (low, high) = 100 * row["exceeds"].values, 100 * row["exceeds_interval"].values.T
        error = np.maximum([y - low, high - y], 0)
        ax.errorbar(row["size"], y, yerr=error, fmt="o-", markersize=3, capsize=2, label=str(name))
    ax.set(xscale="log", xlabel="GPUs", ylabel=f"steps over +{slowdown:.0%} (%)")
    ax.legend()
    return label_source(ax, ds)


def shares(ds: xr.Dataset, ax):
    """Plot the shares of components in p95: alone, last and Shapley (`prism.ablate`)."""
    places = np.arange(ds.sizes["component"])
    for i, name in enumerate(("alone", "shapley", "last")):
        y, (low, high) = 1e3 * ds[name].values, 1e3 * ds[f"{name}_interval"].values.T
        error = np.maximum([y - low, high - y], 0)
        ax.errorbar(
            places + 0.2 * (i - 1), y, yerr=error, fmt="o", markersize=3, capsize=2, label=name
        )
    ax.axhline(0, color="0.5", linewidth=0.6)
    ax.set_xticks(places, ds["component"].values)
    ax.set(ylabel="added to p95 (ms)")
    ax.legend()
    return label_source(ax, ds)


def savings(ds: xr.Dataset, ax, most: int = 8):
    """p95 saved if ops never varied, the largest first (`prism.attribution.savings`)."""
    top = ds.isel(signature=slice(most))
    x, (low, high) = 1e3 * top["saved"].values, 1e3 * top["saved_interval"].values.T
    places = np.arange(x.size)[::-1]
    ax.errorbar(
        x, places, xerr=np.maximum([x - low, high - x], 0), fmt="o", markersize=3, capsize=2
    )
    ax.axvline(0, color="0.5", linewidth=0.6)
    ax.set_yticks(places, top["signature"].values)
    ax.set(xlabel="p95 saved (ms)")
    return label_source(ax, ds)


def heatmap(ds: xr.Dataset, ax):
    """p95 saved by place and kind of op (`prism.attribution.savings_by_place`), kinds that save most first."""
    order = np.argsort(-np.nanmax(np.abs(ds["saved"].values), axis=0), kind="stable")
    values = 1e3 * ds["saved"].values[:, order]
    most = np.nanmax(np.abs(values))
    digits = 0 if most >= 100 else 1 if most >= 10 else 2
    sns.heatmap(
        values, ax=ax, cmap="vlag", center=0.0, annot=values.size <= 80, fmt=f".{digits}f", cbar_kws={"label": "p95 saved (ms)"},
        xticklabels=ds["kind"].values[order], yticklabels=ds["place"].values, annot_kws={"size": 5},
    )  # fmt: skip
    ax.grid(False)
    ax.tick_params("x", rotation=60)
    ax.tick_params("y", rotation=0)
    plt.setp(ax.get_xticklabels(), ha="right", rotation_mode="anchor")
    return label_source(ax, ds)


def position_costs(by_label, ax):
    """Increase of p95 over the share of the longest path of what the bad node holds; one colour a label. `by_label` maps
    labels to Datasets of `prism.whatif.position_costs`."""
    for i, (label, ds) in enumerate(by_label.items()):
        y, (low, high) = 100 * ds["increase"].values, 100 * ds["increase_interval"].values.T
        error = np.maximum([y - low, high - y], 0)
        ax.errorbar(
            100 * ds["path_share"].values, y, yerr=error, fmt="o", markersize=3, capsize=2, color=f"C{i}", label=label,
        )  # fmt: skip
    ax.set(xlabel="stage's share of the longest path (%)", ylabel="increase of p95 (%)")
    ax.legend()
    return label_source(ax, ds)


def distance(ds: xr.Dataset, what: str, ax):
    """Increase of p95 over bandwidth, a line a jitter (`prism.whatif.split_cost`, at its first latency); `what` was cut."""
    for jitter in ds["jitter"].values:
        row = ds.isel(latency=0).sel(jitter=jitter)
        y, (low, high) = 100 * row["increase"].values, 100 * row["increase_interval"].values.T
        error = np.maximum([y - low, high - y], 0)
        at = row["bandwidth"] / 1e9
        ax.errorbar(at, y, yerr=error, fmt="o-", markersize=3, capsize=2, label=f"cv {jitter:g}")
    ax.set(xscale="log", yscale="log", xlabel="bandwidth (GB/s)", ylabel="increase of p95 (%)")
    ax.legend()
    return label_source(ax, ds, what)


def increases(ds: xr.Dataset, ax):
    """``increase(scenario)`` with its interval, in per cent. A scenario called ``place, kind`` is put
    at its place, in the colour of its kind."""
    labels = [str(s).partition(", ")[::2] for s in ds["scenario"].values]
    places, kinds = (list(dict.fromkeys(part)) for part in zip(*labels, strict=True))
    for i, kind in enumerate(kinds):
        rows = [n for n, label in enumerate(labels) if label[1] == kind]
        y = 100 * ds["increase"].values[rows]
        low, high = 100 * ds["increase_interval"].values[rows].T
        # a percentile interval need not hold the estimate
        error = np.maximum([y - low, high - y], 0)
        x = np.array([places.index(labels[n][0]) for n in rows]) + 0.12 * (i - (len(kinds) - 1) / 2)
        ax.errorbar(x, y, yerr=error, fmt="o", markersize=3, capsize=2, label=kind)
    ax.axhline(0, color="0.5", linewidth=0.6)
    ax.set_xticks(range(len(places)), places)
    ax.set(ylabel="increase of p95 (%)")
    ax.legend()
    return label_source(ax, ds)


def jct_ratios(ds: xr.Dataset, overrun: str, ax):
    """Ratio of completion times under one overrun rule, by share of completions; one line a policy (`prism.cluster.ratios`)."""
    x = 100 * ds["quantile"].values
    for i, policy in enumerate(ds["policy"].values):
        row = ds.sel(policy=policy, overrun=overrun)
        y, (low, high) = row["ratio"].values, row["ratio_interval"].values.T
        error = np.nan_to_num(np.maximum([y - low, high - y], 0))
        ax.errorbar(x + i, y, yerr=error, fmt="o-", markersize=3, capsize=2, label=str(policy))
    ax.axhline(1, color="0.5", linewidth=0.6)
    ax.set(xlabel="first completions (%)", ylabel="mean JCT, p95 / point")
    ax.legend()
    return label_source(ax, ds, overrun)


def ratios_by_rule(ds: xr.Dataset, ax):
    """Ratio over all completions by overrun rule; one colour a policy."""
    rules = ds["overrun"].values.astype(str)
    places = np.arange(rules.size)
    for i, policy in enumerate(ds["policy"].values):
        row = ds.sel(policy=policy, quantile=1.0)
        y, (low, high) = row["ratio"].values, row["ratio_interval"].values.T
        error = np.nan_to_num(np.maximum([y - low, high - y], 0))
        at = places + 0.12 * (i - (ds.sizes["policy"] - 1) / 2)
        ax.errorbar(at, y, yerr=error, fmt="o", markersize=3, capsize=2, label=str(policy))
    ax.axhline(1, color="0.5", linewidth=0.6)
    ax.set_xticks(places, rules, rotation=30, ha="right")
    ax.set(ylabel="mean JCT, p95 / point, all")
    return label_source(ax, ds)
