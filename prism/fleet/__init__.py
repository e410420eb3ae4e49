"""Fleets of devices: reading measurements, and how much devices differ from each other and in time.

Spatial variability is between devices, temporal variability over the runs of one device.
"""

from prism.fleet.characters import characterise, relations
from prism.fleet.reading import FleetError, read_fleet, together
from prism.fleet.reference import ReferenceFleet, synthetic_fleet
from prism.fleet.spreads import device_medians, relative_pool, variability

__all__ = [
    "FleetError", "ReferenceFleet", "characterise", "device_medians", "read_fleet", "relations", "relative_pool",
    "synthetic_fleet", "together", "variability",
]  # fmt: skip
