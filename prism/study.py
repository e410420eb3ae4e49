"""A study: its root, parameters and files, shared by notebooks and pipeline.

Every path in a study is relative to its root, wherever a notebook was opened from. Files are
written under a temporary name and renamed, so a run that fails leaves the earlier result as it was.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import xarray as xr
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from prism import traces
from prism.base import schema
from prism.base.files import write_atomically
from prism.base.specs import Spec, read_spec
from prism.base.stats import min_draws
from prism.cluster import jobs as _jobs
from prism.cluster.runtimes import LARGEST_CV
from prism.context import analytic_model
from prism.context.context import Context, read_context
from prism.measure.collectives import read_collectives
from prism.measure.fleet import read_fleet
from prism.model.model_file import read_model, to_dataset
from prism.model.step_model import StepModel

#: enough for a guarantee and for both ends of an interval of p95
Draws = Annotated[int, Field(ge=min_draws(0.95, confidence=0.975))]


class FleetParams(Spec):
    """`path`: fleet measurements, or the YAML of a synthetic fleet; `own`: runs of one device over and over;
    `collectives`: measured collectives."""

    path: str
    own: str
    collectives: str


class PoolsParams(Spec):
    """Pool fitting: which fleet kernel stands for compute, resamples for p-values."""

    kernel: str | None
    bootstrap: int = Field(ge=99)


class WorkloadParams(Spec):
    """`path`: a trace, or the YAML of a context; for a trace the GPUs of a node."""

    path: str
    gpus_per_node: PositiveInt


class MontecarloParams(Spec):
    """Number of simulated steps."""

    draws: Draws


class ValidationParams(Spec):
    """`path`: a trace, or a folder of several; simulated steps, the length of bootstrap blocks of measured
    steps, and blocks left out in turn."""

    path: str
    gpus_per_node: PositiveInt
    draws: Draws
    block: PositiveInt
    folds: int = Field(ge=2)


class HotNodeParams(Spec):
    """Simulated steps per scenario, and the fleet quantile that the hot node runs at."""

    draws: Draws
    at: float = Field(gt=0.5, lt=1)


class AttributionParams(Spec):
    """Simulated steps of each ablation, and how much slower the node is that is to be placed."""

    draws: Draws
    slow_node: float = Field(gt=1)


class WhatIfsParams(Spec):
    """`path`: the YAML of a context; pipeline schedules, factors on the compute of one bad node, bandwidths of a link
    between two sites in byte/s, its latency in s and the cvs of what crosses it, draws."""

    path: str
    compute_cv: PositiveFloat
    schedules: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    slow_node: Annotated[tuple[PositiveFloat, ...], Field(strict=False, min_length=1)]
    bandwidths: Annotated[tuple[PositiveFloat, ...], Field(strict=False, min_length=2)]
    latency_s: NonNegativeFloat
    jitters: Annotated[tuple[NonNegativeFloat, ...], Field(strict=False, min_length=1)]
    draws: Draws


class ScaleParams(Spec):
    """`path`: the YAML of a context; numbers of replicas, the slow-down whose share is shown, draws."""

    path: str
    dp: Annotated[tuple[PositiveInt, ...], Field(strict=False, min_length=2)]
    slowdown: PositiveFloat
    draws: Draws


class SchedulingParams(Spec):
    """Job log and cluster, how it is made denser, the cv of run times, the number of seeds, what checkpoints cost, policies
    and overrun rules."""

    path: str
    start_day: NonNegativeFloat
    compress: PositiveFloat
    policies: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    overruns: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    growth: float = Field(gt=1)
    gpus: PositiveInt
    rounds: PositiveInt
    round_s: PositiveFloat
    cv: float = Field(ge=0, le=LARGEST_CV)
    seeds: int = Field(ge=2)
    checkpoint_interval_s: PositiveFloat
    checkpoint_write_s: NonNegativeFloat
    restart_s: NonNegativeFloat
    failures_per_node_day: NonNegativeFloat


class Params(Spec):
    """The whole of ``params.yaml``; each stage is handed only the blocks that it declares."""

    seed: int = Field(ge=0, lt=2**63)
    fleet: FleetParams
    pools: PoolsParams
    workload: WorkloadParams
    montecarlo: MontecarloParams
    validation: ValidationParams
    hot_node: HotNodeParams
    scheduling: SchedulingParams
    scale: ScaleParams
    attribution: AttributionParams
    what_ifs: WhatIfsParams


def root() -> Path:
    """The study's folder: ``PRISM_ROOT``, or the nearest folder upwards that holds both ``dvc.yaml``
    and ``params.yaml``.

    Raises
    ------
    FileNotFoundError
        If there is none.
    """
    if "PRISM_ROOT" in os.environ:
        return Path(os.environ["PRISM_ROOT"]).resolve()
    here = Path.cwd().resolve()
    for folder in (here, *here.parents):
        if (folder / "dvc.yaml").is_file() and (folder / "params.yaml").is_file():
            return folder
    raise FileNotFoundError(
        "not inside a PRISM study: no folder from here upwards holds dvc.yaml and params.yaml; "
        "set PRISM_ROOT"
    )


def path(name: str | Path) -> Path:
    """A path of the study: absolute as it is, otherwise from the root."""
    return root() / name


def read_params() -> Params:
    """``params.yaml`` of the study, validated. Raises `SpecError` naming every fault."""
    return _named("params.yaml", partial(read_spec, Params))


def open_fleet(name: str) -> xr.Dataset:
    """Fleet of the study: measurements, a synthetic description, or an earlier stage's ``.nc``."""
    return _named(name, read_fleet)


