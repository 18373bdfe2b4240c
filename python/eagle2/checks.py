"""Checks of what callers and files hand in: messages name the argument and what came."""

import contextlib
import json
import math
import operator
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


def whole_number(name: str, value: Any, low: int = 1) -> int:
    """`value` if it is a whole number of `low` or more.

    Raises:
        ValueError: it is not.
    """
    try:
        number = operator.index(value)  # also NumPy's and torch's
    except TypeError:
        raise ValueError(f"{name}: wanted a whole number, got {value!r}") from None
    if number < low:
        raise ValueError(f"{name}: wanted {low} or more, got {number}")
    return number


def positive_number(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a finite number above 0."""
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name}: wanted a positive number, got {value!r}")


def one_of(name: str, value: object, kinds: type | tuple[type, ...], wanted: str) -> None:
    """Raise ValueError unless `value` is of one of these classes; `wanted` says what they are."""
    if not isinstance(value, kinds):
        raise ValueError(f"{name}: wanted {wanted}, got {type(value).__name__}")


def function(name: str, value: object) -> None:
    """Raise ValueError unless `value` can be called."""
    if not callable(value):
        raise ValueError(f"{name}: wanted a function, got {type(value).__name__}")


@contextlib.contextmanager
def naming(place: str | os.PathLike) -> Iterator[None]:
    """Put the place in front of what a ValueError or OSError says."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    except OSError as error:
        raise OSError(f"{place}: {error}") from None


def read_lines(file: str | os.PathLike, lines: Iterable[str]) -> Iterator[tuple[str, object]]:
    """Where each line of a JSON-lines file stands, and what it holds; empty ones are left out.

    Raises:
        ValueError: a line is no JSON, or what was opened as text is none.
    """
    number = 0
    try:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield f"{file}:{number}", json.loads(line.strip())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: wanted JSON in line {number or 1}: {error}") from None


def read_json(file: Path) -> dict:
    """The object that a JSON file holds.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is cut short, no JSON, or holds something else.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: wanted JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file}: wanted a JSON object, got {type(found).__name__}")
    return found
