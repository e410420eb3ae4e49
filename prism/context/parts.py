"""Parts of a pipeline schedule's op: compute and collectives in order, with their cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from prism.context import analytic
from prism.context.analytic import Work
from prism.context.context import Context, Parallelism, Recommender, StageTimes, Topology, Workload
from prism.model.signature import Signature

FORWARD, BACKWARD, OPTIMIZER = "forward-compute", "backward-compute", "optimizer"
#: name of an op's compute, by kind
NAMES = {"F": "forward", "BW": "backward", "B": "input-grad", "W": "weight-grad"}


@dataclass(frozen=True)
class Part:
    """Compute of one rank, or one collective.

    Attributes
    ----------
    signature : Signature
    price : callable
        Mean time in seconds, as a function of the topology: another efficiency changes it, and nothing else.
    cv : float
        Coefficient of variation of a transfer time; compute varies as the fleet does.
    joins : str
        For a collective over lanes, which groups of them meet; empty for compute and tensor parallel.
    layer : int
        Layer of its stage that it belongs to, -1 for what has none.
    work : Work, optional
        Of compute whose amount is known.
    size, ranks : float, int
        Bytes and members of a collective or transfer.
    then : callable, optional
        Mean time of what follows a transfer and is part of its price, s.
    """

    signature: Signature
    price: Callable[[Topology], float]
    cv: float = 0.0
    joins: str = ""
    layer: int = -1
    work: Work | None = None
    size: float = 0.0
    ranks: int = 0
    then: Callable[[Topology], float] | None = None

    @property
    def is_compute(self) -> bool:
        """Whether the part is compute of a single rank."""
        return self.signature.role == "compute"


def groups(p: Parallelism) -> dict[str, list[list[int]]]:
    """Groups of lanes that meet in collectives, by name; lanes count context parallel fastest."""
    lanes = list(range(p.lanes))

    def runs(size: int) -> list[list[int]]:
        return [lanes[i : i + size] for i in range(0, p.lanes, size)]

    def combs(size: int) -> list[list[int]]:
        return [lanes[i::size] for i in range(size)]

    shard = p.shard or p.lanes
    return {
        "all": [lanes],
        "cp": runs(p.cp),
        "ep": runs(p.ep),
        "experts": combs(p.ep),
        "shard": runs(shard),
        "replicate": combs(shard),
    }


@dataclass(frozen=True)
class RankView:
    """A context as a pipeline rank sees it.

    Attributes
    ----------
    ctx : Context
    at : int
        Pipeline rank.
    """

    ctx: Context
    at: int

    @property
    def workload(self) -> Workload | StageTimes | Recommender:
        """Of the context."""
        return self.ctx.workload

    @property
    def parallelism(self) -> Parallelism:
        """Of the context."""
        return self.ctx.parallelism

    @property
    def topology(self) -> Topology:
        """Of the context."""
        return self.ctx.topology

    @property
    def layers_of_stage(self) -> tuple[int, ...]:
        """Of the context."""
        return self.ctx.layers_of_stage


@cache
def slowest(topology: Topology, p: Parallelism, joins: str, at: int, ring: bool) -> tuple[int, ...]:
    """Ranks of the slowest group of its name on a pipeline rank: a step waits for it."""
    found = ([(at * p.lanes + lane) * p.tp for lane in lanes] for lanes in groups(p)[joins])
    return tuple(max(found, key=lambda ranks: _slowness(topology, ranks, ring)))


@cache
def slowest_slices(topology: Topology, p: Parallelism, at: int) -> tuple[int, ...]:
    """Tensor-parallel ranks of the lane that has them furthest apart."""
    lanes = range(p.lanes) if topology.gpus_per_node % p.tp else range(1)
    found = ([(at * p.lanes + lane) * p.tp + t for t in range(p.tp)] for lane in lanes)
    return tuple(max(found, key=lambda ranks: _slowness(topology, ranks, True)))


def _slowness(topology: Topology, ranks: Sequence[int], ring: bool) -> tuple[float, float]:
    r = analytic.route(topology, ranks, ring=ring)
    return 1 / r.bandwidth, r.latency


def collective(ctx: RankView, op: str, joins: str, size: float, layer: int = -1) -> Part:
    """A collective over lanes: `op` is ``all-reduce``, ``all-gather``, ``reduce-scatter`` or ``all-to-all``."""
    ring = op != "all-to-all"
    ranks = slowest(ctx.topology, ctx.parallelism, joins, ctx.at, ring)
    r = analytic.route(ctx.topology, ranks, ring=ring)
    role = {"cp": "cp", "ep": "ep"}.get(joins, "dp")
    name = f"{joins}-{op}" if role != "dp" or joins in ("experts", "replicate") else op
    alike = {
        _slowness(ctx.topology, slowest(ctx.topology, ctx.parallelism, joins, at, ring), ring)
        for at in range(ctx.parallelism.pp)
    }

    def price(t: Topology) -> float:
        return _seconds(op, analytic.route(t, ranks, ring=ring), size)

    signature = _comm(name, role, size, r, len(alike) > 1)
    return Part(signature, price, r.cv, joins, layer, size=size, ranks=len(ranks))


def tensor_parallel(ctx: RankView, size: float, layer: int) -> list[Part]:
    """What tensor-parallel ranks exchange after a block: an all-reduce, or with sequence parallelism a
    reduce-scatter and an all-gather, which are one op here."""
    p = ctx.parallelism
    if p.tp == 1:
        return []
    ranks = slowest_slices(ctx.topology, p, ctx.at)
    r = analytic.route(ctx.topology, ranks)
    alike = {
        _slowness(ctx.topology, slowest_slices(ctx.topology, p, at), True) for at in range(p.pp)
    }

    def price(t: Topology) -> float:
        own = analytic.route(t, ranks)
        if p.sequence_parallel:
            return 2 * analytic.all_gather(own, size)
        return analytic.all_reduce(own, size)

    name = "tp-reduce-scatter-all-gather" if p.sequence_parallel else "tp-all-reduce"
    signature = _comm(name, "tp", size, r, len(alike) > 1)
    return [Part(signature, price, r.cv, layer=layer, size=size, ranks=p.tp)]


def transfer(ctx: Context, source: int, target: int) -> Part:
    """Activations or gradients from one pipeline rank to another, slice by slice (Narayanan et al. 2021,
    section 4.1); without sequence parallelism slices are put together on the other side."""
    p, w = ctx.parallelism, ctx.workload
    slices = 1 if isinstance(w, StageTimes) else p.tp
    size = analytic.handed_on_bytes(ctx)
    pairs = [[ctx.rank(source, lane), ctx.rank(target, lane)] for lane in range(p.lanes)]
    worst = max(pairs, key=lambda pair: _slowness(ctx.topology, pair, False))
    r = analytic.route(ctx.topology, worst, ring=False)
    slice_ranks = slowest_slices(ctx.topology, p, target)[:slices]

    def put_together(t: Topology) -> float:
        if slices == 1 or p.sequence_parallel:
            return 0.0
        return analytic.all_gather(analytic.route(t, slice_ranks), size)

    def price(t: Topology) -> float:
        sent = analytic.send(analytic.route(t, worst, ring=False), size / slices)
        return sent + put_together(t)

    link = f"stage {source}->{target}"
    scope = "inter_node" if r.inter_node else "intra_node"
    signature = Signature("send-recv", link, "", "pp", scope)
    return Part(signature, price, r.cv, size=size / slices, ranks=2, then=put_together)


def _comm(name: str, role: str, size: float, r: analytic.Route, differs: bool) -> Signature:
    """Signature of a collective; where pipeline ranks have different ways for it, with the rate of its own."""
    scope = "inter_node" if r.inter_node else "intra_node"
    way = f"at {r.bandwidth:.4g} B/s" if differs else ""
    return Signature(name, f"{size:.6g} B", way, role, scope)


def _seconds(op: str, r: analytic.Route, size: float) -> float:
    if op == "all-reduce":
        return analytic.all_reduce(r, size)
    return (analytic.all_to_all if op == "all-to-all" else analytic.all_gather)(r, size)


def parts(ctx: RankView, kind: str, stage: int) -> list[Part]:
    """List the parts of one op of the schedule on a rank, in order.

    Parameters
    ----------
    ctx : RankView
    kind : {"F", "B", "W", "BW"}
    stage : int
        Virtual stage.
    """
    if isinstance(ctx.workload, StageTimes):
        return [_timed(ctx.workload, kind, stage)]
    if isinstance(ctx.workload, Recommender):
        return _recommender(ctx, kind)
    layers = range(ctx.layers_of_stage[stage])
    first, last = stage == 0, stage == ctx.parallelism.plan.stages - 1
    if kind == "F":
        out = _ends(ctx, kind, "embedding") if first else []
        out += [part for i in layers for part in _layer(ctx, "F", i)]
        return out + (_ends(ctx, kind, "head") if last else [])
    out = _ends(ctx, kind, "head") if last else []
    out += [part for i in reversed(layers) for part in _layer(ctx, kind, i)]
    return out + (_ends(ctx, kind, "embedding") if first and kind != "B" else [])


def _timed(w: StageTimes, kind: str, stage: int) -> Part:
    """An op of known times; of a backward in two parts each takes half."""
    seconds = w.forward_s[stage] if kind == "F" else w.backward_s[stage]
    name = {"F": FORWARD, "BW": BACKWARD, "B": "input-grad-compute", "W": "weight-grad-compute"}[
        kind
    ]
    return fixed(Signature(name, f"stage {stage}"), seconds / (2 if kind in ("B", "W") else 1))


def merged(kind: str, stage: int, of: Sequence[Part]) -> Part:
    """All parts of an op as one, for steps in which nothing varies."""
    times = Counter(of)

    def price(t: Topology) -> float:
        return sum(n * part.price(t) for part, n in times.items())

    return Part(Signature(f"{NAMES[kind]}-all", f"stage {stage}"), price)


def fixed(signature: Signature, seconds: float) -> Part:
    """Compute of a known time."""
    return Part(signature, lambda _: seconds)


def _recommender(ctx: RankView, kind: str) -> list[Part]:
    """Lookups of every sample of all ranks in the tables that a rank holds, exchanged for those of its own samples
    in all tables; dense layers before and after."""
    w, lanes = ctx.workload, ctx.parallelism.lanes
    bottom = analytic.dense(w.bottom, w.batch)
    top = analytic.interaction(w) + analytic.dense((w.interaction_width, *w.top), w.batch)
    rows = analytic.pooled_rows(w, w.batch * lanes, w.tables / lanes)
    size = float(analytic.HALF * w.batch * w.tables * w.dimension)
    exchange = [collective(ctx, "all-to-all", "all", size)] if lanes > 1 else []
    if kind == "F":
        return [_compute(ctx, "bottom", kind, bottom), _compute(ctx, "lookup", kind, rows), *exchange,
                _compute(ctx, "top", kind, top)]  # fmt: skip
    update = rows + rows  # rows are read, changed with their accumulators and written
    return [_compute(ctx, "top", kind, _by_kind(top, kind)), *exchange, _compute(ctx, "lookup", kind, update),
            _compute(ctx, "bottom", kind, _by_kind(bottom, kind))]  # fmt: skip


def _compute(ctx: RankView, what: str, kind: str, work: Work, layer: int = -1) -> Part:
    size = f"{work.flops:.6g} FLOP {work.traffic:.6g} B"
    signature = Signature(f"{what}-{NAMES[kind]}", size)
    return Part(signature, work.seconds, layer=layer, work=work)


def _by_kind(forward: Work, kind: str) -> Work:
    if kind == "F":
        return forward
    work = Work()
    if kind in ("B", "BW"):
        work += forward.backward_input
    if kind in ("W", "BW"):
        work += forward.backward_weights
    return work


def _ends(ctx: RankView, kind: str, what: str) -> list[Part]:
    """Embedding or output projection with its loss, both split over the vocabulary: rows are added up after
    the embedding, largest score, sum and target's score after the projection, its gradient backwards."""
    w, p = ctx.workload, ctx.parallelism
    work = analytic.embedding(w, p) if what == "embedding" else analytic.head(w, p)
    own = [_compute(ctx, what, kind, _by_kind(work, kind))]
    if kind == "W" or (what == "embedding" and kind != "F"):
        return own
    loss = 3 * 4 * p.microbatch_size * w.sequence / p.cp
    size = loss if what == "head" and kind == "F" else analytic.handed_on_bytes(ctx)
    return own + tensor_parallel(ctx, size, -1)


