"""Times and ids of profiler JSON as int64, without passing through a float that cannot hold them."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation

import numpy as np

#: microseconds up to which a float64 holds whole nanoseconds (its spacing there is 0.98 ns)
EXACT_AS_FLOAT = 2.0**43
LONGEST_NS = 1 << 61


def integers(values: list[int | None]) -> np.ndarray:
    """int64; ids beyond it keep their low 63 bits, which still tells them apart."""
    try:
        return np.array([-1 if v is None else v for v in values], np.int64)
    except OverflowError:
        mask = (1 << 63) - 1
        return np.array([-1 if v is None else v & mask if v > mask else max(v, -mask)
                         for v in values], np.int64)  # fmt: skip


def needs_exact(times: list) -> bool:
    """Tell whether a float64 would round some decimal time by more than half a nanosecond."""
    if not times or -EXACT_AS_FLOAT < min(times) <= max(times) < EXACT_AS_FLOAT:
        return False
    return any(t.__class__ is float and not -EXACT_AS_FLOAT < t < EXACT_AS_FLOAT for t in times)


def float_ns(microseconds: list) -> np.ndarray:
    """Convert to whole nanoseconds, exact below `EXACT_AS_FLOAT`."""
    x = np.array(microseconds, np.float64)
    x = np.where(np.isfinite(x) & (np.abs(x) < LONGEST_NS / 1000), x, 2.0 * LONGEST_NS / 1000)
    whole = np.floor(x)
    return whole.astype(np.int64) * 1000 + np.rint((x - whole) * 1000).astype(np.int64)


def exact_ns(microseconds: list) -> np.ndarray:
    """Convert decimals to whole nanoseconds, exactly."""

    def ns(t: Decimal) -> int:
        try:
            value = int((t * 1000).to_integral_value())
        except (InvalidOperation, ValueError, OverflowError):
            return 2 * LONGEST_NS - 1
        return max(min(value, 2 * LONGEST_NS - 1), -2 * LONGEST_NS + 1)

    return np.array([ns(t) for t in microseconds], np.int64)
