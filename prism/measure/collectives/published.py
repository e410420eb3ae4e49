"""Collective measurements in the forms that others write them in, as rows with standard columns.

Every reader returns a table with ``collective``, ``message_bytes``, ``duration_s`` and what else the form knows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from prism.base.tables import TableError, numbers, one_line, read_table, require_columns

#: a log is read whole
LARGEST_LOG = 256 * 1024**2
#: rows of nccl-tests: size, count, type, redop, root, then twice time, algbw, busbw, #wrong; other programs
#: (broadcast, send and receive) leave columns out
_NCCL = re.compile(
    r"^\s*(?:\d+:)?\s*(\d+)\s+(\d+)\s+([a-z]\w+)((?:\s+\S+){0,2}?)\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)\s+(\S+)"
    r"(?:\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)\s+(\S+))?\s*$"
)
_NCCL_RANK = re.compile(r"#\s+Rank\s+(\d+)\s.*?\bon\s+(\S+)\s+device")
_NCCL_NAME = re.compile(r"\b(\w+)_perf\b")
_PING = re.compile(
    r"Transfer size \(B\):\s*(\d+), Transfer Time \(s\):\s*([\d.eE+-]+),.*Iteration\s+(\d+)"
)
_OSU = re.compile(r"#\s*OSU MPI[\w-]*\s+(.*?)\s+(?:Latency\s+)?Test", re.I)
#: bus bandwidth over algorithm bandwidth of n ranks (nccl-tests, doc/PERFORMANCE.md) says which program wrote a log
_FACTORS: dict[str, Callable[[int], float]] = {
    "allreduce": lambda n: 2 * (n - 1) / n,
    "allgather or reducescatter": lambda n: (n - 1) / n,
}
#: wrappers of CRAB and how they are called here
_CRAB = {"agtr_comm_only": "allgather", "a2a_comm_only": "alltoall", "ardc_comm_only": "allreduce"}
_CRAB_CONDITIONS = {"Inc-Congested": "incast_aggressor", "A2A-Congested": "alltoall_aggressor"}


def read_log(path: Path) -> pd.DataFrame:
    """A text log: of nccl-tests, of OSU's benchmarks with their averages, or of a ping-pong with every iteration.

    Raises
    ------
    TableError
        None of these; nothing measured.
    """
    try:
        if path.stat().st_size > LARGEST_LOG:
            raise TableError(f"{path}: larger than {LARGEST_LOG >> 20} MiB")
        lines = path.read_text("utf-8", errors="replace").splitlines()
    except OSError as fault:
        raise TableError(f"{path}: not readable: {one_line(fault)}") from fault
    for read in (_nccl_tests, _ping_pong, _osu):
        table = read(lines)
        if table is not None and len(table):
            return table
    raise TableError(
        f"{path}: holds no measurement of nccl-tests, OSU's benchmarks or a ping-pong that could be read"
    )


def _nccl_tests(lines: list[str]) -> pd.DataFrame | None:
    """All runs of a log: each begins with its own name, parameters and ranks."""
    if not any("busbw" in line for line in lines):
        return None
    runs: list[list[str]] = [[]]
    for line in lines:
        begins = _NCCL_NAME.search(line) if "_perf" in line else re.search(r"#\s+nThread", line)
        if begins and any(_NCCL.match(x) for x in runs[-1]):
            runs.append([])
        runs[-1].append(line)
    return pd.concat([_nccl_run(run) for run in runs], ignore_index=True)


def _nccl_run(lines: list[str]) -> pd.DataFrame:
    ranks: dict[int, str] = {}
    rows, name = [], None
    for line in lines:
        if found := _NCCL_RANK.search(line):
            ranks[int(found[1])] = found[2]
        elif name is None and "_perf" in line and (found := _NCCL_NAME.search(line)):
            name = found[1].replace("_", "")
        elif found := _NCCL.match(line):
            size, dtype = int(found[1]), found[3]
            for in_place, at in ((0, 5), (1, 9)):
                if found[at] is not None:
                    values = [float(found[at + i]) for i in range(3)]
                    rows.append((size, dtype, in_place, *values, found[at + 3]))
    columns = ["message_bytes", "dtype", "in_place", "mean_us", "algbw", "busbw", "wrong"]
    table = pd.DataFrame(rows, columns=columns)
    table["duration_s"] = table.pop("mean_us") * 1e-6
    if ranks:
        table["ranks"], table["nodes"] = len(ranks), len(set(ranks.values()))
    table["collective"] = name or (_by_factor(table, len(ranks)) if len(table) else "unknown")
    return table.drop(columns=["algbw", "busbw"])


def _by_factor(table: pd.DataFrame, n: int) -> str:
    """Infer the collective from the ratio of both bandwidths at the largest size."""
    last = table.loc[table["algbw"].idxmax()]
    ratio = last["busbw"] / last["algbw"] if last["algbw"] > 0 else np.nan
    for name, factor in _FACTORS.items():
        if n > 2 and abs(ratio - factor(n)) < 0.02 * factor(n):
            return name
    return "unknown"


def _ping_pong(lines: list[str]) -> pd.DataFrame | None:
    rows = [(int(f[1]), float(f[2]), int(f[3])) for line in lines if (f := _PING.search(line))]
    nodes = {f[1] for line in lines if (f := re.match(r"\d+: Node: (\d+) --->", line))}
    table = pd.DataFrame(rows, columns=["message_bytes", "duration_s", "iteration"])
    return table.assign(collective="pingpong", ranks=2, nodes=max(len(nodes), 1))


def _osu(lines: list[str]) -> pd.DataFrame | None:
    """Size and average latency in microseconds; with ``-f`` also the least and largest over ranks. Sizes of all-gather and
    all-to-all are of one rank there, and how many ranks there were it does not say."""
    title = next((f[1] for line in lines if (f := _OSU.match(line))), None)
    header = next(
        (line for line in lines if line.startswith("#") and "Latency" in line and "Size" in line),
        "",
    )
    if title is None or "us" not in header:
        return None
    rows = []
    for line in lines:
        cells = line.split()
        if cells and cells[0].isdigit():
            try:
                rows.append([float(c) for c in cells[:4]])
            except ValueError:
                continue
    full = "Min" in header and "Max" in header
    out = pd.DataFrame(
        {
            "message_bytes": [r[0] for r in rows],
            "duration_s": [(r[3] if full and len(r) > 3 else r[1]) * 1e-6 for r in rows],
        }
    )
    if full and all(len(r) > 3 for r in rows):
        out["earliest_s"] = [r[2] * 1e-6 for r in rows]
    name = re.sub(r"[^a-z0-9]", "", title.lower())
    return out.assign(collective={"": "sendrecv", "latency": "sendrecv"}.get(name, name))


def read_crab(folder: Path) -> pd.DataFrame:
    """A run of CRAB: ``config.json`` and a ``data_app_<i>.csv`` for each measured message size.

    Its ``Max-Duration`` over ranks is the duration. Half of the job's nodes, or as the split says, take part; the others
    may make traffic.
    """
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        options, apps = config["global_options"], config["applications"]
        nodes, split = int(options["numnodes"]), str(options.get("partitionsplit", "100"))
        per_node = int(options.get("ppn", 1))
        extra = str(options.get("extrainfo", ""))
        taking_part = nodes * int(split.split(":")[0]) // 100
        wrappers = {k: Path(str(v.get("path", ""))).stem for k, v in apps.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as fault:
        raise TableError(f"{folder}: no config.json of CRAB: {fault!r}") from fault
    tables = []
    for file in sorted(folder.glob("data_app_*.csv")):
        number = file.stem.rpartition("_")[2]
        table = read_table(file)
        wanted = [f"{number}_{w}-Duration_s" for w in ("Max", "Min")]
        require_columns(table, ("msg_size", *wanted), file)
        wrapper = wrappers.get(number, "")
        tables.append(
            pd.DataFrame(
                {
                    "collective": _CRAB.get(wrapper, wrapper or "unknown"),
                    "message_bytes": table["msg_size"],
                    "iteration": table.groupby("msg_size").cumcount(),
                    "duration_s": table[wanted[0]],
                    "earliest_s": table[wanted[1]],
                }
            )
        )
    if not tables:
        raise TableError(f"{folder}: holds no data_app_<number>.csv")
    condition = next((v for k, v in _CRAB_CONDITIONS.items() if k in extra), "baseline")
    return pd.concat(tables, ignore_index=True).assign(
        condition=condition, nodes=taking_part, job_nodes=nodes, ranks=taking_part * per_node
    )


def per_rank_columns(table: pd.DataFrame, path: Path) -> pd.DataFrame | None:
    """``#MessageSize Rank0Time(us) Rank1Time(us) ...``: every iteration of every rank in a column each."""
    columns = [c for c in table.columns if re.fullmatch(r"Rank\d+Time\(us\)", str(c))]
    if "#MessageSize" not in table or not columns:
        return None
    times = np.column_stack([numbers(table, c, path, least=0) for c in columns]) * 1e-6
    return pd.DataFrame(
        {
            "collective": re.sub(r"(_\d+)+$", "", path.name.split(".")[0]),
            "message_bytes": table["#MessageSize"],
            "iteration": table.groupby("#MessageSize").cumcount(),
            "ranks": len(columns),
            "duration_s": times.max(axis=1),
            "earliest_s": times.min(axis=1),
        }
    )


def nccl_csv(path: Path) -> pd.DataFrame | None:
    """nccl-tests as CSV, whose header names time, bandwidths and #wrong twice: out of place, then in place."""
    with path.open(encoding="utf-8", errors="replace") as file:
        header = file.readline().strip().split(",")
    if header[:1] != ["size"] or header.count("#wrong") != 2 or not {"type", "time"} <= set(header):
        return None
    names = [f"{c}_{header[:i].count(c)}" for i, c in enumerate(header)]
    table = pd.read_csv(path, names=names, skiprows=1)
    halves = [
        pd.DataFrame(
            {
                "message_bytes": table["size_0"],
                "dtype": table["type_0"],
                "in_place": place,
                "duration_s": table[f"time_{place}"] * 1e-6,
                "wrong": table[f"#wrong_{place}"],
            }
        )
        for place in (0, 1)
    ]
    return pd.concat(halves, ignore_index=True).assign(collective="unknown")
