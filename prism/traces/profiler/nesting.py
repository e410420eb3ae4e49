"""Nesting of CPU ops: the op that a moment lies in, since ops of one thread nest like brackets."""

from __future__ import annotations

import numpy as np
from numba import njit


def innermost(
    thread: np.ndarray,
    start: np.ndarray,
    end: np.ndarray,
    at_thread: np.ndarray,
    at: np.ndarray,
) -> np.ndarray:
    """Index of the innermost interval of the same thread that holds each moment, -1 for none.

    Parameters
    ----------
    thread, start, end : ndarray (interval,), int
    at_thread, at : ndarray (moment,), int

    Examples
    --------
    >>> t = np.zeros(2, int)
    >>> innermost(t, np.array([0, 2]), np.array([10, 4]), np.zeros(3, int), np.array([3, 5, 11]))
    array([ 1,  0, -1])
    """
    out = np.full(at.size, -1, np.int64)
    # of two that begin together the longer is outside
    order = np.lexsort((-end, start, thread))
    for t in np.unique(at_thread):
        own = order[thread[order] == t]
        asked = np.flatnonzero(at_thread == t)
        if own.size:
            found = _innermost(start[own], end[own], at[asked])
            out[asked] = np.where(found >= 0, own[found], -1)
    return out


@njit(cache=True)
def _innermost(start, end, at):
    n = start.size
    parent = np.full(n, -1, np.int64)
    stack = np.empty(n, np.int64)
    depth = 0
    for i in range(n):
        while depth > 0 and end[stack[depth - 1]] < end[i]:
            depth -= 1
        if depth > 0:
            parent[i] = stack[depth - 1]
        stack[depth] = i
        depth += 1
    out = np.empty(at.size, np.int64)
    for q in range(at.size):
        i = np.searchsorted(start, at[q], side="right") - 1
        while i >= 0 and end[i] < at[q]:
            i = parent[i]
        out[q] = i
    return out