def _layer(ctx: RankView, kind: str, layer: int) -> list[Part]:
    """One layer: attention and feed-forward, and the collectives around them."""
    p = ctx.parallelism
    if kind == "W":
        return [
            _compute(ctx, "feed-forward", "W", analytic.feed_forward(ctx.workload, p).backward_weights, layer),
            _compute(ctx, "attention", "W", analytic.attention(ctx.workload, p).backward_weights, layer),
        ]  # fmt: skip
    out = _gathered_weights(ctx, layer)
    if kind == "F":
        return out + _attention(ctx, "F", layer) + _feed_forward(ctx, "F", layer)
    if p.recompute == "full":
        out += _attention(ctx, "F", layer) + _feed_forward(ctx, "F", layer)
    return out + _feed_forward(ctx, kind, layer) + _attention(ctx, kind, layer)


def _attention(ctx: RankView, kind: str, layer: int) -> list[Part]:
    w, p = ctx.workload, ctx.parallelism
    work = _by_kind(analytic.attention(w, p), kind)
    if kind != "F" and p.recompute == "selective":
        work += analytic.attention_scores(w, p)
    own = [_compute(ctx, "attention", kind, work, layer)]
    if p.cp > 1:
        # every rank needs all keys and values: gathered forwards; backwards gathered and their gradients added
        keys = analytic.keys_on_rank(w, p)
        size = 2 * p.microbatch_size * w.sequence * keys * w.width * analytic.HALF
        moved = [collective(ctx, "all-gather", "cp", size, layer)]
        own = moved + own if kind == "F" else moved + own + [collective(ctx, "reduce-scatter", "cp", size, layer)]  # fmt: skip
    return own + tensor_parallel(ctx, analytic.handed_on_bytes(ctx), layer)


