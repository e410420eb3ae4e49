"""A synthetic fleet with stated spreads, for where nothing was measured."""

from __future__ import annotations

import numpy as np
import xarray as xr
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator
from scipy import stats

from prism.base import schema
from prism.base.presets import with_preset
from prism.base.specs import Spec


class Kernel(Spec):
    """A micro-benchmark of the synthetic reference fleet.

    `spatial_spread` and `temporal_spread` are (max - min) / median, over devices and over
    `temporal_trials` runs of one device.
    """

    median_s: PositiveFloat
    spatial_spread: NonNegativeFloat
    temporal_spread: NonNegativeFloat


class Clocks(Spec):
    """SM clock, power and why clocks were held back, of the synthetic reference fleet.

    Spreads are max - min over all runs; `thermal_share` is that of software thermal limits among runs whose clock is
    below the median, the power cap the rest.
    """

    sm_mhz: PositiveFloat
    spread_mhz: PositiveFloat
    power_w: PositiveFloat
    spread_w: PositiveFloat
    thermal_share: float = Field(ge=0, le=1)


class ReferenceFleet(Spec):
    """Parameters of a synthetic fleet (`synthetic_fleet`)."""

    kind: str = Field(pattern="^synthetic fleet$")
    sources: str = "published ranges (prism/presets/fleets.yaml)"
    gpus: PositiveInt = Field(ge=2)
    gpus_per_node: PositiveInt
    trials: PositiveInt = Field(ge=3)
    temporal_trials: PositiveInt = Field(ge=3)
    seed: int
    kernels: dict[str, Kernel] = Field(min_length=1)
    clocks: Clocks | None = None

    @classmethod
    def preset(cls, name: str, **changes: object) -> ReferenceFleet:
        """Of V100, A100, H100 or H200 (``prism/presets/fleets.yaml``), with some parameters changed.

        Examples
        --------
        >>> ReferenceFleet.preset("h200", gpus=16).gpus
        16
        """
        return cls.model_validate({"preset": name} | changes)

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, given: object) -> object:
        return with_preset("fleets", given)


def synthetic_fleet(spec: ReferenceFleet) -> xr.Dataset:
    """A synthetic fleet with stated spreads: for examples and tests, not evidence.

    ``duration = median (1 + spatial_g + temporal_gt)``. Spatial effects are Normal, scaled so that the
    spread over devices of the noise-free durations is exactly the stated one; temporal effects are Normal with the standard deviation for which the expected range of
    `temporal_trials` runs is the stated spread.

    Returns
    -------
    Dataset
        As `read_fleet`, with source ``synthetic``.
    """
    rng = np.random.default_rng(spec.seed)
    unit_range = _expected_normal_range(spec.temporal_trials)
    durations = []
    for kernel in spec.kernels.values():
        z = rng.standard_normal(spec.gpus)
        spatial = (z - np.median(z)) * kernel.spatial_spread / np.ptp(z)
        noise = rng.standard_normal((spec.gpus, spec.trials)) * kernel.temporal_spread / unit_range
        durations.append(kernel.median_s * (1.0 + spatial[:, None] + noise))
    duration = schema.finite_durations(durations, "synthetic fleet", positive=True)
    gpu = np.arange(spec.gpus)
    dims = ("signature", "gpu", "trial")
    readings = {} if spec.clocks is None else _readings(spec.clocks, duration, rng)
    return schema.dataset(
        {"duration": (dims, duration)} | {k: (dims, v) for k, v in readings.items()},
        coords={
            "signature": np.array(list(spec.kernels)),
            "gpu": np.array([f"gpu-{g:04d}" for g in gpu]),
            "node": ("gpu", np.array([f"node-{g // spec.gpus_per_node:03d}" for g in gpu])),
        },
        made_by="prism.measure.fleet.synthetic_fleet",
        source="synthetic",
        seed=spec.seed,
        provenance={"parameters": spec.model_dump()},
    )


def _readings(
    clocks: Clocks, duration: np.ndarray, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Slower runs have lower clocks, in proportion; power goes with the clock."""
    relative = duration / np.median(duration, axis=(1, 2), keepdims=True) - 1
    away = relative / np.ptp(relative, axis=(1, 2), keepdims=True)
    thermal = rng.random(duration.shape) < clocks.thermal_share
    return {
        "clock_sm": clocks.sm_mhz - clocks.spread_mhz * away,
        "power": clocks.power_w - clocks.spread_w * away,
        "throttle": np.where(away > 0, np.where(thermal, float(0x20), float(0x4)), 0.0),
    }


def _expected_normal_range(n: int) -> float:
    """Expected range of n standard normals: 2 E[max] = 2 n int z phi(z) Phi(z)^(n-1) dz."""
    z = np.linspace(-9.0, 9.0, 20001)
    density = n * stats.norm.pdf(z) * np.exp((n - 1) * stats.norm.logcdf(z))
    return float(2 * np.trapezoid(z * density, z))
