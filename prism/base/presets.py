"""Presets: named specs that the package ships, each figure with its source."""

from __future__ import annotations

import difflib
from functools import cache
from importlib.resources import files
from typing import Any

from ruamel.yaml import YAML


def with_preset(kind: str, given: Any) -> Any:
    """Fields of a preset under those that are given, where ``preset`` names one; nested ones are merged.

    Raises
    ------
    ValueError
        Unknown names, with the nearest ones.
    """
    if not isinstance(given, dict) or "preset" not in given:
        return given
    name, known = given["preset"], presets(kind)
    if not isinstance(name, str) or name not in known:
        near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.3) or sorted(known)
        raise ValueError(
            f"no preset {name!r}; near it: {', '.join(near)} (all: {', '.join(sorted(known))})"
        )
    return _merged(known[name], {k: v for k, v in given.items() if k != "preset"})


def _merged(base: dict, over: dict) -> dict:
    out = dict(base)
    for key, value in over.items():
        nested = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = _merged(out[key], value) if nested else value
    return out


@cache
def presets(kind: str) -> dict[str, dict]:
    """All presets of a kind (``topologies``, ``workloads``), without their sources."""
    text = files("prism").joinpath("presets", f"{kind}.yaml").read_text(encoding="utf-8")
    content = YAML(typ="safe", pure=True).load(text)
    return {
        name: {k: v for k, v in spec.items() if k != "sources"} for name, spec in content.items()
    }