def open_collectives(name: str) -> xr.Dataset:
    """Measured collectives of the study."""
    return _named(name, read_collectives)


def open_jobs(name: str) -> xr.Dataset:
    """Job log of the study."""
    return _named(name, _jobs.read_jobs)


def open_context(name: str) -> Context:
    """Context of the study."""
    return _named(name, read_context)


def open_model(
    name: str, *, fleet: str | None = None, kernel: str | None = None, gpus_per_node: int = 8
) -> StepModel:
    """Step model of the study.

    Parameters
    ----------
    name : str
        ``.nc`` of an earlier stage; ``.yaml`` of a context, whose compute then varies like `kernel`
        of `fleet`; otherwise a trace.
    """
    match Path(name).suffix:
        case ".nc":
            return _named(name, read_model)
        case ".yaml" | ".yml":
            variability = open_fleet(fleet) if fleet else None
            context = _named(name, read_context)
            return analytic_model.model_from_context(
                context, variability=variability, kernel=kernel
            )
        case _:
            trace = _named(name, traces.read_trace)
            return traces.model_from_trace(trace, gpus_per_node=gpus_per_node)


def open_traces(name: str) -> dict[str, xr.Dataset]:
    """Traces of the study by name: one, or one for each folder in a folder of folders."""

    def read(file: Path) -> dict[str, xr.Dataset]:
        inside = (
            sorted(f for f in file.iterdir() if not f.name.startswith(".")) if file.is_dir() else []
        )
        if inside and all(f.is_dir() for f in inside):
            return {f.name: traces.read_trace(f) for f in inside}
        return {file.name: traces.read_trace(file)}

    return _named(name, read)


def save(
    stem: str,
    dataset: xr.Dataset | StepModel,
    *,
    metrics: Mapping[str, Any] | None = None,
    figure=None,
) -> None:
    """Write results beside each other: ``stem.nc``, ``stem.json``, ``stem.pdf`` and ``stem.png``.

    Equal content gives equal bytes: no time stamps, keys sorted, metrics to 10 significant digits.
    All files are written under temporary names before the first is renamed: all or none.

    Parameters
    ----------
    stem : str
        Path from the study's root, without extension.
    dataset : Dataset in the vocabulary, or StepModel
    metrics : mapping, optional
        Numbers, strings or nested mappings of them; NaN is stored as null.
    figure : matplotlib Figure, optional
    """
    ds = to_dataset(dataset) if isinstance(dataset, StepModel) else schema.check(dataset)
    writers: dict[str, Callable[[Path], Any]] = {
        ".nc": lambda p: ds.to_netcdf(p, engine="h5netcdf")
    }
    if metrics is not None:
        text = json.dumps(_plain(metrics), indent=2, sort_keys=True, allow_nan=False) + "\n"
        writers[".json"] = lambda p: p.write_text(text, "utf-8")
    if figure is not None:
        writers[".pdf"] = lambda p: figure.savefig(p, format="pdf", metadata={"CreationDate": None})
        writers[".png"] = lambda p: figure.savefig(p, format="png", metadata={"Software": None})
    target = path(stem)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically({target.with_name(target.name + suffix): w for suffix, w in writers.items()})


def _plain(value: Any) -> Any:
    """JSON values: mappings with string keys, numbers rounded, NaN as null."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, str) or value is None:
        return value
    value = np.asarray(value)
    if value.ndim:
        return [_plain(v) for v in value]
    number = value.item()
    if isinstance(number, float):
        return float(f"{number:.10g}") if math.isfinite(number) else None
    return number


def _named(name: str, read: Callable[[Path], Any]) -> Any:
    """`read` a file of the study, and call it in messages what the user called it."""
    try:
        return read(path(name))
    except (ValueError, OSError) as fault:
        message = str(fault).replace(str(path(name)), name)
        if not isinstance(fault, ValueError) or not fault.args or len(fault.args) > 1:
            raise
        raise type(fault)(message) from None
