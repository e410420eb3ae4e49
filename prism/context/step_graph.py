"""Builds the graph of a context's step: what the ops of its schedule consist of, and what waits for what."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from prism.context import analytic, parts
from prism.context.context import Context, Recommender, StageTimes, Workload
from prism.context.parts import OPTIMIZER, Part, RankView
from prism.model.dag_builder import DagBuilder
from prism.model.schedules import Op
from prism.model.signature import Signature


class StepGraph:
    """The graph of a context's step, built op by op.

    Attributes
    ----------
    ctx : Context
    dag : WorkloadDAG
    parts : dict of Signature to Part
        What an op of each signature costs.
    """

    def __init__(self, ctx: Context, *, merged: bool = False) -> None:
        self.ctx, self.merged, p = ctx, merged, ctx.parallelism
        self.plan = p.plan
        self.slices = 1 if p.fold_tp else p.tp
        self.width = p.tp if p.fold_tp else 1
        leaders = {name: _leaders(groups, p.lanes) for name, groups in parts.groups(p).items()}
        self.builder = DagBuilder(replicas=p.lanes, groups=leaders)
        self.parts: dict[Signature, Part] = {}
        self._cache: dict[tuple, list[Part]] = {}
        #: (kind, flow, stage, microbatch) -> ops of each slice that finish it
        self.done: dict[tuple, list[list[int]]] = {}
        #: per pipeline rank and slice: the ops that the next op there depends on
        self.front: list[list[list[int]]] = [[[] for _ in range(self.slices)] for _ in range(p.pp)]
        self.sent: dict[tuple, list[int]] = {}
        #: gradients on their way: pipeline rank -> ops of each slice
        self.reduced: list[list[list[int]]] = [
            [[] for _ in range(self.slices)] for _ in range(p.pp)
        ]
        self.last_backward = self._last_backwards()
        for rank, places in self.plan.slots():
            self._slot(rank, [self.plan.ranks[rank][i] for i in places])
        for rank in range(p.pp):
            self._finish(rank)
        nodes = np.array(ctx.node_of_rank)
        ranks = [
            [ctx.rank(s, lane, t) for lane in range(p.lanes)]
            for s in range(p.pp)
            for t in range(self.slices)
        ]
        self.dag = self.builder.build(nodes[ranks])

    def _last_backwards(self) -> set[Op]:
        """The last op that adds to the gradients of each virtual stage (of both flows, where there are two)."""
        last: dict[tuple[int, int], Op] = {}
        for rank, _, op in self.plan.ops():
            if op.kind in ("W", "BW"):
                last[rank, op.stage] = op
        return set(last.values())

    def _template_rank(self, rank: int, t: int) -> int:
        return rank * self.slices + t

    def _parts(self, op: Op, *, alone: bool) -> list[Part]:
        merged = self.merged and alone and op not in self.last_backward
        rank = self.plan.placement[op.flow][op.stage]
        key = (op.kind, op.stage, rank, merged)
        if key not in self._cache:
            own = parts.parts(RankView(self.ctx, rank), op.kind, op.stage)
            self._cache[key] = [parts.merged(op.kind, op.stage, own)] if merged else own
        return self._cache[key]

    def _slot(self, rank: int, ops: list[Op]) -> None:
        """One op of the schedule, or two side by side."""
        start = [list(before) for before in self.front[rank]]
        for op in ops:
            for t, arrived in enumerate(self._arrivals(rank, op)):
                start[t] += arrived
        at = [start] * len(ops)  # where each op has got to
        gpu = [[] for _ in range(self.slices)]  # compute takes turns
        for turn in zip_longest(*(self._parts(op, alone=len(ops) == 1) for op in ops)):
            for i, part in enumerate(turn):
                if part is None:
                    continue
                after = at[i]
                if part.is_compute and len(ops) > 1:
                    after = [a + g for a, g in zip(after, gpu, strict=True)]
                at[i] = self._add(rank, part, after, ops[i].microbatch)
                if part.is_compute:
                    gpu = at[i]
                    if ops[i] in self.last_backward and part.layer >= 0:
                        self._layer_is_done(rank, ops[i], part, at[i])
        end = [[o for own in at for o in own[t]] for t in range(self.slices)]
        self.front[rank] = end
        for op in ops:
            self.done[op.kind, op.flow, op.stage, op.microbatch] = end

    def _arrivals(self, rank: int, op: Op) -> list[list[int]]:
        """Ops of each slice that an op waits for beside what its rank did before."""
        needed: list[tuple[tuple, int]] = []
        stages = self.plan.stages
        if op.kind == "F" and op.stage > 0:
            needed.append((("F",), op.stage - 1))
        if op.kind in ("B", "BW"):
            needed.append((("F",), op.stage))
            if op.stage < stages - 1:
                needed.append((("B", "BW"), op.stage + 1))
        out: list[list[int]] = [[] for _ in range(self.slices)]
        for kinds, stage in needed:
            key = next(
                k for kind in kinds if (k := (kind, op.flow, stage, op.microbatch)) in self.done
            )
            source = self.plan.placement[op.flow][stage]
            for t in range(self.slices):
                produced = self.done[key][t]
                out[t] += (
                    produced if source == rank else [self._send(key, source, rank, t, produced)]
                )
        return out

    def _send(self, key: tuple, source: int, target: int, t: int, produced: list[int]) -> int:
        part = self._cache.setdefault(("send", source, target), [])
        if not part:
            part.append(parts.transfer(self.ctx, source, target))
        self.parts[part[0].signature] = part[0]
        link = part[0].signature.shape
        return self.builder.add(
            part[0].signature,
            [self._template_rank(source, t), self._template_rank(target, t)],
            site=link,
            microbatch=key[3],
            position=key[3],
            after=produced,
        )

    def _add(
        self, rank: int, part: Part, after: Sequence[list[int]], microbatch: int = -1
    ) -> list[list[int]]:
        """A part on every slice of a pipeline rank; what each slice waits for from then on."""
        self.parts.setdefault(part.signature, part)
        own = [self._template_rank(rank, t) for t in range(self.slices)]
        shared = {"stage": rank, "microbatch": microbatch, "position": microbatch}
        if part.signature.role == "tp":
            op = self.builder.add(
                part.signature, own, after=[a for aa in after for a in aa], **shared
            )
            return [[op]] * self.slices
        width = self.width if part.is_compute else 1
        joins = part.joins or None
        return [
            [self.builder.add(part.signature, [r], after=a, width=width, joins=joins, **shared)]
            for r, a in zip(own, after, strict=True)
        ]

    def _layer_is_done(self, rank: int, op: Op, part: Part, at: list[list[int]]) -> None:
        """Reduce a layer's gradients when its last ones are there, if that may run beside the backward."""
        attention = part.signature.op.startswith("attention") and "forward" not in part.signature.op
        if self.ctx.parallelism.overlap_gradients and attention:
            self._reduce(rank, parts.layer_gradients(RankView(self.ctx, rank), part.layer), at)

    def _reduce(self, rank: int, parts: list[Part], after: Sequence[list[int]]) -> None:
        for part in parts:
            # one stream: collectives of gradients follow each other
            waits = [a + r for a, r in zip(after, self.reduced[rank], strict=True)]
            self.reduced[rank] = self._add(rank, part, waits)

    def _finish(self, rank: int) -> None:
        """Add the remaining gradients, the optimizer, and the weights that are gathered after it."""
        ctx, p = self.ctx, self.ctx.parallelism
        here, experts = RankView(ctx, rank), 0.0
        end = self.front[rank]
        if isinstance(ctx.workload, StageTimes):
            if p.dp > 1:
                self._reduce(rank, [self._times_reduce(rank)], end)
            weights = 0.0
            optimizer = parts.fixed(Signature(OPTIMIZER), ctx.workload.optimizer_s)
        else:
            held = [s for flow in self.plan.placement for s, r in enumerate(flow) if r == rank]
            if not p.overlap_gradients and isinstance(ctx.workload, Workload):
                for stage in held:
                    for layer in range(ctx.layers_of_stage[stage]):
                        self._reduce(rank, parts.layer_gradients(here, layer), end)
            self._reduce(rank, parts.end_gradients(here, held), end)
            if isinstance(ctx.workload, Recommender):
                weights = float(ctx.workload.dense_parameters)
            else:
                experts = sum(analytic.expert_parameters(ctx, s) for s in held)
                weights = sum(analytic.stage_parameters(ctx, s) for s in held) - experts
            optimizer = Part(
                Signature(OPTIMIZER, f"{weights + experts:.6g} weights"),
                lambda t: analytic.optimizer_seconds(t, p, weights, experts),
            )
        at = self._add(
            rank, optimizer, [a + r for a, r in zip(end, self.reduced[rank], strict=True)]
        )
        for part in parts.updated_weights(here, weights, experts) if weights else []:
            at = self._add(rank, part, at)

    def _times_reduce(self, rank: int) -> Part:
        ctx = self.ctx
        ranks = [ctx.rank(rank, lane) for lane in range(ctx.parallelism.lanes)]
        r = analytic.route(ctx.topology, ranks)
        scope = "inter_node" if r.inter_node else "intra_node"
        return Part(
            Signature("all_reduce", f"stage {rank}", "", "dp", scope),
            lambda t: analytic.all_reduce(analytic.route(t, ranks), ctx.workload.gradient_bytes),
            r.cv,
            "all",
        )


def _leaders(groups: list[list[int]], lanes: int) -> np.ndarray:
    """For each lane the lowest of its group."""
    out = np.empty(lanes, int)
    for group in groups:
        out[group] = min(group)
    return out
