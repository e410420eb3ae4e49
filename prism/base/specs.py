"""Small text files that say what to model: YAML 1.2, validated, refused in one line.

YAML 1.1 readers take ``1e-3`` for a string and ``no`` for false; everything here is read by one
YAML 1.2 reader, and by the same rules that DVC applies to ``params.yaml``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError


class SpecError(ValueError):
    """A file that cannot be read as what it should describe."""


class Spec(BaseModel):
    """Base of everything that is read from a file: immutable, no unknown keys, no coercion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


S = TypeVar("S", bound=Spec)


def read_yaml(path: str | Path) -> Any:
    """Content of a YAML 1.2 file (no tags, no objects).

    Raises
    ------
    SpecError
        If there is no such file, it is not UTF-8 text, or it is not YAML.
    """
    path = Path(path)
    if not path.is_file():
        raise SpecError(f"{path}: no such file")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as fault:
        raise SpecError(f"{path}: not UTF-8 text") from fault
    if text.lstrip().startswith("%"):
        raise SpecError(
            f"{path}: YAML directives are not read: this is YAML 1.2, whatever they say"
        )
    try:
        return YAML(typ="safe", pure=True).load(text)
    except (YAMLError, ValueError, OverflowError, RecursionError) as fault:
        mark = getattr(fault, "problem_mark", None)
        at = f" at line {mark.line + 1}" if mark else ""
        problem = " ".join(str(getattr(fault, "problem", None) or fault).split())
        raise SpecError(f"{path}: not valid YAML{at}: {problem}") from fault


def validate(model: type[S], content: Any, where: str) -> S:
    """`content` as `model`, or one line that names every key that is off."""
    try:
        return model.model_validate(content)
    except ValidationError as fault:
        problems = [
            f"{'.'.join(str(p) for p in e['loc']) or 'file'}: {e['msg'].removeprefix('Value error, ')}"
            + (f" (got {e['input']!r})" if not isinstance(e["input"], dict | list) else "")
            for e in fault.errors()
        ]
        raise SpecError(" ".join(f"{where}: {'; '.join(problems)}".split())) from None


def read_spec(model: type[S], path: str | Path) -> S:
    """Read a YAML file as `model`. Raises `SpecError`."""
    return validate(model, read_yaml(path), str(path))
