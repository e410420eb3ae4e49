"""The numba loops over a graph alone: order, rows of finish times, a pass with given durations."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True)
def propagate(pred_ptr, pred, gap, duration, ready, finish):
    """Forward pass: ``ready = max(finish of predecessors)``,
    ``finish = ready + gap + duration``; all arrays but the graph are (op, column)."""
    n_ops, columns = duration.shape
    for i in range(n_ops):
        for c in range(columns):
            t = 0.0
            for e in range(pred_ptr[i], pred_ptr[i + 1]):
                t = max(t, finish[pred[e], c])
            ready[i, c] = t
            finish[i, c] = t + gap[i, c] + duration[i, c]


@njit(cache=True)
def latest_finish(pred_ptr, pred, gap, duration, latest):
    """Backward pass: `latest`, (op, column), comes with the end of the step and leaves with the time by
    which each op has to finish, ``min (latest_j - duration_j - gap_j)`` over those that wait for it."""
    n_ops, columns = duration.shape
    for i in range(n_ops - 1, -1, -1):
        for e in range(pred_ptr[i], pred_ptr[i + 1]):
            for c in range(columns):
                bound = latest[i, c] - duration[i, c] - gap[i, c]
                if bound < latest[pred[e], c]:
                    latest[pred[e], c] = bound


@njit(cache=True)
def topological_order(n, succ_ptr, succ):
    """Kahn's algorithm, first-in first-out; shorter than `n` where there is a cycle."""
    waiting = np.zeros(n, np.int64)
    for e in range(succ.size):
        waiting[succ[e]] += 1
    order = np.empty(n, np.int64)
    tail = 0
    for i in range(n):
        if waiting[i] == 0:
            order[tail] = i
            tail += 1
    head = 0
    while head < tail:
        for e in range(succ_ptr[order[head]], succ_ptr[order[head] + 1]):
            waiting[succ[e]] -= 1
            if waiting[succ[e]] == 0:
                order[tail] = succ[e]
                tail += 1
        head += 1
    return order[:tail]


@njit(cache=True)
def live_slots(pred_ptr, pred):
    """Assign each op a row of finish times that is free again after its last successor.

    Returns
    -------
    slot (op,), number of slots, is_sink (op,)
    """
    n = pred_ptr.size - 1
    last_use = np.full(n, -1, np.int64)
    for i in range(n):
        for e in range(pred_ptr[i], pred_ptr[i + 1]):
            last_use[pred[e]] = i
    slot = np.empty(n, np.int32)
    free = np.empty(n, np.int32)
    n_free = 0
    n_slots = 0
    for i in range(n):
        for e in range(pred_ptr[i], pred_ptr[i + 1]):
            p = pred[e]
            if last_use[p] == i:
                free[n_free] = slot[p]
                n_free += 1
                last_use[p] = -2  # a duplicate edge must not free it twice
        if n_free:
            n_free -= 1
            slot[i] = free[n_free]
        else:
            slot[i] = n_slots
            n_slots += 1
        if last_use[i] == -1:  # a sink: nobody reads its row
            free[n_free] = slot[i]
            n_free += 1
    return slot, n_slots, last_use == -1
