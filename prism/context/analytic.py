"""Deterministic durations: compute by roofline, communication by latency and bandwidth.

A matrix product of f FLOP takes ``(f + half) / (matmul peak)``, an element-wise kernel
``bytes / (memory bandwidth)``, each with the efficiency of `prism.context.Efficiency`. Collectives move
``(n - 1) / n`` of their bytes through the narrowest link of a ring (twice in an all-reduce), or go up and down a
tree where that is faster (Thakur et al. 2005; Sanders et al. 2009). What layers hold is counted as in
Korthikanti et al. (2022), generalised to grouped keys, gated feed-forwards and experts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from prism.context.context import Context, Parallelism, StageTimes
from prism.context.topology import Topology
from prism.context.workload import Recommender, Workload

#: bytes of a 16-bit number
HALF = 2
#: bytes that Adam reads and writes for each weight: two moments and a master copy in 32 bits, read and
#: written, a 32-bit gradient read, a 16-bit weight written
ADAM_TRAFFIC = 30
#: bytes an attention score takes through memory where it is not kept in registers: written by the product, read and
#: written by softmax and by dropout, its mask, read by the next product
SCORE_TRAFFIC = 11


@dataclass(frozen=True)
class Work:
    """Work of a GPU between two collectives.

    Attributes
    ----------
    products : tuple of float
        FLOP of each matrix product.
    scores : tuple of float
        FLOP of products of attention scores, which have no weights.
    traffic : float
        Bytes of element-wise kernels.
    score_backward : float
        FLOP of the backward of scores over those of their forward: 2, or 2.5 where scores are not kept but computed anew
        (Dao et al. 2022).
    """

    products: tuple[float, ...] = ()
    scores: tuple[float, ...] = ()
    traffic: float = 0.0
    score_backward: float = 2.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.products + other.products,
            self.scores + other.scores,
            self.traffic + other.traffic,
            max(self.score_backward, other.score_backward),
        )

    @property
    def flops(self) -> float:
        """FLOP of all products."""
        return sum(self.products) + sum(self.scores)

    def seconds(self, topology: Topology) -> float:
        """By roofline, kernel after kernel."""
        gpu, e = topology.gpu, topology.efficiency
        flops = self.products + self.scores
        matrix = sum(f + e.matmul_half for f in flops) / (e.matmul * gpu.peak_flops)
        return matrix + self.traffic / (e.memory * gpu.memory_bandwidth)

    @property
    def backward_input(self) -> Work:
        """Gradients to the input: a product for each product, `score_backward` for each of scores, element-wise kernels
        twice over."""
        scores = tuple(self.score_backward * f for f in self.scores)
        return Work(self.products, scores, 2 * self.traffic)

    @property
    def backward_weights(self) -> Work:
        """Gradients to the weights: a product for each product."""
        return Work(self.products)


def attention_scores(w: Workload, p: Parallelism) -> Work:
    """Products of queries with keys and of scores with values, and what lies between."""
    pairs = p.microbatch_size * w.sequence**2 / p.cp
    heads = w.heads / p.tp
    # masked scores are skipped by flash attention and computed by the rest
    flops = 4 * pairs * heads * w.width * (0.5 if w.flash_attention else 1.0)
    traffic = 0.0 if w.flash_attention else SCORE_TRAFFIC * pairs * heads
    scores = (flops,) if w.flash_attention else (flops / 2, flops / 2)
    return Work((), scores, traffic, 2.5 if w.flash_attention else 2.0)


def keys_on_rank(w: Workload, p: Parallelism) -> float:
    """Heads of keys, and of values, that a tensor-parallel rank computes: at least one, so that more ranks than heads hold
    copies."""
    return max(w.keys / p.tp, 1.0)


def attention(w: Workload, p: Parallelism) -> Work:
    """One layer's attention on one rank, forwards."""
    tokens = p.microbatch_size * w.sequence / p.cp
    project = 2 * tokens * w.hidden * w.width
    queries = w.heads / p.tp
    products = (project * (queries + 2 * keys_on_rank(w, p)), project * queries)
    return Work(products) + attention_scores(w, p) + _norm_and_residual(w, p)


