"""Collectives by name, their buffers, and the loop that times them. Needs torch, within functions only."""

from __future__ import annotations

import time
from collections.abc import Callable

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")


def buffers(op: str, size: int, rank: int, world: int, device: str) -> Callable[[], None]:
    """An op on buffers of its own: float32, `size` bytes rounded up to what divides by ranks."""
    import torch
    import torch.distributed as dist

    each = -(-size // (4 * world))
    whole = torch.ones(each * world, device=device)
    part = torch.ones(each, device=device)
    # a sum of zeros stays zero, however often it is taken
    message = torch.zeros(-(-size // 4), device=device)
    match op:
        case "all_reduce":
            return lambda: dist.all_reduce(message)
        case "all_gather":
            return lambda: dist.all_gather_into_tensor(whole, part)
        case "reduce_scatter":
            return lambda: dist.reduce_scatter_tensor(part, whole)
        case "all_to_all":
            got = torch.empty_like(whole)
            return lambda: dist.all_to_all_single(got, whole)
        case _:
            return lambda: _hand_on(dist, message, rank, world)


def _hand_on(dist, message, rank: int, world: int) -> None:
    """Even ranks send to the odd ones above them; the last of an odd number waits for nobody."""
    if rank % 2 == 0 and rank + 1 < world:
        dist.send(message, rank + 1)
    elif rank % 2:
        dist.recv(message, rank - 1)


def timed(
    run: Callable[[], None], op: str, size: int, rank: int, world: int, node: str, warmup: int, iterations: int, device: str,
) -> list[dict]:  # fmt: skip
    """Rows of `prism.measure.collectives.arrivals`: start and end of every iteration on this rank.

    A barrier before each; on a GPU the end is when the device is done.
    """
    import torch
    import torch.distributed as dist

    finish = torch.cuda.synchronize if device != "cpu" else _no_wait
    # of sends, each pair is a collective of its own
    pair, members = (rank // 2, 2) if op == "send_recv" else (0, world)
    rows = []
    for i in range(-warmup, iterations):
        dist.barrier()
        finish()
        start = time.monotonic()
        run()
        finish()
        end = time.monotonic()
        if i >= 0 and not (op == "send_recv" and world % 2 and rank == world - 1):
            rows.append(
                {"collective": op, "message_bytes": size, "ranks": members, "iteration": i * max(world // 2, 1) + pair if op == "send_recv" else i,
                 "rank": rank, "node": node, "start_s": f"{start:.9f}", "end_s": f"{end:.9f}"}
            )  # fmt: skip
    return rows


def _no_wait() -> None:
    """A CPU is done when the call returns."""
