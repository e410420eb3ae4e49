"""A synthetic profiler file of any size, in the proportions of a real one: per kernel about four CPU ops with
shapes, two runtime calls, and flow events that readers skip.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from prism.traces.profiler.fields import Event


def write(path: Path, size: int) -> Path:
    """Write about `size` bytes: one rank, one step."""
    written, i, t = 0, 0, 0.0
    with path.open("w") as file:
        file.write(
            '{"schemaVersion": 1, "distributedInfo": {"rank": 0, "world_size": 1},\n"traceEvents": [\n'
        )
        while written < size:
            text = ",\n".join(json.dumps(e, indent=2) for e in _kernel(i, t)) + ",\n"
            written += file.write(text)
            i, t = i + 1, t + 37.125
        step = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 1, "tid": 1,
                "ts": -1.0, "dur": t + 50}  # fmt: skip
        file.write(json.dumps(step) + '\n], "traceName": "synthetic"}\n')
    return path


def _kernel(i: int, t: float):
    shape = [[64 << (i % 5), 1024], [1024, 4096], []]
    for depth in range(4):
        yield _event("cpu_op", f"aten::op_{(i + depth) % 40}", t + depth, 30 - 2 * depth, 1,
                     {"External id": 4 * i + depth, "Input Dims": shape, "Input type": ["float", "float", ""],
                      "Ev Idx": 4 * i + depth, "Sequence number": i, "Fwd thread id": 0})  # fmt: skip
    yield _event("cuda_runtime", "cudaOccupancyMaxActiveBlocksPerMultiprocessor", t + 5, 1, 1, {})
    yield _event("cuda_runtime", "cudaLaunchKernel", t + 8, 5, 1,
                 {"External id": 4 * i + 3, "cbid": 211, "correlation": i + 1})  # fmt: skip
    yield _event("kernel", f"void at::native::vectorized_elementwise_kernel<{i % 60}>(int, float*)", t + 15, 20.5,
                 7, {"External id": 4 * i + 3, "queued": 0, "device": 0, "context": 1, "stream": 7,
                     "correlation": i + 1, "registers per thread": 32, "shared memory": 0,
                     "blocks per SM": 1.5, "warps per SM": 12, "grid": [108, 1, 1], "block": [256, 1, 1],
                     "est. achieved occupancy %": 31})  # fmt: skip
    for ph in "sf":
        yield {
            "ph": ph,
            "id": i,
            "pid": 1,
            "tid": 1,
            "ts": t + 8,
            "cat": "ac2g",
            "name": "ac2g",
            "bp": "e",
        }


def _event(cat: str, name: str, ts: float, dur: float, tid: int, args: dict) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": round(ts, 3), "dur": dur,
            "args": args}  # fmt: skip


class _Document(msgspec.Struct):
    traceEvents: list[Event]


def bare_decode(path: Path) -> list[Event]:
    """The whole file at once, by msgspec alone."""
    return msgspec.json.decode(path.read_bytes(), type=_Document, strict=False).traceEvents
