"""Plugins by name: the package's own, and those that installed distributions declare as entry points.

The package's own names stand in the code alone. As entry points they would exist only where the package is installed,
and an editable install would keep the modules of the day it was made.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar, cast

from rrfp.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """The plugins of one kind. They are imported when they are loaded.

    ``field`` is the option that takes a name, for errors; ``group`` the entry point group of plugins; ``built_in`` has
    the package's own, ``module:attribute`` by name. A plugin cannot replace one.
    """

    def __init__(self, field: str, group: str, built_in: Mapping[str, str]) -> None:
        self._field = field
        self._group = group
        self._built_in = {name: EntryPoint(name, value, group) for name, value in built_in.items()}

    def names(self) -> tuple[str, ...]:
        """All names: the built-in ones, then those of plugins, sorted."""
        return tuple(self._points())

    def load(self, name: str) -> T:
        """Import the plugin ``name``; an unknown name is a ConfigError. Raises whatever the plugin's module raises."""
        # Why not always look at all? That reads the metadata of every installed distribution.
        point = self._built_in.get(name) or self._points().get(name)
        if point is None:
            raise ConfigError(f"{self._field} is {name!r}, must be one of: {', '.join(self.names())}")
        return cast("T", point.load())

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name in self._built_in or name in self._points())

    def origin(self, name: str) -> str:
        """``built in``, or ``plugin`` and the distribution that declares ``name``."""
        if name in self._built_in:
            return "built in"
        dist = self._points()[name].dist
        return f"plugin {'?' if dist is None else dist.name}"

    def _points(self) -> dict[str, EntryPoint]:
        declared = {point.name: point for point in entry_points(group=self._group)}
        return {**self._built_in, **{name: declared[name] for name in sorted(declared) if name not in self._built_in}}
