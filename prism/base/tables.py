"""Untrusted CSV and parquet tables; an invalid one raises a one-line `TableError`."""

from __future__ import annotations

import lzma
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd


class TableError(ValueError):
    """A table that cannot be used; the message names file, column and row."""


_UNREADABLE = (ValueError, OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)
#: beyond this a float no longer holds every whole number
LARGEST_WHOLE = 2.0**53


def table_files(folder: Path) -> list[Path]:
    """Tables in a folder, by name. Raises `TableError` if there is none."""
    files = sorted(f for f in folder.iterdir() if f.name.endswith((".csv", ".csv.gz", ".parquet")))
    if not files:
        raise TableError(f"{folder}: holds no .csv, .csv.gz or .parquet")
    return files


def read_table(path: Path, text: Sequence[str] = ()) -> pd.DataFrame:
    """Read a ``.parquet`` or (compressed) CSV file, columns in `text` as strings.

    Raises
    ------
    TableError
        Missing or unreadable file, rows longer than the header, repeated columns, no rows.
    """
    if not path.is_file():
        raise TableError(f"{path}: no such file")
    try:
        if path.suffix == ".parquet":
            table = _read_parquet(path)
        else:
            table = pd.read_csv(path, dtype=dict.fromkeys(text, "string"), skipinitialspace=True)
    except (*_UNREADABLE, MemoryError) as fault:
        raise TableError(f"{path}: not readable as a table: {one_line(fault)}") from fault
    if not isinstance(table.index, pd.RangeIndex):
        # pandas takes the surplus for an index and shifts every value one column to the left
        raise TableError(f"{path}: rows have more cells than the header has columns")
    if table.columns.has_duplicates:
        raise TableError(
            f"{path}: column {table.columns[table.columns.duplicated()][0]} is repeated"
        )
    if table.empty:
        raise TableError(f"{path}: holds no rows")
    return table


def _read_parquet(path: Path) -> pd.DataFrame:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as missing:
        raise TableError(
            f"{path}: reading parquet needs pyarrow; install prism-runtime[parquet]"
        ) from missing
    try:
        return parquet.read_table(path).to_pandas(ignore_metadata=True)
    except pyarrow.ArrowException as fault:
        raise ValueError(f"not readable as parquet: {one_line(fault)}") from fault


def require_columns(table: pd.DataFrame, names: Sequence[str], path: Path) -> None:
    """Raise `TableError` naming every missing column, and what is there."""
    absent = [n for n in names if n not in table]
    if absent:
        there = [str(c) for c in table.columns]
        shown = ", ".join(there[:8]) + (", ..." if len(there) > 8 else "")
        raise TableError(
            f"{path}: columns {', '.join(absent)} are missing; needs {', '.join(names)}, has {shown}"
        )


def numbers(
    table: pd.DataFrame, column: str, path: Path, *, least: float = -np.inf, whole: bool = False,
    empty: bool = False, missing: float | None = None,
) -> np.ndarray:  # fmt: skip
    """A column as float64 (row,).

    Parameters
    ----------
    least : float
        Smallest value allowed.
    whole : bool
        Whether only whole numbers are allowed.
    empty : bool
        Whether empty cells are allowed; they become NaN.
    missing : float, optional
        A value that stands for an empty cell.

    Raises
    ------
    TableError
        Cells that are no numbers, time stamps, infinite, too small, not whole, or empty.
    """
    cells = table[column]
    kind = cells.dtype.kind
    if kind in "Mmb":
        raise TableError(f"{path}: column {column} holds {cells.dtype}, needs numbers")
    values = pd.to_numeric(cells, errors="coerce").to_numpy(np.float64, na_value=np.nan)
    blank = cells.isna().to_numpy()
    if missing is not None:
        blank = blank | (values == missing)
        values = np.where(values == missing, np.nan, values)
    bad = (~np.isfinite(values) & ~(blank & empty)) | (values < least)
    if whole:
        bad |= (values != np.floor(values)) & ~blank
        bad |= np.abs(values) > LARGEST_WHOLE
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        what = "a whole number" if whole else "a number"
        bound = f" >= {least:g}" if np.isfinite(least) else ""
        raise TableError(
            f"{path}: {column} must be {what}{bound}, {int(bad.sum())} rows are not "
            f"(first: {str(cells.iloc[row])!r} in data row {row + 1})"
        )
    return values


def labels(table: pd.DataFrame, column: str, path: Path) -> np.ndarray:
    """A column of names as str (row,). Raises `TableError` where one is empty."""
    cells = table[column]
    blank = cells.isna() | (cells.astype("string").str.strip() == "")
    if blank.any():
        row = int(np.flatnonzero(blank)[0])
        raise TableError(
            f"{path}: {column} is empty in {int(blank.sum())} rows (first: data row {row + 1})"
        )
    return cells.astype("string").to_numpy(dtype=object).astype("U")


def one_line(fault: BaseException) -> str:
    """The message of an exception, without line breaks."""
    return " ".join(str(fault).split()) or type(fault).__name__
