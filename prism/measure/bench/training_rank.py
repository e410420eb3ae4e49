"""One rank of `prism.measure.bench.training`: a stage of a transformer, its training step, its stopwatch.

Run as a module with one argument, the job in JSON. Tensor parallelism is Megatron's (Shoeybi et al. 2019):
attention heads and the inner width of the feed-forward are split, one all-reduce each forwards and backwards.
Neighbouring stages exchange activations and gradients as in Megatron's 1F1B, and both wait for the exchange
(a synchronous send, as NCCL's): so each is one rendezvous, and what a rank does is one chain of ops.
"""

from __future__ import annotations

import gc
import gzip
import json
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from prism.measure.bench.training import Layout, pin
from prism.model.schedules import one_f_one_b

VOCABULARY = 64
LEARNING_RATE = 0.05
COLUMNS = ("rank", "step", "op", "start", "duration", "group", "role", "shape", "stage", "microbatch")  # fmt: skip


class Stopwatch:
    """When each op of a rank ended; the next one begins there, so that nothing is left between them."""

    def __init__(self) -> None:
        self.ops: list[tuple] = []
        self.times: list[list[int]] = []

    def begin(self) -> None:
        """A step begins now."""
        self.times.append([time.perf_counter_ns()])

    def lap(self, op: str, microbatch: int = -1, group: Sequence[int] = (), role: str = "", shape: str = "") -> None:  # fmt: skip
        """Record the time since the last lap as `op`."""
        now = time.perf_counter_ns()
        if len(self.times) == 1:
            self.ops.append((op, microbatch, tuple(group), role, shape))
        self.times[-1].append(now)

    def write(self, path: Path, rank: int, stage: int, skip: int) -> None:
        """All steps but the first `skip` as a table that `prism.read_trace` reads."""
        t = np.array(self.times[skip:])
        start = t[:, :-1]
        took = np.diff(t, axis=1)
        with gzip.GzipFile(path, "wb", mtime=0) as file:
            file.write((",".join(COLUMNS) + "\n").encode())
            for k in range(t.shape[0]):
                lines = [
                    f"{rank},{k},{op},{start[k, i] * 1e-9:.7f},{took[k, i] * 1e-9:.7f},"
                    f"{';'.join(map(str, group))},{role},{shape},{stage},{m}\n"
                    for i, (op, m, group, role, shape) in enumerate(self.ops)
                ]
                file.write("".join(lines).encode())


class Group:
    """Some of the ranks, who add up what they have."""

    def __init__(self, all_groups: list[list[int]], rank: int, role: str, watch: Stopwatch) -> None:
        # every rank has to make every group
        made = [(ranks, dist.new_group(ranks)) for ranks in all_groups]
        self.ranks, self.handle = next(g for g in made if rank in g[0])
        self.role, self.watch = role, watch

    def add_up(self, x: torch.Tensor, op: str, microbatch: int = -1) -> None:
        """All-reduce `x` in place; one op of the record."""
        if len(self.ranks) > 1:
            dist.all_reduce(x, group=self.handle)
            size = f"{x.numel() * x.element_size()} B"
            self.watch.lap(op, microbatch, self.ranks, self.role, size)


class Doing:
    """Current op of a rank, for the record of interruptions."""

    op, microbatch = "", -1


class _Copy(torch.autograd.Function):
    """To all tensor-parallel ranks: identity forwards, all-reduce backwards (Megatron's f)."""

    @staticmethod
    def forward(ctx, x, tp: Group, doing: Doing):
        ctx.tp, ctx.doing = tp, doing
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return _summed(grad, ctx.tp, ctx.doing), None, None


class _Sum(torch.autograd.Function):
    """From all tensor-parallel ranks: all-reduce forwards, identity backwards (Megatron's g)."""

    @staticmethod
    def forward(ctx, x, tp: Group, doing: Doing):
        return _summed(x, tp, doing)

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None


def _summed(x: torch.Tensor, tp: Group, doing: Doing) -> torch.Tensor:
    if len(tp.ranks) == 1:
        return x
    tp.watch.lap(doing.op, doing.microbatch)
    x = x.contiguous().clone()
    tp.add_up(x, f"{doing.op}-all-reduce", doing.microbatch)
    return x


