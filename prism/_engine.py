"""The numba loops, on plain arrays and nothing else.

Randomness is counter-based: the uniform behind an op's duration in a draw is a pure function of
(seed, draw, op key). Per op, the map from the draw number to 64 bits is a bijection (an odd
multiple, an offset and an invertible mixer), so no two draws of one op can share a value by
construction, and neither threads, block size nor the other ops can change it.

Two kinds of table turn a uniform ``u`` into a duration without a logarithm:

- ``STEP``: the sorted samples of an empirical pool, picked by ``floor(u * n)``, which is the
  inverse of the empirical distribution function and exact;
- ``OCTAVE``: a quantile function on a grid that halves towards both tails. With
  ``v = min(u, 1 - u)`` the exponent and the first `CELL_BITS` mantissa bits of ``v`` *are* the
  index, and the rest of the mantissa is the weight of a linear interpolation. Cells shrink in
  proportion to the tail probability, so p and 1 - p are as accurate at 1e-6 as at 0.1.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

BLOCK = 256

STEP, OCTAVE = 0, 1
CELL_BITS = 5
OCTAVES = 40
NODES = (OCTAVES << CELL_BITS) + 2  # one beyond the last node, read with weight zero at u = 1/2

_EXP_SHIFT = 52 - CELL_BITS
_EXP_BASE = (1023 - (OCTAVES + 1)) << CELL_BITS
_FRACTION_MASK = np.uint64((1 << _EXP_SHIFT) - 1)
_FRACTION_UNIT = 1.0 / (1 << _EXP_SHIFT)
_SMALLEST_TAIL = 2.0 ** -(OCTAVES + 1)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_ONE_BITS = np.uint64(0x3FF0000000000000)
_HALF_STEP = 2.0**-53


def octave_tails() -> np.ndarray:
    """Tail probabilities ``v`` of the nodes of an octave table, increasing up to 1/2.

    Returns
    -------
    ndarray (NODES,), probabilities; the last one is padding
    """
    j = np.arange(NODES - 1)
    octave, cell = j >> CELL_BITS, j & ((1 << CELL_BITS) - 1)
    v = np.ldexp(1.0 + cell / (1 << CELL_BITS), octave - (OCTAVES + 1))
    return np.append(v, 0.5)


@njit(cache=True, inline="always")
def mix64(x):
    """An invertible 64-bit mixer (the finaliser of SplitMix64, Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


@njit(cache=True)
def draw_uniforms(key, first_draw, bits, u):
    """Fill `u` with the uniforms of draws ``first_draw, first_draw + 1, ...`` of one op.

    `bits` and `u` are two views of one buffer: 52 bits of the hash become the mantissa of a
    number in [1, 2). The half step keeps 0 and 1 out.
    """
    for b in range(u.size):
        counter = np.uint64(first_draw + b) * _GOLDEN + key
        bits[b] = (mix64(counter) >> np.uint64(12)) | _ONE_BITS
    for b in range(u.size):
        u[b] = (u[b] - 1.0) + _HALF_STEP


@njit(cache=True)
def add_step_durations(table, scale, shift, u, out):
    n = table.size
    for b in range(u.size):
        out[b] += shift + scale * table[int(u[b] * n)]


@njit(cache=True)
def add_octave_durations(table, scale, shift, bits, u, side, out):
    for b in range(u.size):
        upper = u[b] >= 0.5
        side[b] = NODES if upper else 0
        u[b] = max(1.0 - u[b] if upper else u[b], _SMALLEST_TAIL)
    for b in range(u.size):
        j = side[b] + np.int64(bits[b] >> np.uint64(_EXP_SHIFT)) - _EXP_BASE
        weight = (bits[b] & _FRACTION_MASK) * _FRACTION_UNIT
        out[b] += shift + scale * (table[j] + weight * (table[j + 1] - table[j]))


@njit(cache=True)
def add_durations(kind, table, scale, shift, key, first_draw, bits, u, side, out):
    """Add the durations of one op in a block of draws to `out` (its start times)."""
    if scale == 0.0:
        for b in range(out.size):
            out[b] += shift
        return
    draw_uniforms(key, first_draw, bits, u)
    if kind == STEP:
        add_step_durations(table, scale, shift, u, out)
    else:
        add_octave_durations(table, scale, shift, bits, u, side, out)


@njit(cache=True, parallel=True)
def simulate(
    pred_ptr, pred, slot, n_slots, is_sink, pool, kind, table_ptr, table, scale, shift, key,
    first_draw, draws,
):  # fmt: skip
    """Step times of a range of draws.

    Ops are in topological order. Finish times live in `n_slots` reusable rows (`live_slots`),
    so memory does not grow with the number of ops that are done.

    Returns
    -------
    ndarray (draws,), seconds
    """
    n_ops = slot.size
    step_time = np.zeros(draws)
    for block in prange((draws + BLOCK - 1) // BLOCK):
        lo = block * BLOCK
        width = min(BLOCK, draws - lo)
        finish = np.empty((n_slots, width))
        start = np.empty(width)
        u = np.empty(width)
        bits = u.view(np.uint64)
        side = np.empty(width, np.int64)
        out = step_time[lo : lo + width]
        for i in range(n_ops):
            start[:] = 0.0
            for e in range(pred_ptr[i], pred_ptr[i + 1]):
                ended = finish[slot[pred[e]]]
                for b in range(width):
                    start[b] = max(start[b], ended[b])
            p = pool[i]
            row = table[table_ptr[p] : table_ptr[p + 1]]
            add_durations(
                kind[p], row, scale[i], shift[i], key[i], first_draw + lo, bits, u, side, start
            )
            # the slot may be one that a predecessor has just given up: write it last
            finish[slot[i]] = start
            if is_sink[i]:
                for b in range(width):
                    out[b] = max(out[b], start[b])
    return step_time


@njit(cache=True)
def sample_durations(pool, kind, table_ptr, table, scale, shift, key, first_draw, out):
    """Durations (op, draw) with the very random numbers that `simulate` uses."""
    u = np.empty(out.shape[1])
    bits = u.view(np.uint64)
    side = np.empty(out.shape[1], np.int64)
    for i in range(out.shape[0]):
        p = pool[i]
        row = table[table_ptr[p] : table_ptr[p + 1]]
        out[i] = 0.0
        add_durations(kind[p], row, scale[i], shift[i], key[i], first_draw, bits, u, side, out[i])


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
    # sinks were freed above and predecessors marked -2, so only true sinks still hold -1
    return slot, n_slots, last_use == -1
