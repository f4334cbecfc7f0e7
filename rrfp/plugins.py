"""Plugins by name: the package's own, and those that installed distributions declare as entry points.

The package's own names stand in the code alone. As entry points they would exist only where the package is installed,
and an editable install would keep the modules of the day it was made.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

from rrfp.errors import ConfigError, misspelt
from rrfp.laboratory import PLUGINS

T = TypeVar("T")


class Registry(Generic[T]):
    """The plugins of one kind. They are imported when they are loaded.

    ``field`` is the option that takes a name, for errors; ``group`` the entry point group of plugins; ``built_in`` has
    the package's own, ``module:attribute`` by name; the laboratory's count among them. A plugin cannot replace one.
    """

    def __init__(self, field: str, group: str, built_in: Mapping[str, str]) -> None:
        self._field = field
        self.group = group
        own = {**built_in, **PLUGINS.get(group, {})}
        self._built_in = {name: EntryPoint(name, value, group) for name, value in own.items()}

    @property
    def built_in(self) -> tuple[str, ...]:
        return tuple(self._built_in)

    def names(self) -> tuple[str, ...]:
        """All names: the built-in ones, then those of plugins, sorted."""
        return tuple(self._points())

    def load(self, name: str) -> T:
        """Import the plugin ``name``; an unknown name is a ConfigError. Raises whatever the plugin's module raises.

        A module that raises SystemExit is a ConfigError: the program would end without a word.
        """
        # Why not always look at all? That reads the metadata of every installed distribution.
        point = self._built_in.get(name) or self._points().get(name)
        if point is None:
            names = self.names()
            raise ConfigError(f"{self._field} is {misspelt(name, names)}, must be one of: {', '.join(names)}")
        try:
            return cast("T", point.load())
        except SystemExit as error:
            raise ConfigError(f"{self._field} is {name!r}: cannot be loaded (SystemExit: {error})") from error

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name in self._built_in or name in self._points())

    def origin(self, name: str) -> str:
        """``built in``, or ``plugin`` and the distribution that declares ``name``."""
        if name in self._built_in:
            return "built in"
        dist = self._points()[name].dist
        return f"plugin {'?' if dist is None else dist.name}"

    def _points(self) -> dict[str, EntryPoint]:
        declared = {point.name: point for point in entry_points(group=self.group)}
        return {**self._built_in, **{name: declared[name] for name in sorted(declared) if name not in self._built_in}}


def where_defined(cls: type) -> str:
    """The name of a class, with its module's file if any."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return cls.__name__ if file is None else f"{cls.__name__} ({file})"


def called(what: str, factory: Callable[..., T], *arguments: object) -> T:
    """What the caller's ``factory`` returns; a ConfigError where it does not take these arguments."""
    try:
        return factory(*arguments)
    except TypeError as error:
        taken = ", ".join(type(each).__name__ for each in arguments)
        raise ConfigError(f"{what} must be a factory that is called with ({taken}): {error}") from error


def made(kind: type[T], what: str, factory: Callable[..., object], *arguments: object) -> T:
    """The same, of a certain ``kind``."""
    product = called(what, factory, *arguments)
    if not isinstance(product, kind):
        found = where_defined(type(product))
        raise ConfigError(f"{what} made an object of type {found}, must make an rrfp {kind.__name__}")
    return product


def name_of(plugged_in: object) -> str:
    """The full name of a class or function, or of its class."""
    named = plugged_in if hasattr(plugged_in, "__qualname__") else type(plugged_in)
    return f"{named.__module__}.{named.__qualname__}"


def named_or_loaded(field: str, text: str) -> Any:
    """``text`` itself where it is a name, else what it leads to."""
    home, colon, attribute = text.rpartition(":")
    if not colon and text.endswith(".py"):
        raise ConfigError(f"{field} is {text!r}, must be a name, module:attribute or file.py:attribute")
    if not colon:
        return text
    try:
        module = _from_file(Path(home)) if home.endswith(".py") else _from_path(home)
    except (Exception, SystemExit) as error:  # the user's module may raise anything, or be a script that exits
        raise ConfigError(f"{field} is {text!r}: cannot import {home!r} ({type(error).__name__}: {error})") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ConfigError(f"{field} is {text!r}: {home!r} has no attribute {attribute!r}") from None


def _look_in_working_directory() -> None:
    # A console script's path begins with the script's own folder; `python -m` would have the working directory there.
    if "" not in sys.path:
        sys.path.insert(0, "")


def _from_path(name: str) -> ModuleType:
    _look_in_working_directory()
    return importlib.import_module(name)


#: The names of modules that came from a file by its path; a later file may have the same.
_loaded_files: set[str] = set()


def _origin_of(name: str) -> str | None:
    """Where a module of this name is, or would be imported from; None if there is none."""
    try:
        spec = sys.modules[name].__spec__ if name in sys.modules else importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a name with dots
        return None
    return None if spec is None else str(Path(spec.origin).resolve()) if spec.has_location and spec.origin else name


def _from_file(path: Path) -> ModuleType:
    _look_in_working_directory()
    name = path.stem
    if name not in _loaded_files and (origin := _origin_of(name)) not in (None, str(path.resolve())):
        raise ConfigError(f"its module would take the place of {name} ({origin}), must have another name")
    _loaded_files.add(name)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a name that ends in .py has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
