"""Pools, idle gaps, coupling and joint events fitted to measured steps."""
