"""Typed JSON files below the results folder: read with their place in every complaint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from lra.values import fill

T = TypeVar("T")


def read(path: Path, target: Callable[..., T], what: str) -> T:
    """The object of class `target` that a file holds.

    Raises:
        ValueError: not JSON, an unknown or missing field, a wrong type, or refused by the class;
            names the file and the field.
    """
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a JSON file of {what} ({error})") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(values).__name__}")
    try:
        return fill(target, values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_all(paths: Iterable[Path], load: Callable[[Path], T]) -> tuple[list[T], list[str]]:
    """What `load` makes of each file, in their order; a warning for each that is not one."""
    found, warnings = [], []
    for path in paths:
        try:
            found.append(load(path))
        except ValueError as error:
            warnings.append(f"skipped {error}")
    return found, warnings
