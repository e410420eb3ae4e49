"""The numba loops, on the plain arrays of `prism.model.engine.arrays` and nothing else.

**Lanes.** A block holds some draws, each with all its replicas: lane = draw x replica. Every op is one
vector operation over the lanes; an op that joins replicas takes a maximum over each group of them.

**Randomness** is counter-based: 64 bits are a pure function of (key, draw, replica). The counter packs
draw and replica into one word without overlap, is multiplied by an odd number, offset, and mixed by
invertible steps: for each key a bijection of the counter, so no two (draw, replica) of an op can share
their bits by construction, and neither threads, block size nor other ops can change them.

**Tables** turn bits into durations without a logarithm. One bit is the side of the distribution, the
next 52 the tail probability ``v = f / 2`` of that side, f in (0, 1):

- ``STEP``: the sorted samples of an empirical pool, picked by ``floor(u n)``: exact;
- ``OCTAVE``: a quantile function on a grid that halves towards both tails. The exponent and the first
  `CELL_BITS` mantissa bits of f *are* the index, the rest is the weight of a linear interpolation. Cells
  shrink in proportion to the tail probability, so 1e-6 and 1 - 1e-6 are as accurate as 0.1;
- for coupled ops the bits become a normal score (an octave table), shared scores are added, and the sum
  is looked up on an even grid of scores: ``SCORE``, or ``SCORE_STEP`` for samples, by way of Phi;
- ``EVENT`` and ``EVENT_STEP``: with a probability p that is common to all ops of a kind in a draw, all of
  them take the upper p of their distributions, otherwise the lower 1 - p: marginals stay as they are.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from prism.model.engine.arrays import Scratch

CONSTANT, STEP, OCTAVE, SCORE, SCORE_STEP, EVENT, EVENT_STEP = range(7)

REPLICA_BITS = 20
CELL_BITS = 5
OCTAVES = 32
SIDE = (OCTAVES << CELL_BITS) + 1  # nodes of one side of an octave table

SCORE_CELLS_PER_UNIT = 64
SCORE_LIMIT = 8.0
SCORE_NODES = int(2 * SCORE_LIMIT * SCORE_CELLS_PER_UNIT) + 1

_U = np.uint64
_GOLDEN = _U(0x9E3779B97F4A7C15)
_MIX_1 = _U(0xBF58476D1CE4E5B9)
_MIX_2 = _U(0x94D049BB133111EB)
_ONE_BITS = _U(0x3FF0000000000000)
_WEIGHT_SHIFT = 52 - CELL_BITS
_WEIGHT_MASK = _U((1 << _WEIGHT_SHIFT) - 1)
_NODE_BASE = (1023 - OCTAVES) << CELL_BITS
_SMALLEST = 2.0**-OCTAVES
_LARGEST = 1.0 - 2.0**-53
_LAST_CELL = SCORE_NODES - 1.0 - 1e-9

#: lanes that a block aims at: large enough to pay for a call, small enough for the cache
LANES = 512


def octave_tails() -> np.ndarray:
    """Tail probabilities of the nodes of one side of an octave table, increasing to 1/2, (SIDE,)."""
    j = np.arange(SIDE)
    octave, cell = j >> CELL_BITS, j & ((1 << CELL_BITS) - 1)
    return 0.5 * np.ldexp(1.0 + cell / (1 << CELL_BITS), octave - OCTAVES)


def score_grid() -> np.ndarray:
    """Normal scores of the nodes of a score table, (SCORE_NODES,)."""
    return np.arange(SCORE_NODES) / SCORE_CELLS_PER_UNIT - SCORE_LIMIT


@njit(cache=True, inline="always")
def mix64(x):
    """An invertible 64-bit mixer (the finaliser of SplitMix64, Steele et al. 2014)."""
    x = (x ^ (x >> _U(30))) * _MIX_1
    x = (x ^ (x >> _U(27))) * _MIX_2
    return x ^ (x >> _U(31))


@njit(cache=True)
def counters(first_draw, draws_each, replica, out):
    """Packed counters of lanes, times the odd constant: draw-major, `replica` (R,) within a draw.
    `draws_each` consecutive draws share a number: 1, or those of a job for what stays with it."""
    width = replica.size
    for lane in range(out.size):
        number = _U((first_draw + lane // width) // draws_each)
        out[lane] = ((number << _U(REPLICA_BITS)) | _U(replica[lane % width])) * _GOLDEN


@njit(cache=True)
def random_bits(key, counter, bits):
    """Fill `bits` from a key and counters. A second key between the rounds keeps two ops apart even
    where their counters happen to run over the same numbers."""
    first = mix64(key)
    second = mix64(key + _GOLDEN)
    for b in range(bits.size):
        x = counter[b] + first
        x = ((x ^ (x >> _U(30))) * _MIX_1) ^ second
        x = (x ^ (x >> _U(27))) * _MIX_2
        bits[b] = x ^ (x >> _U(31))


@njit(cache=True)
def octave_values(table, bits, node, tail, out):
    """An octave table at random bits."""
    raw = tail.view(np.uint64)
    for b in range(bits.size):
        node[b] = np.int32(bits[b] & _U(1)) * SIDE
        raw[b] = (bits[b] >> _U(12)) | _ONE_BITS
    for b in range(bits.size):
        tail[b] = max(tail[b] - 1.0, _SMALLEST)
    interpolate_octave(table, node, tail, out)


@njit(cache=True)
def octave_values_at(table, u, node, tail):
    """An octave table at probabilities `u`, in place."""
    for b in range(u.size):
        node[b] = SIDE if u[b] >= 0.5 else 0
        tail[b] = max(min(2.0 * min(u[b], 1.0 - u[b]), _LARGEST), _SMALLEST)
    interpolate_octave(table, node, tail, u)


@njit(cache=True)
def interpolate_octave(table, side, tail, out):
    """An octave table at tails ``2 v`` in [`_SMALLEST`, 1) of a side (0 or `SIDE`); overwrites both.

    `tail` and its integer view share memory: the bits of the number are the index."""
    raw = tail.view(np.uint64)
    for b in range(out.size):
        side[b] += np.int32(np.int64(raw[b] >> _U(_WEIGHT_SHIFT)) - _NODE_BASE)
        raw[b] = ((raw[b] & _WEIGHT_MASK) << _U(CELL_BITS)) | _ONE_BITS
    for b in range(out.size):
        low = table[side[b]]
        out[b] = low + (tail[b] - 1.0) * (table[side[b] + 1] - low)


@njit(cache=True)
def step_values(samples, bits, out):
    n = _U(samples.size)
    for b in range(bits.size):
        # the side's bit flips the tail probability into the upper half
        flip = (_U(0) - (bits[b] & _U(1))) & _U(0xFFFFFFFF)
        bits[b] = (((bits[b] >> _U(33)) ^ flip) * n) >> _U(32)
    for b in range(bits.size):
        out[b] = samples[bits[b]]


@njit(cache=True)
def score_values(table, score, node, out):
    """Interpolate a table over normal scores."""
    for b in range(score.size):
        at = (score[b] + SCORE_LIMIT) * SCORE_CELLS_PER_UNIT
        at = min(max(at, 0.0), _LAST_CELL)
        node[b] = np.int32(at)
        score[b] = at - node[b]
    for b in range(score.size):
        low = table[node[b]]
        out[b] = low + score[b] * (table[node[b] + 1] - low)


@njit(cache=True)
def durations(draw, shared, i, scores, event_u, work, out):
    """Durations of op `i` over the lanes, before scale, shift and overrides, into `out`."""
    kind = draw.kind[i]
    bits, node, weight = work.bits, work.node, work.weight
    p = draw.table_of_op[i]
    table = draw.table[draw.table_ptr[p] : draw.table_ptr[p + 1]]
    if kind == CONSTANT:
        out[:] = 0.0
        return
    random_bits(draw.key[i], work.counter, bits)
    if kind == STEP:
        step_values(table, bits, out)
    elif kind == OCTAVE:
        octave_values(table, bits, node, weight, out)
    else:
        own, loading, row, event = draw.own[i], draw.loading[i], draw.row[i], draw.event[i]
        octave_values(shared.own_tables[draw.own_of[i]], bits, node, weight, out)
        for b in range(out.size):
            weight[b] = own * out[b]
        for level in range(loading.size):
            if loading[level] != 0.0:
                score = scores[row[level]]
                for b in range(out.size):
                    weight[b] += loading[level] * score[b]
        if kind == SCORE:
            score_values(table, weight, node, out)
        else:
            score_values(shared.phi, weight, node, out)
            if event >= 0:
                split_event(event_u[event], shared.event_p[event], out)
            if kind == EVENT:
                octave_values_at(table, out, node, weight)
            else:
                last = table.size - 1
                for b in range(out.size):
                    out[b] = table[min(np.int64(out[b] * table.size), last)]


@njit(cache=True)
def split_event(event_u, p, u):
    """Squeeze probabilities into the upper p where the event strikes, else into the lower 1 - p."""
    for b in range(u.size):
        u[b] = 1.0 - p * (1.0 - u[b]) if event_u[b] < p else (1.0 - p) * u[b]


@njit(cache=True)
def shared_scores(shared, first_draw, work, out):
    """Normal scores of every shared identity over the lanes; one that stays is drawn once a job."""
    counter = np.empty(out.shape[1], np.uint64)
    for i in range(shared.row_key.size):
        draws_each = shared.draws_per_job if shared.row_stays[i] else 1
        counters(first_draw, draws_each, shared.row_lane[i], counter)
        random_bits(shared.row_key[i], counter, work.bits)
        octave_values(shared.own_tables[0], work.bits, work.node, work.weight, out[i])


@njit(cache=True)
def event_uniforms(shared, scores, first_draw, replicas, work, out):
    """One uniform a draw for each kind of event, the same in all its lanes; small where it strikes. An event
    that goes with shared scores has a normal score of its own, to which they are added."""
    bits, node, weight = work.bits, work.node, work.weight
    loading = shared.event_loading
    counter = np.empty(out.shape[1], np.uint64)
    counters(first_draw, 1, np.zeros(replicas, np.int32), counter)
    for i in range(shared.event_key.size):
        random_bits(shared.event_key[i], counter, bits)
        if shared.event_own[i] == 1.0:
            for b in range(counter.size):
                out[i, b] = np.float64(bits[b] >> _U(11)) * 2.0**-53
            continue
        octave_values(shared.own_tables[0], bits, node, weight, out[i])
        for b in range(counter.size):
            weight[b] = shared.event_own[i] * out[i, b]
        for c in range(loading.shape[1]):
            if loading[i, c] != 0.0:
                score = scores[shared.event_row[i, c]]
                for b in range(counter.size):
                    weight[b] += loading[i, c] * score[b]
        for b in range(counter.size):
            weight[b] = -weight[b]
        score_values(shared.phi, weight, node, out[i])


@njit(cache=True)
def latest(finish, pred, slot, own_slot, start):
    """Maximum over predecessors' rows into `start`, which may itself be one of these rows."""
    shares = False
    for e in range(pred.size):
        shares |= slot[pred[e]] == own_slot
    if not shares:
        if pred.size == 0:
            start[:] = 0.0
            return
        start[:] = finish[slot[pred[0]]]
    for e in range(pred.size):
        if slot[pred[e]] != own_slot:
            ended = finish[slot[pred[e]]]
            for b in range(start.size):
                start[b] = max(start[b], ended[b])


