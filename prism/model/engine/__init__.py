"""The Monte Carlo engine: step models lowered to arrays, and the numba loops that draw them."""
