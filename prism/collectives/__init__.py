"""Measured collectives and transfers: reading what others and `prism bench collective` wrote, latency by size."""

from prism.collectives.latency import latency
from prism.collectives.reading import CollectivesError, read_collectives

__all__ = ["CollectivesError", "latency", "read_collectives"]
