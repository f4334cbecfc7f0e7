"""Readers of plain data: values from files, options and callers, checked by type and range."""

from __future__ import annotations

import operator
import os
import reprlib
from pathlib import Path

from rrfp.errors import ConfigError


def whole(field: str, value: object, least: int) -> int:
    """Return ``value`` as an int; a ConfigError that names ``field`` if it is no whole number >= ``least``."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or number < least:
        raise ConfigError(f"{field} is {reprlib.repr(value)}, must be a whole number >= {least}")
    return number


def path_of(field: str, value: object) -> Path:
    """Return ``value`` as a path; a ConfigError that names ``field`` if it is none."""
    try:
        text = os.fsdecode(value)  # type: ignore[arg-type]
    except TypeError:
        text = "\0"
    if "\0" in text:
        raise ConfigError(f"{field} is {value!r:.80}, must be a path")
    return Path(text)
