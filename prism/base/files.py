"""Files of results: written whole or not at all, read with one line where they are not what they should be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import xarray as xr

from prism.base import schema
from prism.base.tables import one_line


def write_atomically(writers: Mapping[Path, Callable[[Path], Any]]) -> None:
    """Write files under temporary names, then rename them: all of them or none.

    Parameters
    ----------
    writers : mapping of the final path to a function that writes a file at the path that it is given

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     target = Path(folder) / "step.txt"
    ...     write_atomically({target: lambda part: part.write_text("0.25")})
    ...     target.read_text()
    '0.25'
    """
    # the name keeps its ending, which some writers go by
    temporary = {target: target.with_name(f".partial-{target.name}") for target in writers}
    try:
        for target, write in writers.items():
            write(temporary[target])
        for target, part in temporary.items():
            part.replace(target)
    finally:
        for part in temporary.values():
            part.unlink(missing_ok=True)


def write_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write records as a ``.csv.gz`` table, without a time stamp in the archive."""
    compression: Any = {"method": "gzip", "mtime": 0}
    write_atomically(
        {path: lambda part: pd.DataFrame(rows).to_csv(part, index=False, compression=compression)}
    )


def write_dataset(ds: xr.Dataset, path: str | Path) -> None:
    """Write a Dataset as ``.nc``; equal content gives equal bytes."""
    write_atomically({Path(path): lambda part: ds.to_netcdf(part, engine="h5netcdf")})


def read_dataset(path: str | Path, fault: type[ValueError] = ValueError) -> xr.Dataset:
    """Read a Dataset that PRISM saved, and check it against the vocabulary.

    Parameters
    ----------
    path : path
    fault : type of ValueError
        Exception to raise where the file is not such a Dataset.
    """
    try:
        with xr.open_dataset(path, engine="h5netcdf") as ds:
            return schema.check(ds.load())
    except (OSError, ValueError) as problem:
        raise fault(f"{path}: not a saved Dataset: {one_line(problem)}") from problem