def _feed_forward(ctx: RankView, kind: str, layer: int) -> list[Part]:
    w, p = ctx.workload, ctx.parallelism
    own = [_compute(ctx, "feed-forward", kind, _by_kind(analytic.feed_forward(w, p), kind), layer)]
    if p.ep > 1:
        size = (
            analytic.handed_on_bytes(ctx)
            * w.experts_per_token
            / (p.tp if p.sequence_parallel else 1)
        )
        there = collective(ctx, "all-to-all", "ep", size, layer)
        own = [there, *own, there]
    return own + tensor_parallel(ctx, analytic.handed_on_bytes(ctx), layer)


def _gathered_weights(ctx: RankView, layer: int) -> list[Part]:
    """Weights of a layer, gathered before they are used, where they are sharded."""
    p = ctx.parallelism
    if p.zero < 3 or p.lanes == 1:
        return []
    return _all_gathered(ctx, _layer_weights(ctx), _layer_experts(ctx), layer)


def _all_gathered(ctx: RankView, weights: float, experts: float, layer: int = -1) -> list[Part]:
    """16-bit weights gathered from those who share them out: experts from the lanes that hold the same ones."""
    p, half = ctx.parallelism, analytic.HALF
    out = [collective(ctx, "all-gather", "shard" if p.shard else "all", half * weights, layer)]
    if experts and analytic.expert_ranks(p) > 1:
        out.append(collective(ctx, "all-gather", "experts", half * experts, layer))
    return out


