"""Small profiler files written by hand: times in microseconds, one thread, one device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def step(number: int, ts: float, dur: float) -> dict[str, Any]:
    return event("user_annotation", f"ProfilerStep#{number}", ts, dur)


def event(
    cat: str, name: str, ts: float, dur: float, tid: int = 100, **args: Any
) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur,
            "args": args}  # fmt: skip


def launch(correlation: int, ts: float, name: str = "cudaLaunchKernel", dur: float = 3) -> dict:
    return event("cuda_runtime", name, ts, dur, correlation=correlation)


def kernel(
    name: str, correlation: int, ts: float, dur: float, stream: int = 7, **args: Any
) -> dict:
    return event("kernel", name, ts, dur, tid=stream, stream=stream, correlation=correlation,
                 grid=[1, 1, 1], block=[128, 1, 1], **args)  # fmt: skip


def collective(
    correlation: int, ts: float, dur: float, ranks: list[int], kind: str = "allreduce", **args: Any
) -> dict:
    said = {
        "Collective name": kind, "In msg nelems": 8, "Out msg nelems": 8, "Group size": len(ranks),
        "dtype": "Float", "Process Group Name": "0", "Process Group Ranks": str(ranks),
    }  # fmt: skip
    name = "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)"
    return kernel(name, correlation, ts, dur, stream=20, **(said | args))


def write(folder: Path, rank: int, events: list[dict], world: int = 1, **top: Any) -> Path:
    info = {"backend": "nccl", "rank": rank, "world_size": world}
    path = folder / f"rank{rank}.json"
    text = json.dumps({"schemaVersion": 1, "distributedInfo": info, "traceEvents": events} | top)
    path.write_text(text)
    return path


def two_ranks(folder: Path, steps: int = 3) -> list[Path]:
    """Two ranks, each step 200 us: compute of 30 and 50 us, an all-reduce of 20, an optimizer of 10."""
    paths = []
    for rank, work in enumerate((30, 50)):
        events = []
        for s in range(steps):
            t, c = 200 * s, 10 * s
            events += [
                step(s, t, 200),
                launch(c + 1, t + 5), kernel("forward", c + 1, t + 10, work),
                launch(c + 2, t + 20), collective(c + 2, t + 10 + work, 70 - work, [0, 1]),
                launch(c + 3, t + 30), kernel("optimizer", c + 3, t + 80, 10),
            ]  # fmt: skip
        paths.append(write(folder, rank, events, world=2))
    return paths
