"""From isolated measurements to a step model: matrix products and collectives of one's own cluster, no trace.

The PRISM paper's first way to get pools. An op takes what was measured at its size, interpolated between the sizes
next to it; where it lies outside of what was measured, that is said.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import xarray as xr

from prism.base import schema
from prism.context.analytic import check_memory
from prism.context.analytic_model import assumed_coupling
from prism.context.context import Context, StageTimes
from prism.context.parts import Part
from prism.context.step_graph import StepGraph
from prism.measure import fleet as _fleet
from prism.model.coupling import Coupling, Loading
from prism.model.pools import DurationPool, Empirical, Fixed, Scaled, Shifted
from prism.model.signature import PoolKey
from prism.model.step_model import StepModel

#: quantiles at which measured distributions are interpolated
LEVELS = (np.arange(200) + 0.5) / 200
#: collectives of which an op consists, by the end of its name without dashes
CONSISTS = {
    "reducescatterallgather": ("reducescatter", "allgather"), "allreduce": ("allreduce",), "allgather": ("allgather",),
    "reducescatter": ("reducescatter",), "alltoall": ("alltoall",), "sendrecv": ("sendrecv",),
}  # fmt: skip
#: what else a measurement may call it
ALIASES = {"pingpong": "sendrecv", "multipingpong": "sendrecv"}


@dataclass(frozen=True)
class Curve:
    """Quantiles of a duration against size.

    Attributes
    ----------
    size : ndarray (point,)
        Ascending, positive.
    quantiles : ndarray (point, level)
        Seconds, at `LEVELS`.
    """

    size: np.ndarray
    quantiles: np.ndarray

    def at(self, size: float) -> tuple[np.ndarray, float]:
        """Quantiles at a size, and how far it reaches.

        Linear in size between measured ones, which is exact for a start-up time and a rate; beyond the largest on the same line
        (in proportion, if there is one size only); below the smallest they stay.

        Returns
        -------
        quantiles : ndarray (level,), s
        reach : float
            ``size`` over the nearest measured one where it lies outside, 1 within.
        """
        last = self.size.size - 1
        if size <= self.size[0]:
            return self.quantiles[0], float(size / self.size[0])
        if last == 0:
            return self.quantiles[0] * size / self.size[0], float(size / self.size[0])
        i = min(int(np.searchsorted(self.size, size)), last)
        w = (size - self.size[i - 1]) / (self.size[i] - self.size[i - 1])
        below, above = self.quantiles[i - 1], self.quantiles[i]
        # larger ones take no less, and quantiles stay in order
        values = below + w * np.maximum(above - below, 0.0 if w > 1 else -np.inf)
        return np.maximum.accumulate(values), float(max(size / self.size[-1], 1.0))


def model_from_measurements(
    ctx: Context, *, gemm: xr.Dataset | None = None, collectives: xr.Dataset | None = None
) -> tuple[StepModel, xr.Dataset]:
    """A step model whose pools are measured ops.

    A compute op takes the sum of its matrix products, each at its FLOP, and its element-wise part by the GPU's memory bandwidth; it
    varies as its largest product does, devices and trials together. A collective takes what was measured of its kind, scope and
    number of ranks (the nearest measured number) at its bytes. What was not measured stays analytic.

    Where the graph writes every GPU out (`fold_tp` false or tp 1), the share of the variance that is between devices stays
    with the rank: some GPUs of a job are slow in every step.

    Parameters
    ----------
    ctx : Context
        With a model's shape (stage times say nothing of products).
    gemm : Dataset of `read_fleet`, optional
        With ``flop`` (columns ``m, n, k``).
    collectives : Dataset of `read_collectives`, optional

    Returns
    -------
    model : StepModel
        Source ``synthetic`` while anything is analytic or made up, else ``measured``.
    Dataset
        Per `signature` ``pool_mean``, ``analytic_mean``, s, and ``reach`` (of the largest product; 1 within what was
        measured), with the coordinate ``how``: measured, interpolated, extrapolated, other ranks, or analytic.

    Raises
    ------
    ValueError
        Nothing given; stage times; products without sizes.
    """
    if gemm is None and collectives is None:
        raise ValueError("nothing measured: give gemm, collectives or both")
    if isinstance(ctx.workload, StageTimes):
        raise ValueError("stage times know nothing of products and bytes; give a model's shape")
    check_memory(ctx)
    products = None if gemm is None else _product_curve(gemm)
    transfers = {} if collectives is None else _transfer_curves(collectives)
    step = StepGraph(ctx)
    pools, rows = {}, []
    for signature, part in step.parts.items():
        analytic = part.price(ctx.topology)
        pool, how, reach = _priced(ctx, part, products, transfers, analytic)
        pools[PoolKey(signature)] = pool
        rows.append((str(signature), pool.mean, analytic, reach, how))
    model = StepModel(step.dag, pools, assumed_coupling(ctx, step.dag))
    if gemm is not None and not (step.dag.width > 1).any():
        model = _with_ranks(model, gemm)
    sources = {d.attrs["source"] for d in (gemm, collectives) if d is not None}
    whole = all(r[-1] != "analytic" for r in rows) and sources == {"measured"}
    names, mean, expected, reaches, ways = zip(*rows, strict=True)
    return model.replace(source="measured" if whole else "synthetic"), schema.dataset(
        {
            "pool_mean": ("signature", np.array(mean)),
            "analytic_mean": ("signature", np.array(expected)),
            "reach": ("signature", np.array(reaches)),
        },
        coords={"signature": list(names), "how": ("signature", list(ways))},
        made_by="prism.context.model_from_measurements",
        source="measured" if whole else "synthetic",
        provenance={"of": [schema.provenance(d) for d in (gemm, collectives) if d is not None]},
    )


def _product_curve(gemm: xr.Dataset) -> Curve:
    if "flop" not in gemm.coords:
        raise ValueError("gemm does not say sizes: its table needs columns m, n and k")
    kinds = np.unique(gemm["dtype"].values) if "dtype" in gemm.coords else []
    if len(kinds) > 1:
        raise ValueError(
            f"gemm holds products in {', '.join(map(str, kinds))}: select one, gemm.isel(signature=gemm.dtype == {str(kinds[0])!r})"
        )
    flop = gemm["flop"].values
    sizes = np.unique(flop)
    rows = []
    for size in sizes:
        # every device weighs the same; shapes of equal FLOP are taken together
        per_device = [
            np.nanquantile(d[np.isfinite(d).any(axis=1)], LEVELS, axis=1)
            for d in gemm["duration"].values[flop == size]
        ]
        rows.append(np.quantile(np.concatenate(per_device, axis=1), LEVELS))
    return Curve(sizes, np.array(rows))


def _transfer_curves(collectives: xr.Dataset) -> dict[tuple[str, str], dict[int, Curve]]:
    """Curves by (kind, scope), then by number of ranks."""
    names = [_plain(str(c)) for c in collectives["collective"].values]
    absent = [c for c in ("ranks", "scope") if c not in collectives.coords]
    if absent:
        raise ValueError(
            f"collectives do not say their {' and '.join(absent)}: the table needs columns ranks and nodes"
        )
    scope, ranks = collectives["scope"].values.astype(str), collectives["ranks"].values
    size = collectives["message_bytes"].values
    points: dict[tuple[str, str, int], dict[float, list[np.ndarray]]] = {}
    for i, name in enumerate(names):
        x = collectives["duration"].values[i]
        here = points.setdefault((name, str(scope[i]), int(ranks[i])), {})
        if float(size[i]) in here:
            raise ValueError(
                f"collectives hold several configurations of {name}, {int(ranks[i])} ranks, {int(size[i])} B, which differ in more than "
                "these: select one by its coordinates (condition, transport, in_place and so on)"
            )
        here[float(size[i])] = [x[np.isfinite(x)]]
    out: dict[tuple[str, str], dict[int, Curve]] = {}
    for (name, where, members), by_size in points.items():
        sizes = sorted(s for s in by_size if s > 0)
        if sizes:
            quantiles = np.array([np.quantile(np.concatenate(by_size[s]), LEVELS) for s in sizes])
            out.setdefault((name, where), {})[members] = Curve(np.array(sizes), quantiles)
    return out


def _plain(name: str) -> str:
    plain = re.sub(r"[^a-z]", "", name.lower())
    return ALIASES.get(plain, plain)


def _priced(
    ctx: Context, part: Part, products: Curve | None, transfers: Mapping, analytic: float
) -> tuple[DurationPool, str, float]:
    """Pool of an op, how it was found, and how far it reaches."""
    if part.work is not None and products is not None and part.work.flops > 0:
        return _compute(ctx, part, products)
    if not part.is_compute:
        found = _communication(part, transfers)
        if found is not None:
            pool, how, reach = found
            more = part.then(ctx.topology) if part.then is not None else 0.0
            return (Shifted(pool, more) if more else pool), how, reach
    return Fixed(analytic), "analytic", 1.0


def _compute(ctx: Context, part: Part, products: Curve) -> tuple[DurationPool, str, float]:
    flops = part.work.products + part.work.scores
    found = [products.at(f) for f in flops]
    largest = int(np.argmax(flops))
    memory = part.work.traffic / (
        ctx.topology.efficiency.memory * ctx.topology.gpu.memory_bandwidth
    )
    mean = sum(float(q.mean()) for q, _ in found)
    shape, reach = found[largest]
    pool = _pool(shape, mean + memory)
    # the part by memory bandwidth varies along: a GPU that is slow is taken to be slow in both
    exact = all(np.isclose(f, products.size, rtol=1e-6).any() for f in flops)
    reaches = [r for _, r in found]
    inside = all(r == 1.0 for r in reaches)
    return pool, "measured" if exact else "interpolated" if inside else "extrapolated", reach


def _communication(part: Part, transfers: Mapping) -> tuple[DurationPool, str, float] | None:
    name = _plain(part.signature.op)
    kinds = next((of for end, of in CONSISTS.items() if name.endswith(end)), ())
    curves = [transfers.get((kind, part.signature.scope)) for kind in kinds]
    if not curves or any(c is None for c in curves):
        return None
    chosen = [min(c, key=lambda n: abs(np.log(n / max(part.ranks, 2)))) for c in curves]
    found = [c[n].at(part.size) for c, n in zip(curves, chosen, strict=True)]
    # one after the other, taken to be slow together
    quantiles, reach = sum(q for q, _ in found), max(r for _, r in found)
    if any(n != part.ranks for n in chosen):
        how = "other ranks"
    elif any(r != 1.0 for _, r in found):
        how = "extrapolated"
    else:
        exact = all(
            np.isclose(part.size, c[n].size).any() for c, n in zip(curves, chosen, strict=True)
        )
        how = "measured" if exact else "interpolated"
    return _pool(quantiles, float(quantiles.mean())), how, reach


def _pool(quantiles: np.ndarray, mean: float) -> DurationPool:
    """The shape of measured quantiles about a mean."""
    own = float(quantiles.mean())
    if own == 0 or np.ptp(quantiles) == 0:
        return Fixed(mean)
    return Scaled(Empirical(tuple(quantiles / own)), mean)


def _with_ranks(model: StepModel, gemm: xr.Dataset) -> StepModel:
    """Coupling in which differences between devices stay with the rank."""
    found = _fleet.characterise(gemm, resamples=10)
    spatial, temporal = found["spatial_component"].values, found["temporal_component"].values
    known = np.isfinite(spatial + temporal)
    if not known.any():
        return model
    share = float(np.mean(spatial[known] ** 2 / (spatial[known] ** 2 + temporal[known] ** 2)))

    loadings = {k: dict(v) for k, v in model.coupling.loadings.items()}
    for kind in {s.op for s in model.dag.signatures if s.role == "compute"}:
        levels = loadings.setdefault(kind, {})
        left = 1.0 - sum(v.share for level, v in levels.items() if level != "rank")
        levels["rank"] = Loading(persistent=float(np.sqrt(min(share, left))))
    return model.replace(coupling=Coupling(loadings))