def _layer_weights(ctx: RankView) -> float:
    """Weights of one layer on one rank, experts left aside where they are spread."""
    w, p = ctx.workload, ctx.parallelism
    dense = w.attention_parameters + (w.feed_forward_parameters * w.experts if p.ep == 1 else 0)
    return dense / p.tp


def _layer_experts(ctx: RankView) -> float:
    """Weights of experts that are spread, of one layer on one rank."""
    w, p = ctx.workload, ctx.parallelism
    return w.feed_forward_parameters * w.experts / p.ep / p.tp if p.ep > 1 else 0.0


def reduced_gradients(
    ctx: RankView, weights: float, layer: int = -1, experts: float = 0.0
) -> list[Part]:
    """Gradients of so many weights (and of experts, which fewer lanes share) added up over lanes, 32-bit."""
    p = ctx.parallelism
    out = []
    if p.lanes > 1 and weights:
        size = 4 * weights
        if p.zero == 0:
            out.append(collective(ctx, "all-reduce", "all", size, layer))
        else:
            out.append(
                collective(ctx, "reduce-scatter", "shard" if p.shard else "all", size, layer)
            )
            if p.shard and p.shard < p.lanes:
                out.append(collective(ctx, "all-reduce", "replicate", size / p.shard, layer))
    if experts and analytic.expert_ranks(p) > 1:
        op = "reduce-scatter" if p.zero else "all-reduce"
        out.append(collective(ctx, op, "experts", 4 * experts, layer))
    return out


def layer_gradients(ctx: RankView, layer: int) -> list[Part]:
    """Gradients of one layer."""
    return reduced_gradients(ctx, _layer_weights(ctx), layer, _layer_experts(ctx))


def end_gradients(ctx: RankView, stages: Sequence[int]) -> list[Part]:
    """Gradients of what belongs to no layer of a pipeline rank that holds these virtual stages: embedding and output
    projection, or all dense weights of a recommender."""
    w, p = ctx.workload, ctx.parallelism
    if isinstance(w, Recommender):
        return reduced_gradients(ctx, w.dense_parameters)
    return reduced_gradients(ctx, analytic.ends(ctx, stages) * w.embedding_parameters / p.tp)


def updated_weights(ctx: RankView, weights: float, experts: float = 0.0) -> list[Part]:
    """Weights gathered after an optimizer that each lane runs on its share."""
    p = ctx.parallelism
    if p.zero not in (1, 2) or p.lanes == 1:
        return []
    return _all_gathered(ctx, weights, experts)
