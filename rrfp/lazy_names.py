"""Public names that load when they are first used, so that a package can be imported without all that it offers.

Also names of before, which still work.
"""

import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def homes_of(names: Mapping[str, str]) -> dict[str, str]:
    """The module of each name, given by module its names with blanks between them."""
    return {name: home for home, listed in names.items() for name in listed.split()}


def lazy_names(
    module: str, homes: Mapping[str, str]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """``__all__``, ``__getattr__`` and ``__dir__`` of a module whose names are made in other ones."""

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home = import_module(homes[name])
        is_package = homes[name] == f"{module}.{name}"
        return home if is_package else getattr(home, name)

    names = sorted(homes)
    return names, load, lambda: list(names)


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """``__getattr__`` of a module with ``names`` of before, each with that of now; they warn."""

    def load(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{module}.{name} is now {module}.{names[name]}", DeprecationWarning, stacklevel=2)
        return getattr(sys.modules[module], names[name])

    return load
