"""Named tuples between stages: sent by the name of their class, which the receiving rank must have loaded.

A received name is untrusted. It is only looked up in modules that are loaded already: this imports nothing and runs no
module's ``__getattr__`` and no constructor, and accepts only a tuple class with the fields that were sent.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

from rrfp.errors import StageError

_REMEDY = "return a tuple or a dict instead (x._asdict())"


def is_named(value: object) -> bool:
    """Whether ``value`` is an instance of a class that ``namedtuple`` or ``NamedTuple`` made, or of a subclass."""
    return isinstance(value, tuple) and isinstance(getattr(value, "_fields", None), tuple)


def name_of(value: Any, path: str) -> str:
    """The name by which another rank finds the class of ``value``, ``module:qualified.name``.

    A StageError if that name does not lead to the class, such as for a class defined in a function.
    """
    cls = type(value)
    name = f"{cls.__module__}:{cls.__qualname__}"
    if _find(name) is not cls:
        raise StageError(
            f"{path} is a named tuple of the class {name}, which other stages cannot find by that name: define it at "
            f"the top level of a module, or {_REMEDY}"
        )
    return name


def rebuilt(name: Any, fields: Any, items: Iterable[Any]) -> Any:
    """The named tuple that was sent; a StageError if this rank has not loaded its class, or one with other fields."""
    cls = _find(name) if isinstance(name, str) else None
    known = getattr(cls, "_fields", None) if isinstance(cls, type) and issubclass(cls, tuple) else None
    if cls is None or not isinstance(known, tuple):
        raise StageError(
            f"a named tuple of the class {name!r:.200} arrived, which this rank has not loaded: import its module "
            f"where this stage is built, or {_REMEDY}"
        )
    values = tuple(items)
    if not isinstance(fields, Sequence) or known != tuple(fields) or len(values) != len(known):
        raise StageError(
            f"a named tuple of the class {name} arrived with the fields {fields!r:.200}, here it has {list(known)}: "
            f"run the same code on all ranks, or {_REMEDY}"
        )
    return tuple.__new__(cls, values)  # its own constructor may take other arguments


def with_items(value: Any, items: Iterable[Any]) -> Any:
    """A named tuple like ``value`` with other items."""
    return tuple.__new__(type(value), items)


def _find(name: str) -> Any:
    """The object of that name in a loaded module; None if there is none."""
    module, _, path = name.partition(":")
    value: Any = sys.modules.get(module)
    for part in path.split("."):
        # Why not getattr? A lazy module, or a metaclass, would run code of its own.
        if issubclass(type(value), ModuleType):
            value = ModuleType.__getattribute__(value, "__dict__").get(part)
        elif issubclass(type(value), type):
            value = type.__getattribute__(value, "__dict__").get(part)
        else:
            return None
    return value
