"""One door for traces of every format."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

import xarray as xr

from prism.traces.formats.chakra import read_chakra
from prism.traces.formats.op_level import is_op_level, read_op_level
from prism.traces.formats.table import read_record_table
from prism.traces.profiler.ranks import read_profiler
from prism.traces.records import TraceError

#: what a folder is searched for
JSON = (".json", ".json.gz")
CHAKRA = (".et", ".et.gz")
TABLES = (".parquet", ".csv", ".csv.gz")
KNOWN = (*JSON, *CHAKRA, *TABLES)
#: what the beginning of a JSON file tells
_EXECUTION, _GRAPH = re.compile(rb'"schema"\s*:'), re.compile(rb'"workload_graph"\s*:')


def read_trace(
    paths: str | Path | Sequence[str | Path],
    *,
    ranks: Sequence[int] | None = None,
    progress: bool = False,
) -> xr.Dataset:
    """Read measured steps into one Dataset, whatever wrote them.

    Parameters
    ----------
    paths : path or sequence of paths
        A folder, or files of one job, all of one format:

        - Kineto / PyTorch profiler JSON (``.json``, ``.json.gz``), one file a rank;
          Execution traces beside them (``schema``, ``nodes``) name collectives that kernels do not;
        - Chakra execution traces, protobuf (``.et``) or JSON, one file a rank;
        - op-level parquet of the StragglerAnalysis kind (`prism.traces.straggler`);
        - a plain table, CSV or parquet, of columns ``rank, step, op, start, duration`` and optionally
          ``group`` and others (`prism.traces.table`).
    ranks : sequence of int, optional
        Rank of each profiler file, where files do not tell.
    progress : bool
        Show a bar while reading.

    Returns
    -------
    Dataset
        ``start(step, op)`` and ``duration(step, op)``, seconds, raw as recorded (communication includes
        waiting), with coordinates ``name, rank, stream, role, group, seq, shape, dtype, dp, stage,
        microbatch`` on `op`; ``edge_from`` and ``edge_to`` where the reader found dependencies.

    Raises
    ------
    TraceError
        Missing or damaged files, mixed formats, and what the reader of the format refuses.

    Warns
    -----
    TraceWarning
        Once, with counts: events left out, steps left out, a rank known from a file name only.
    """
    files = _files([Path(p) for p in ([paths] if isinstance(paths, str | Path) else paths)])
    by_format: dict[str, list[Path]] = {}
    for f in files:
        by_format.setdefault(_format(f), []).append(f)
    executions = by_format.pop("execution trace", [])
    if executions and set(by_format) != {"profiler"}:
        raise TraceError(
            f"{executions[0]}: an execution trace holds no times; give the profiler's trace beside it"
        )
    if len(by_format) > 1:
        raise TraceError(
            f"files of different formats ({', '.join(sorted(by_format))}); give one job's"
        )
    ((found, files),) = by_format.items()
    if found == "profiler":
        return read_profiler(files, ranks=ranks, executions=executions, progress=progress)
    if found == "chakra":
        return read_chakra(files, ranks)
    if ranks is not None:
        raise TraceError("ranks= is for profiler files; a table has a column rank")
    return read_op_level(files) if found == "op-level parquet" else read_record_table(files)


def _files(paths: list[Path]) -> list[Path]:
    if not paths:
        raise TraceError("no trace given; name at least one file or folder")
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        inside = sorted(f for f in path.iterdir() if f.name.endswith(KNOWN))
        if not inside:
            raise TraceError(f"{path}: no trace in this folder ({', '.join(KNOWN)})")
        found += inside
    for f in found:
        if not f.is_file():
            raise TraceError(f"{f}: no such file")
    if len(set(found)) < len(found):
        raise TraceError("a file is given more than once")
    return found


def _format(path: Path) -> str:
    if path.name.endswith(CHAKRA):
        return "chakra"
    if path.name.endswith(JSON):
        begin = _begin(path)
        if _GRAPH.search(begin):
            return "chakra"
        return "execution trace" if _EXECUTION.search(begin) else "profiler"
    if path.suffix == ".parquet" and is_op_level(path):
        return "op-level parquet"
    if path.name.endswith(TABLES):
        return "table"
    raise TraceError(f"{path}: not a trace that can be read; known are {', '.join(KNOWN)}")


def _begin(path: Path, size: int = 4096) -> bytes:
    """The first bytes of a plain or gzip file; what cannot be read is left for its reader to refuse."""
    with path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        try:
            return gzip.GzipFile(fileobj=raw).read(size) if packed else raw.read(size)
        except (OSError, EOFError, zlib.error):
            return b""
