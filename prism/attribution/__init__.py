"""Where variability comes from: which component, which kernel, which machine; what would be saved, what may be spent."""

from prism.attribution.ablation import STATISTICS, ablate, partition
from prism.attribution.budgets import budget
from prism.attribution.kernels import saved_by, steadying
from prism.attribution.persistence import persistence

__all__ = ["STATISTICS", "ablate", "budget", "partition", "persistence", "saved_by", "steadying"]
