"""Fixtures shared by the tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def prism_data() -> Path:
    """Other people's measurements, which the repository does not hold: ``PRISM_DATA`` or the folder
    ``../shared/data`` beside it. Tests that need them skip where they are absent."""
    folder = Path(os.environ.get("PRISM_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"needs measured data: set PRISM_DATA ({folder} is not a folder)")
    return folder


@pytest.fixture(params=["ST", "SE"])
def straggler_trace(request, prism_data: Path) -> Path:
    """A real multi-step trace, 8 and 64 ranks."""
    return prism_data / "traces" / "straggler_analysis" / f"trace-{request.param}.parquet"
