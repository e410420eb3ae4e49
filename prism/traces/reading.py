"""One door for traces of every format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import xarray as xr

from prism.traces.profiler import read_profiler
from prism.traces.records import TraceError
from prism.traces.straggler import is_op_level, read_op_level
from prism.traces.table import read_record_table

#: what a folder is searched for
JSON = (".json", ".json.gz")
TABLES = (".parquet", ".csv", ".csv.gz")


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
    formats = {_format(f) for f in files}
    if len(formats) > 1:
        raise TraceError(
            f"files of different formats ({', '.join(sorted(formats))}); give one job's"
        )
    if formats == {"json"}:
        return read_profiler(files, ranks=ranks, progress=progress)
    if ranks is not None:
        raise TraceError("ranks= is for profiler files; a table has a column rank")
    return read_op_level(files) if formats == {"op-level parquet"} else read_record_table(files)


def _files(paths: list[Path]) -> list[Path]:
    if not paths:
        raise TraceError("no trace given; name at least one file or folder")
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        inside = sorted(f for f in path.iterdir() if f.name.endswith((*JSON, *TABLES)))
        if not inside:
            raise TraceError(f"{path}: no trace in this folder ({', '.join((*JSON, *TABLES))})")
        found += inside
    for f in found:
        if not f.is_file():
            raise TraceError(f"{f}: no such file")
    return found


def _format(path: Path) -> str:
    if path.name.endswith(JSON):
        return "json"
    if path.suffix == ".parquet" and is_op_level(path):
        return "op-level parquet"
    if path.name.endswith(TABLES):
        return "table"
    raise TraceError(
        f"{path}: not a trace that can be read; known are {', '.join((*JSON, *TABLES))}"
    )