def feed_forward(w: Workload, p: Parallelism) -> Work:
    """One layer's feed-forward on one rank, forwards; tokens are spread evenly over experts."""
    tokens = p.microbatch_size * w.sequence / p.cp * w.experts_per_token
    one = 2 * tokens * w.hidden * w.ffn / p.tp
    activation = tokens * w.ffn / p.tp * HALF * (3 if w.gated else 2)
    products = (one * (2 if w.gated else 1), one)
    if w.experts > 1:
        here = w.experts // p.ep
        products = tuple(f / here for f in products for _ in range(here))
    return Work(products, (), activation) + _norm_and_residual(w, p)


def _norm_and_residual(w: Workload, p: Parallelism) -> Work:
    elements = p.microbatch_size * w.sequence / p.cp * w.hidden
    split = p.tp if p.sequence_parallel else 1
    # a norm reads and writes; dropout and residual read two, write one and a mask of bytes
    return Work((), (), elements / split * (2 * HALF + 3 * HALF + 1))


def embedding(w: Workload, p: Parallelism) -> Work:
    """Rows looked up and written."""
    return Work((), (), p.microbatch_size * w.sequence / p.cp * w.hidden * 2 * HALF)


def head(w: Workload, p: Parallelism) -> Work:
    """Output projection and loss, whose scores are 32-bit."""
    tokens = p.microbatch_size * w.sequence / p.cp
    return Work((2 * tokens * w.hidden * w.vocab / p.tp,), (), tokens * w.vocab / p.tp * 3 * 4)


def dense(widths: Sequence[int], samples: int) -> Work:
    """Dense layers one after the other, forwards, each with its activation."""
    products = tuple(2.0 * samples * a * b for a, b in pairwise(widths))
    return Work(products, (), 2 * HALF * samples * float(sum(widths[1:])))


def pooled_rows(w: Recommender, samples: float, tables: float) -> Work:
    """Rows of 32-bit numbers read and added up, of so many samples and tables."""
    return Work((), (), 4 * samples * tables * (w.pooling + 1) * w.dimension)


def interaction(w: Recommender) -> Work:
    """Products of all pairs of embeddings, forwards."""
    n = w.tables + 1
    return Work((), (2.0 * w.batch * n * n * w.dimension,), HALF * w.batch * n * w.dimension * 2)


def optimizer_seconds(t: Topology, p: Parallelism, weights: float, experts: float = 0.0) -> float:
    """Adam over those of a rank's weights, and of experts that are spread, that it keeps the state of."""
    own = (weights / shard_ranks(p) + experts / expert_ranks(p)) if p.zero else weights + experts
    return ADAM_TRAFFIC * own / (t.efficiency.memory * t.gpu.memory_bandwidth)


def shard_ranks(p: Parallelism) -> int:
    """Number of ranks over which dense weights are sharded."""
    return p.shard or p.lanes


def expert_ranks(p: Parallelism) -> int:
    """The same of experts that are spread over `ep` lanes: the others hold other experts."""
    return p.lanes // p.ep


# communication


@dataclass(frozen=True)
class Route:
    """What a process group goes through: ranks, latency of a step (s), bandwidth a GPU has (byte/s), whether it
    leaves the node, how much it varies, and how many of a rank's peers are beyond that bandwidth (all, if none is
    nearer)."""

    size: int
    latency: float
    bandwidth: float
    inter_node: bool
    cv: float
    far: int = 0