@njit(cache=True)
def join_replicas(leader, start, spread):
    """Replace each lane's value by the maximum over its group within the draw, in place."""
    replicas = leader.size
    for first in range(0, start.size, replicas):
        spread[:replicas] = 0.0
        for r in range(replicas):
            spread[leader[r]] = max(spread[leader[r]], start[first + r])
        for r in range(replicas):
            start[first + r] = spread[leader[r]]


@njit(cache=True)
def override_lanes(replica, scale, shift, leader, duration):
    """Apply ``shift + scale T`` to some replicas; in a joined op to the whole group that they lead."""
    replicas = leader.size
    for k in range(replica.size):
        for r in range(replicas):
            if leader[r] == replica[k]:
                for lane in range(r, duration.size, replicas):
                    duration[lane] = shift[k] + scale[k] * duration[lane]


@njit(cache=True)
def forward(graph, draw, override, shared, first_draw, finish, busy, step_time):
    """One block: finish times by op and lane, step times by draw."""
    slot, grouping, leaders, component = graph.slot, graph.grouping, graph.leaders, graph.component
    lanes = finish.shape[1]
    replicas = leaders.shape[1]
    work = Scratch(
        np.empty(lanes, np.uint64), np.empty(lanes, np.int32), np.empty(lanes), np.empty(lanes, np.uint64)
    )  # fmt: skip
    duration = np.empty(lanes)
    counter_of = np.empty(1, np.int32)
    scores = np.empty((shared.row_key.size, lanes))
    shared_scores(shared, first_draw, work, scores)
    event_u = np.empty((shared.event_key.size, lanes))
    event_uniforms(shared, scores, first_draw, replicas, work, event_u)
    current = -1
    for i in range(slot.size):
        leader = leaders[grouping[i]]
        # lanes of a template count replicas; an op of an unrolled graph carries its own number
        wanted = grouping[i] if replicas > 1 else -2 - graph.replica[i]
        if wanted != current:
            if replicas > 1:
                counters(first_draw, 1, leader, work.counter)
            else:
                counter_of[0] = graph.replica[i]
                counters(first_draw, 1, counter_of, work.counter)
            current = wanted
        begin = finish[slot[i]]
        before = graph.pred[graph.pred_ptr[i] : graph.pred_ptr[i + 1]]
        latest(finish, before, slot, slot[i], begin)
        if grouping[i] > 0:
            join_replicas(leader, begin, duration)
        durations(draw, shared, i, scores, event_u, work, duration)
        factor, constant = draw.scale[i], draw.shift[i]
        if override.ptr[i + 1] > override.ptr[i]:
            for b in range(lanes):
                duration[b] = constant + factor * duration[b]
            factor, constant = 1.0, 0.0
            a, z = override.ptr[i], override.ptr[i + 1]
            override_lanes(
                override.replica[a:z], override.scale[a:z], override.shift[a:z], leader, duration
            )
        for b in range(lanes):
            begin[b] += constant + factor * duration[b]
        if busy.size:
            for b in range(lanes):
                if leader[b % replicas] == b % replicas:  # one transfer for all that it joins
                    busy[b // replicas, component[i]] += constant + factor * duration[b]
        if graph.is_sink[i]:
            for b in range(lanes):
                step_time[b // replicas] = max(step_time[b // replicas], begin[b])


@njit(cache=True)
def walk_back(graph, finish, lane, critical, exposed):
    """Follow the longest path of one draw from its end: who was waited for. Ties go to the first."""
    leaders = graph.leaders
    replicas = leaders.shape[1]
    op, at, best = -1, -1, -1.0
    for i in range(graph.slot.size):
        if graph.is_sink[i]:
            for r in range(replicas):
                if finish[i, lane + r] > best:
                    op, at, best = i, r, finish[i, lane + r]
    while op >= 0:
        leader = leaders[graph.grouping[op]]
        next_op, next_at, ready = -1, -1, 0.0
        for r in range(replicas):
            if leader[r] == leader[at]:
                for e in range(graph.pred_ptr[op], graph.pred_ptr[op + 1]):
                    ended = finish[graph.pred[e], lane + r]
                    if next_op < 0 or ended > ready:
                        next_op, next_at, ready = graph.pred[e], r, ended
        critical[op] += 1
        exposed[graph.component[op]] += finish[op, lane + at] - ready
        op, at = next_op, next_at


@njit(cache=True, nogil=True)
def simulate(graph, draw, override, shared, n_slots, first_draw, block, chosen, outputs):
    """Fill the arrays of `outputs` that have elements, a block of draws at a time.

    Runs without the interpreter's lock: several threads fill several ranges of draws.
    """
    step_time, finish_out, busy = outputs.step_time, outputs.finish, outputs.busy
    replicas = graph.leaders.shape[1]
    step_time[:] = 0.0
    for lo in range(0, step_time.size, block):
        width = min(block, step_time.size - lo)
        finish = np.empty((n_slots, width * replicas))
        block_busy = busy[lo : lo + width] if busy.shape[0] else busy
        forward(
            graph, draw, override, shared, first_draw + lo, finish, block_busy,
            step_time[lo : lo + width],
        )  # fmt: skip
        for c in range(chosen.size):
            row = finish[graph.slot[chosen[c]]]
            for b in range(width * replicas):
                d = lo + b // replicas
                finish_out[c, d] = max(finish_out[c, d], row[b])
        if outputs.critical.size:
            for d in range(width):
                walk_back(graph, finish, d * replicas, outputs.critical, outputs.exposed[lo + d])