class Block(nn.Module):
    """Weights of a transformer layer on one tensor-parallel rank."""

    def __init__(self, layout: Layout, tp: Group, doing: Doing, index: int, seed: int) -> None:
        super().__init__()
        self.tp, self.doing, self.heads = tp, doing, layout.heads // layout.tp
        width, t = layout.width, tp.ranks.index(dist.get_rank())
        whole = torch.Generator().manual_seed(seed * 1009 + index)

        def weights(rows: int, columns: int, split: int, parts: int = 1) -> nn.Parameter:
            # the whole matrix is drawn, so that all layouts train the same model
            full = torch.randn(parts, rows, columns, generator=whole) / columns**0.5
            own = full.chunk(layout.tp, dim=split + 1)[t]
            return nn.Parameter(own.reshape(-1, own.shape[-1]).clone())

        self.qkv, self.out = weights(width, width, 0, 3), weights(width, width, 1)
        self.up, self.down = weights(4 * width, width, 0), weights(width, 4 * width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, width) to the same."""
        b, s, w = x.shape
        h = _Copy.apply(F.layer_norm(x, (w,)), self.tp, self.doing)
        parts = F.linear(h, self.qkv).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        mixed = F.linear(mixed.transpose(1, 2).reshape(b, s, -1), self.out)
        x = x + _Sum.apply(mixed, self.tp, self.doing)
        h = _Copy.apply(F.layer_norm(x, (w,)), self.tp, self.doing)
        return x + _Sum.apply(F.linear(F.gelu(F.linear(h, self.up)), self.down), self.tp, self.doing)  # fmt: skip


class Stage(nn.Module):
    """The layers of one pipeline stage; the first embeds tokens, the last returns the loss."""

    def __init__(self, layout: Layout, place: tuple, tp: Group, doing: Doing, seed: int) -> None:
        super().__init__()
        _, p, _ = place
        each = layout.layers // layout.pp
        self.first, self.last = p == 0, p == layout.pp - 1
        self.blocks = nn.ModuleList(
            Block(layout, tp, doing, i, seed) for i in range(p * each, (p + 1) * each)
        )
        whole = torch.Generator().manual_seed(seed * 1009 - 1)
        ends = torch.randn(2, VOCABULARY, layout.width, generator=whole)
        if self.first:
            self.embedding = nn.Parameter(ends[0].clone())
        if self.last:
            self.head = nn.Parameter(ends[1] / layout.width**0.5)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Tokens or activations to activations, or the mean loss of the microbatch."""
        if self.first:
            x = F.embedding(x, self.embedding)
        for block in self.blocks:
            x = block(x)
        if not self.last:
            return x
        scores = F.linear(F.layer_norm(x, x.shape[-1:]), self.head)
        return F.cross_entropy(scores.flatten(0, 1), target.flatten())


