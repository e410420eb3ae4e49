"""Latency of collectives against size, with its tail."""

from __future__ import annotations

import numpy as np
import xarray as xr

from prism.base import schema, stats

LEVELS = (0.05, 0.5, 0.95, 0.99)


def size_quantiles(measured: xr.Dataset, *, confidence: float = 0.95) -> xr.Dataset:
    """Quantiles of each configuration's times.

    Parameters
    ----------
    measured : Dataset of `read_collectives`
    confidence : float
        Of the intervals of quantiles, from order statistics (trials taken as independent); NaN where there are
        too few trials for it.

    Returns
    -------
    Dataset
        ``transfer_quantile(signature, quantile)``, s, at 0.05, 0.5, 0.95, 0.99 and 1 (the largest), with ``transfer_quantile_interval``; ``tail_ratio``,
        p99 / p50; ``cv``; ``count``. The coordinates of `measured`.

    Examples
    --------
    >>> ds = schema.dataset({"duration": (("signature", "trial"), [[1.0, 2.0, 3.0]])}, made_by="x", source="measured")
    >>> size_quantiles(ds)["transfer_quantile"].sel(quantile=0.5).values.tolist()
    [2.0]
    """
    rows = [row[np.isfinite(row)] for row in measured["duration"].values]
    quantiles = np.array([np.quantile(r, [*LEVELS, 1.0]) for r in rows])
    interval = np.array([[_interval(r, q, confidence) for q in (*LEVELS, 1.0)] for r in rows])
    p50, p99 = quantiles[:, 1], quantiles[:, 3]
    return schema.dataset(
        {
            "transfer_quantile": (("signature", "quantile"), quantiles),
            "transfer_quantile_interval": (("signature", "quantile", "ci_bound"), interval),
            "tail_ratio": (
                "signature",
                np.divide(p99, p50, out=np.full_like(p50, np.nan), where=p50 > 0),
            ),
            "cv": ("signature", np.array([_cv(r) for r in rows])),
            "count": ("signature", [r.size for r in rows]),
        },
        coords={k: v for k, v in measured.coords.items() if v.dims == ("signature",)}
        | {"quantile": [*LEVELS, 1.0], "ci_bound": ["lower", "upper"]},
        made_by="prism.measure.collectives.size_quantiles",
        source=measured.attrs["source"],
        provenance={**schema.provenance(measured), "confidence": confidence},
    )


def _interval(x: np.ndarray, q: float, confidence: float) -> tuple[float, float]:
    if q == 1.0:
        return np.nan, np.nan
    try:
        return stats.quantile_interval(x, q, confidence)
    except ValueError:
        return np.nan, np.nan


def _cv(x: np.ndarray) -> float:
    return float(x.std(ddof=1) / x.mean()) if x.size > 1 and x.mean() > 0 else np.nan
