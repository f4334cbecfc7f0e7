"""Readers of plain data: values from files, options, callers and the network, checked by type and range.

Each returns the value, or raises what ``error`` makes of the field and the reason, by default a ConfigError.
"""

from __future__ import annotations

import json
import math
import operator
import os
import reprlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from rrfp.errors import ConfigError

MakeError = Callable[[str, str], Exception]
"""Makes an error of a field's name and a reason, which begins with a verb: "is 3, must be ..."."""

Reader = Callable[..., Any]
"""Returns the checked value of a field: called with its name, its value and ``error``."""

_BRIEF = reprlib.Repr()
_BRIEF.maxlevel = 3
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = 60

_MAX_SHOWN = 80


def shown(value: object) -> str:
    """``value`` for an error, in 80 characters at most. Unlike ``repr``, of values nested as deep as may be."""
    return _BRIEF.repr(value)[:_MAX_SHOWN]


def config_error(field: str, reason: str) -> ConfigError:
    """The error for a field of a file, an option or an argument."""
    return ConfigError(f"{field} {reason}")


def value_error(field: str, reason: str) -> ValueError:
    """The error for a field of data whose reader names the file or the rank."""
    return ValueError(f"{field} {reason}")


def whole(
    field: str, value: object, least: int = 0, most: int | None = None, *, error: MakeError = config_error
) -> int:
    number = value if type(value) is int else _index(value)
    if number is None or number < least or (most is not None and number > most):
        span = f">= {least}" if most is None else f"{least}..{most}"
        raise error(field, f"is {shown(value)}, must be a whole number {span}")
    return number


def _index(value: object) -> int | None:
    """A whole number of another type than int, such as numpy's; None for anything else, and for True and False."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def number(
    field: str, value: object, least: float = -math.inf, *, above: float = -math.inf, error: MakeError = config_error
) -> float:
    """A finite number, also one of another type than float and int, such as a tensor of one element."""
    try:
        read = math.nan if isinstance(value, bool) or not hasattr(value, "__float__") else float(value)
    except (TypeError, ValueError, OverflowError):  # tensors of several elements; an int beyond the floats
        read = math.nan
    if not (math.isfinite(read) and read >= least and read > above):
        span = f" >= {least:g}" if least > -math.inf else f" above {above:g}" if above > -math.inf else ""
        raise error(field, f"is {shown(value)}, must be a finite number{span}")
    return read


def flag(field: str, value: object, *, error: MakeError = config_error) -> bool:
    if type(value) is not bool:
        raise error(field, f"is {shown(value)}, must be True or False")
    return value


def text(field: str, value: object, *, error: MakeError = config_error) -> str:
    if type(value) is not str or not value:
        raise error(field, f"is {shown(value)}, must be a string that is not empty")
    return value


def one_of(names: Collection[str], field: str, value: object, *, error: MakeError = config_error) -> Any:
    if not isinstance(value, str) or value not in names:
        raise error(field, f"is {shown(value)}, must be one of: {', '.join(names)}")
    return value


def blob(field: str, value: object, length: int, *, error: MakeError = config_error) -> bytes:
    if type(value) is not bytes or len(value) != length:
        raise error(field, f"is {shown(value)}, must be {length} bytes")
    return value


def path_of(field: str, value: object, *, error: MakeError = config_error) -> Path:
    if not is_path(value):
        raise error(field, f"is {shown(value)}, must be a path")
    return Path(os.fsdecode(value))  # type: ignore[arg-type]


def is_path(value: object) -> bool:
    """Whether the system can have a file of this name."""
    try:
        return b"\0" not in os.fsencode(value)  # type: ignore[arg-type]
    except (TypeError, UnicodeEncodeError):
        return False


def or_none(reader: Reader, field: str, value: object, *span: object, error: MakeError = config_error) -> Any:
    def fault(name: str, reason: str) -> Exception:
        return error(name, f"{reason}, or None")

    return None if value is None else reader(field, value, *span, error=fault)


def read_json(path: str | os.PathLike[str], name: str | None = None) -> Any:
    """The document of a JSON file; a ConfigError of one line begins with ``name``, by default the path."""
    name = os.fspath(path) if name is None else name
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: is not JSON ({json_fault(error)})") from None


def json_fault(error: ValueError | RecursionError) -> str:
    """Why text is not JSON, for an error of one line."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8 text"
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at line {error.lineno} column {error.colno}"
    return str(error)  # an integer of more digits than Python converts


def fields_of(
    mapping: Mapping[str, Any], readers: Mapping[str, Reader], *, error: MakeError = config_error
) -> dict[str, Any]:
    """The fields of a mapping that has exactly the names of ``readers``, each read by its own."""
    if absent := [name for name in readers if name not in mapping]:
        raise error(absent[0], "is absent")
    if unknown := [name for name in mapping if name not in readers]:
        raise error(shown(unknown[0]), f"is unknown, must be one of: {', '.join(readers)}")
    return {name: reader(name, mapping[name], error=error) for name, reader in readers.items()}