def route(topology: Topology, ranks: Sequence[int], *, ring: bool = True) -> Route:
    """Route of a group of ranks.

    Parameters
    ----------
    ring : bool
        Whether the ranks of a node take turns at its network, so that a ring has all that they have, or all
        of them send at once.
    """
    t = topology
    per_node = Counter(r // t.gpus_per_node for r in ranks)
    n, nodes = len(ranks), len(per_node)
    reached = t.efficiency.network
    if nodes == 1:
        return Route(
            n, t.intra_node.latency, reached * t.intra_node.bandwidth, False, t.intra_node.cv, n - 1
        )
    share = t.inter_node.bandwidth * min(
        1.0, (t.nics_per_node or t.gpus_per_node) / t.gpus_per_node
    )
    width = share * (min(per_node.values()) if ring else 1)
    pods = len({node // t.nodes_per_pod for node in per_node}) if t.nodes_per_pod else 1
    one_rail = t.rails and len({r % t.gpus_per_node for r in ranks}) == 1
    if pods > 1 and not one_rail:
        width /= t.oversubscription
    latency = (nodes * t.inter_node.latency + (n - nodes) * t.intra_node.latency) / n
    if not ring:
        latency = t.inter_node.latency
    far = n - min(per_node.values())
    width = reached * min(width, t.intra_node.bandwidth)
    return Route(n, latency, width, True, t.inter_node.cv, far)


def all_reduce(r: Route, size: float) -> float:
    """Seconds to add up `size` bytes over a group; ring or tree, whichever is faster."""
    n = r.size
    if n == 1:
        return 0.0
    ring = 2 * (n - 1) * (r.latency + size / (n * r.bandwidth))
    tree = 2 * math.ceil(math.log2(n)) * r.latency + 2 * size / r.bandwidth
    return min(ring, tree)


def all_gather(r: Route, size: float) -> float:
    """Seconds until everyone of a group has all `size` bytes; a reduce-scatter takes the same."""
    return (r.size - 1) * (r.latency + size / (r.size * r.bandwidth))


def all_to_all(r: Route, size: float) -> float:
    """Seconds for everyone to send `size` bytes, an equal part to each; parts for peers of the same node go beside those that
    leave it."""
    return (r.size - 1) * r.latency + r.far * size / (r.size * r.bandwidth)


def send(r: Route, size: float) -> float:
    """Seconds for `size` bytes from one rank to another."""
    return r.latency + size / r.bandwidth


# memory


def handed_on_bytes(ctx: Context) -> float:
    """Bytes of one microbatch between layers, on all its tensor-parallel ranks: what stages hand on."""
    w, p = ctx.workload, ctx.parallelism
    if isinstance(w, StageTimes):
        return w.activation_bytes
    return p.microbatch_size * w.sequence / p.cp * w.hidden * HALF


def memory_bytes(ctx: Context) -> list[float]:
    """Bytes on a GPU of each pipeline rank: weights, gradients, optimizer state and kept activations."""
    w, p = ctx.workload, ctx.parallelism
    if isinstance(w, Recommender):
        rows = 4.0 * 2 * w.rows * w.dimension * w.tables / p.lanes  # a row and its accumulator
        return [rows + 16.0 * w.dense_parameters + 4.0 * w.batch * (w.tables + 1) * w.dimension * 4]
    out = []
    peaks = p.plan.peak_activations()
    for rank in range(p.pp):
        stages = [s for flow in p.plan.placement for s, r in enumerate(flow) if r == rank]
        experts = sum(expert_parameters(ctx, s) for s in stages)
        weights = sum(stage_parameters(ctx, s) for s in stages) - experts
        layers = [ctx.layers_of_stage[s] for s in stages]
        kept = peaks[rank] * max(layers) * activation_bytes(w, p)
        dense = weights * _bytes_per_weight(p, shard_ranks(p))
        out.append(dense + experts * _bytes_per_weight(p, expert_ranks(p)) + kept)
    return out


def _bytes_per_weight(p: Parallelism, share: int) -> float:
    """16-bit weights, 32-bit gradients, and Adam's state. Gradients of several microbatches are added up before they are
    reduced, so until then every rank holds all of them."""
    weights, gradients, state = 2.0, 4.0, 12.0
    state /= share if p.zero >= 1 else 1
    gradients /= share if p.zero >= 2 and p.microbatches == 1 else 1
    weights /= share if p.zero >= 3 else 1
    return weights + gradients + state


def stage_parameters(ctx: Context, stage: int) -> float:
    """Weights of a virtual stage on one rank, experts included."""
    w, p = ctx.workload, ctx.parallelism
    experts = w.experts / p.ep if w.experts > 1 else 1
    layer = w.attention_parameters + experts * w.feed_forward_parameters
    total = ctx.layers_of_stage[stage] * layer + ends(ctx, [stage]) * w.embedding_parameters
    return total / p.tp


def expert_parameters(ctx: Context, stage: int) -> float:
    """Expert weights of the stage on this rank that no other lane holds."""
    w, p = ctx.workload, ctx.parallelism
    if p.ep == 1:
        return 0.0
    return ctx.layers_of_stage[stage] * w.experts / p.ep * w.feed_forward_parameters / p.tp


def ends(ctx: Context, stages: Sequence[int]) -> int:
    """Embedding and output projection that virtual stages hold between them: 0, 1 or 2, one where they are tied."""
    last = ctx.parallelism.plan.stages - 1
    held = (0 in stages) + (last in stages)
    return 1 if last == 0 and held and ctx.workload.tied_embeddings else held


def activation_bytes(w: Workload, p: Parallelism) -> float:
    """Bytes that one layer keeps of one microbatch until its backward (Korthikanti et al. 2022, eq. 2)."""
    elements = p.microbatch_size * w.sequence / p.cp * w.hidden
    if p.recompute == "full":
        return elements * HALF / (p.tp if p.sequence_parallel else 1)
    queries, keys, wide = (
        w.heads * w.width / w.hidden,
        keys_on_rank(w, p) * p.tp * w.width / w.hidden,
        w.ffn / w.hidden,
    )
    feed = HALF * wide * (3 if w.gated else 2) * w.experts_per_token
    split = HALF * (2 * queries + 2 * keys) + feed
    # two norms' inputs, two blocks' inputs, and two dropout masks of bytes in models that have them
    whole = 4 * HALF + (0 if w.gated else 2)
    scores = 0.0
    if not w.flash_attention and p.recompute == "none":
        scores = 5 * w.heads * w.sequence / w.hidden
    whole /= p.tp if p.sequence_parallel else 1
    return elements * (whole + (split + scores) / p.tp)


class MemoryShortage(ValueError):
    """A job that does not fit on its GPUs."""


def check_memory(ctx: Context) -> list[float]:
    """Memory of each pipeline rank, bytes.

    Raises
    ------
    MemoryShortage
        By how much it does not fit, and which single change would make it.
    """
    used = memory_bytes(ctx)
    room = ctx.topology.gpu.memory
    if max(used) <= room:
        return used
    p, worst = ctx.parallelism, max(range(len(used)), key=used.__getitem__)
    trials = {f"recompute: {r}": {"recompute": r} for r in ("selective", "full")}
    trials |= {f"zero: {z}": {"zero": z} for z in (1, 2, 3) if z > p.zero}
    trials |= {"sequence_parallel: true": {"sequence_parallel": True}}
    would = [
        name
        for name, change in trials.items()
        if max(memory_bytes(ctx.model_copy(update={"parallelism": p.model_copy(update=change)})))
        <= room
    ]
    raise MemoryShortage(
        f"does not fit: stage {worst} needs {used[worst] / 1e9:.1f} GB of {room / 1e9:.1f} GB on a "
        f"{ctx.topology.gpu.name}, {(used[worst] - room) / 1e9:.1f} GB too much; "
        + (
            f"{' or '.join(would)} would do"
            if would
            else "more tp or pp, or smaller microbatches, are needed"
        )
    )