class Trainer:
    """One rank: its stage, its neighbours, and one training step of it."""

    def __init__(self, layout: Layout, rank: int, *, seed: int, slow: bool) -> None:
        self.layout, self.seed = layout, seed
        self.d, self.p, self.t = place = layout.place(rank)
        self.watch, self.doing = Stopwatch(), Doing()
        every = [range(n) for n in (layout.dp, layout.pp, layout.tp)]
        d, p, t = every
        self.tp = Group([[layout.rank(i, j, k) for k in t] for i in d for j in p], rank, "tp", self.watch)  # fmt: skip
        self.dp = Group([[layout.rank(i, j, k) for i in d] for j in p for k in t], rank, "dp", self.watch)  # fmt: skip
        self.world = Group([list(range(layout.ranks))], rank, "world", self.watch)
        self.stage = Stage(layout, place, self.tp, self.doing, seed)
        self.optimizer = torch.optim.SGD(self.stage.parameters(), lr=LEARNING_RATE)
        # a slowed rank computes the same again and throws it away; its collectives are not repeated
        self.again = 2 if slow and rank == layout.ranks - 1 else 1
        self.order = one_f_one_b(layout.pp, layout.microbatches).ranks[self.p]
        self.losses: list[float] = []

    def neighbour(self, by: int) -> int | None:
        """Rank of the stage before or after."""
        at = self.p + by
        return self.layout.rank(self.d, at, self.t) if 0 <= at < self.layout.pp else None

    def _exchange(self, peer: int, gives: torch.Tensor | None, takes: bool, m: int) -> torch.Tensor | None:  # fmt: skip
        """Give a tensor to a neighbour, take one, or both; either side waits for the other."""
        layout = self.layout
        shape = (layout.batch, layout.tokens, layout.width)
        nothing = torch.zeros(1)
        came = torch.empty(shape) if takes else torch.zeros(1)
        work = [dist.isend(nothing if gives is None else gives, peer), dist.irecv(came, peer)]
        for w in work:
            w.wait()
        me, size = dist.get_rank(), layout.batch * layout.tokens * layout.width * 4
        op = "exchange" if takes and gives is not None else "transfer"
        self.watch.lap(op, m, sorted((me, peer)), "pp", f"{size} B")
        return came.requires_grad_() if takes else None

    def step(self, k: int) -> None:
        """Forwards and backwards of all microbatches, gradients over replicas, optimizer, loss over ranks."""
        self.watch.begin()
        self.optimizer.zero_grad()
        loss = self._pipeline(k)
        if self.layout.dp > 1:
            grads = [q.grad for q in self.stage.parameters()]
            flat = torch.cat([g.flatten() for g in grads])
            self.watch.lap("flatten")
            self.dp.add_up(flat, "grads-all-reduce")
            for g, own in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
                g.copy_(own.view_as(g) / self.layout.dp)
        self.optimizer.step()
        self.watch.lap("optimizer")
        self.world.add_up(loss, "loss-all-reduce")
        self.losses.append(loss.item() / (self.layout.dp * self.layout.tp))

    def _pipeline(self, k: int) -> torch.Tensor:
        """1F1B with Megatron's exchanges; the sum of this rank's losses."""
        before, after = self.neighbour(-1), self.neighbour(1)
        warm = next(i for i, op in enumerate(self.order) if op.kind == "BW") - 1
        n, total = self.layout.microbatches, torch.zeros(1)
        held: dict[int, tuple] = {}
        x = gradient = None
        if before is not None:
            x = self._exchange(before, None, True, 0)
        for i in range(warm):
            y = self._forward(k, i, x, held)
            if after is not None:
                self._exchange(after, y.detach(), False, i)
            if before is not None:
                x = self._exchange(before, None, True, i + 1)
        for j in range(n - warm):
            y = self._forward(k, warm + j, x, held)
            if after is None:
                total += y.detach()
            else:
                gradient = self._exchange(after, y.detach(), True, warm + j)
            back = self._backward(j, gradient, held)
            if before is not None:
                more = j < n - warm - 1
                x = self._exchange(before, back, more, j)
        for j in range(n - warm, n):
            if after is not None:
                gradient = self._exchange(after, None, True, j)
            back = self._backward(j, gradient, held)
            if before is not None:
                self._exchange(before, back, False, j)
        return total / n

    def _forward(self, k: int, m: int, x: torch.Tensor | None, held: dict) -> torch.Tensor:
        self.doing.op, self.doing.microbatch = "forward", m
        tokens = self._tokens(k, m)
        given = tokens[:, :-1] if x is None else x
        for _ in range(self.again):
            y = self.stage(given, tokens[:, 1:])
        held[m] = (x, y)
        self.watch.lap("forward", m)
        return y

    def _backward(self, m: int, gradient: torch.Tensor | None, held: dict) -> torch.Tensor | None:
        self.doing.op, self.doing.microbatch = "backward", m
        x, y = held.pop(m)
        scale = 1 / self.layout.microbatches
        if gradient is None:
            gradient = torch.tensor(scale)
        for _ in range(self.again - 1):
            torch.autograd.grad(y, list(self.stage.parameters()), gradient, retain_graph=True)
        y.backward(gradient.detach())
        self.watch.lap("backward", m)
        return None if x is None else x.grad

    def _tokens(self, k: int, m: int) -> torch.Tensor:
        """Rows of a noisy affine sequence, which there is something to learn of; the same in every layout."""
        layout = self.layout
        sample = (k * layout.dp + self.d) * layout.microbatches + m
        rng = torch.Generator().manual_seed(self.seed * 7919 + sample)
        row = torch.randint(VOCABULARY, (layout.batch, layout.tokens + 1), generator=rng)
        noise = torch.rand(row.shape, generator=rng) < 0.1
        for i in range(1, row.shape[1]):
            row[:, i] = torch.where(noise[:, i], row[:, i], (5 * row[:, i - 1] + 1) % VOCABULARY)
        return row


def main(argument: str) -> None:
    """Train, record, leave."""
    job = json.loads(argument)
    layout, rank, meet = Layout(**job["layout"]), job["rank"], Path(job["meet"])
    pin(rank)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meet / 'store'}", rank=rank, world_size=layout.ranks, timeout=timedelta(seconds=120)
    )  # fmt: skip
    trainer = Trainer(layout, rank, seed=job["seed"], slow=job["slow"])
    # a collection in the middle of a step is noise of Python, not of training; as Megatron does
    gc.disable()
    with (meet / "count").open("ab", buffering=0) as count:
        for k in range(job["skip"] + job["steps"]):
            trainer.step(k)
            if rank == 0:
                count.write(b".")
    trainer.watch.write(meet / f"rank{rank}.csv.gz", rank, trainer.p, job["skip"])
    if rank == 0:
        losses = trainer.losses[job["skip"] :]
        (meet / "loss.txt").write_text("".join(f"{x:.6f}\n" for x in losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
