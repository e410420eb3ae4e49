"""A step model as a Dataset and back: graph, pools and nothing else.

Pools are stored in the form that the engine reads, ``shift + scale * base``, where the base is an
empirical sample or a family with its parameters. Nested wrappers thus come back as one: the same
distribution, written more simply.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import xarray as xr

from prism.base import schema
from prism.base.files import read_dataset, write_dataset
from prism.model import pools
from prism.model.coupling import Coupling, Loading
from prism.model.dag import PER_OP, WorkloadDAG
from prism.model.pools import DurationPool, Empirical, Fixed, MaxOf, Parametric, Scaled, Shifted
from prism.model.signature import PoolKey, Signature
from prism.model.step_model import StepModel

PARAMETERS = max(len(dataclasses.fields(c)) for c in pools.FAMILIES.values())
_SIGNATURE_FIELDS = ("op", "shape", "dtype", "role", "scope")


def to_dataset(model: StepModel) -> xr.Dataset:
    """Lossless Dataset of a model (see the module for what happens to wrappers).

    Raises
    ------
    ValueError
        For a model with scenario overrides: a scenario is code, save the model it starts from.
    """
    if model.overrides:
        raise ValueError("a model under a scenario cannot be stored; store the one before it")
    dag = model.dag
    sites = list(dag.sites)
    site_index = {s: i for i, s in enumerate(sites)} | {"": -1}
    signature_index = {s: i for i, s in enumerate(dag.signatures)}
    unused = [
        k for k in model.pools if k.signature not in signature_index or k.site not in site_index
    ]
    if unused:
        raise ValueError(f"pool {unused[0]} belongs to no op of the graph; drop it before storing")
    lowered = [pools.lower(p) for p in model.pools.values()]
    bases = list({id(x.base): x.base for x in lowered}.values())
    base_index = {id(b): i for i, b in enumerate(bases)}
    samples = [np.asarray(b.samples) if isinstance(b, Empirical) else np.empty(0) for b in bases]
    structure = {
        **{f"op_{f}": ("op", getattr(dag, f)) for f in PER_OP},
        "signature_text": (
            ("signature", "field"),
            np.array(
                [[getattr(s, f) for f in _SIGNATURE_FIELDS] for s in dag.signatures], dtype="U"
            ),
        ),
        "site_text": ("site", np.array(sites, dtype="U")),
        "edges_of_op": ("op", np.diff(dag.pred_ptr)),
        "edge_from": ("edge", dag.pred),
        "members_of_op": ("op", np.diff(dag.member_ptr)),
        "member_rank": ("member", dag.member),
        "node_of_rank": (("rank", "replica"), dag.node_of_rank),
        "leaders": (("grouping", "replica"), dag.leaders),
        "lanes": ((), dag.lanes),
        "pool_signature": ("pool", [signature_index[k.signature] for k in model.pools]),
        "pool_site": ("pool", [site_index[k.site] for k in model.pools]),
        "pool_position": ("pool", [k.position for k in model.pools]),
        "pool_base": ("pool", [base_index[id(x.base)] for x in lowered]),
        "pool_scale": ("pool", [x.scale for x in lowered]),
        "pool_shift": ("pool", [x.shift for x in lowered]),
        "pool_largest_of": ("pool", [x.largest_of for x in lowered]),
        "base_family": ("base", np.array([b.family for b in bases], dtype="U")),
        "base_parameter": (("base", "parameter"), np.array([_parameters(b) for b in bases])),
        "samples_of_base": ("base", [s.size for s in samples]),
        "sample": ("sample_index", np.concatenate(samples)),
    }
    return schema.dataset(
        structure,
        made_by="prism.write_model",
        source=model.source,
        provenance={
            "loadings": _loadings(model.coupling),
            "events": dict(model.coupling.events),
            "event_scores": {k: dict(v) for k, v in model.coupling.event_scores.items()},
        },
    )


def from_dataset(ds: xr.Dataset) -> StepModel:
    """The model that `to_dataset` stored."""
    signatures = tuple(Signature(*map(str, row)) for row in ds["signature_text"].values)
    sites = tuple(str(s) for s in ds["site_text"].values)
    dag = WorkloadDAG(
        signatures=signatures,
        sites=sites,
        **{f: ds[f"op_{f}"].values for f in PER_OP},
        pred_ptr=_pointers(ds["edges_of_op"].values),
        pred=ds["edge_from"].values,
        member_ptr=_pointers(ds["members_of_op"].values),
        member=ds["member_rank"].values,
        node_of_rank=ds["node_of_rank"].values,
        leaders=ds["leaders"].values,
        lanes=int(ds["lanes"]),
    )
    bases = _bases(ds)
    columns = (
        "pool_signature",
        "pool_site",
        "pool_position",
        "pool_base",
        "pool_scale",
        "pool_shift",
        "pool_largest_of",
    )
    stored = {}
    for s, site, position, base, scale, shift, n in zip(
        *(ds[c].values for c in columns), strict=True
    ):
        key = PoolKey(signatures[s], sites[site] if site >= 0 else "", int(position))
        stored[key] = _wrapped(bases[base], int(n), float(scale), float(shift))
    return StepModel(dag, stored, coupling=_coupling(ds), source=ds.attrs["source"])


def read_model(path: str | Path) -> StepModel:
    """Read a model that was saved as ``.nc``."""
    saved = read_dataset(path)
    if "op_signature" not in saved:
        raise ValueError(f"{path}: holds no graph, so it is no step model")
    return from_dataset(saved)


def write_model(model: StepModel, path: str | Path) -> None:
    """Write a model as ``.nc``, which `read_model` reads.

    Raises
    ------
    ValueError
        For a model with scenario overrides: a scenario is code, save the model it starts from.
    """
    write_dataset(to_dataset(model), path)


def _loadings(coupling: Coupling) -> dict:
    return {
        kind: {level: dataclasses.astuple(v) for level, v in levels.items()}
        for kind, levels in coupling.loadings.items()
    }


def _coupling(ds: xr.Dataset) -> Coupling:
    stored = schema.provenance(ds)
    loadings = {
        kind: {level: Loading(*v) for level, v in levels.items()}
        for kind, levels in stored["loadings"].items()
    }
    return Coupling(loadings, stored["events"], stored.get("event_scores", {}))


def _bases(ds: xr.Dataset) -> list[DurationPool]:
    ends = _pointers(ds["samples_of_base"].values)
    bases: list[DurationPool] = []
    for i, family in enumerate(ds["base_family"].values):
        parameters = ds["base_parameter"].values[i]
        if family == Empirical.family:
            bases.append(Empirical(tuple(ds["sample"].values[ends[i] : ends[i + 1]])))
        elif family == Fixed.family:
            bases.append(Fixed(float(parameters[0])))
        else:
            made = pools.FAMILIES[str(family)]
            count = len(dataclasses.fields(made))
            bases.append(made(*map(float, parameters[:count])))
    return bases


def _parameters(base: DurationPool) -> tuple[float, ...]:
    """Parameters of a family, padded to those of the largest."""
    has = isinstance(base, Parametric | Fixed)
    values = dataclasses.astuple(base) if has else ()
    return (*values, *[np.nan] * (PARAMETERS - len(values)))


def _wrapped(base: DurationPool, n: int, scale: float, shift: float) -> DurationPool:
    if scale == 0.0:
        return Fixed(shift)
    pool = base if n == 1 else MaxOf(base, n)
    pool = pool if scale == 1.0 else Scaled(pool, scale)
    return pool if shift == 0.0 else Shifted(pool, shift)


def _pointers(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
