"""`rrfp hints` and `rrfp transports`: what may be named, what it does and where it comes from."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from typing import Any

from rrfp.commands.output import Json, first_line, print_json


@dataclass(frozen=True, slots=True)
class Known:
    """A name that can be asked for.

    Attributes:
        name: the name.
        origin: ``built in``, ``schedule``, or ``plugin`` and the distribution that brings it.
        description: the first line of its docstring, or why it cannot be loaded.
    """

    name: str
    origin: str
    description: str


def hints(json: Json = False) -> None:
    """List the hints: how a stage prioritizes the tasks that are ready."""
    from rrfp.hints.registry import hint_factory, hint_names
    from rrfp.schedules.registry import schedule_generator, schedule_names

    schedules = schedule_names()
    known = [_known("rrfp.hints", name, hint_factory) for name in hint_names() if name not in schedules]
    for name in schedules:
        module = sys.modules[schedule_generator(name).__module__]
        known.append(Known(name, "schedule", first_line(module.__doc__)))
    _show(known, json=json)


def transports(json: Json = False) -> None:
    """List the transports: how stages exchange tensors."""
    from rrfp.transports.registry import transport_factory, transport_names

    _show((_known("rrfp.transports", name, transport_factory) for name in transport_names()), json=json)


def _known(group: str, name: str, load: Callable[[str], Any]) -> Known:
    try:
        factory = load(name)
    except Exception as error:  # a plugin's import may raise anything, and must not hide the others
        return Known(name, _plugin(group, name), f"cannot be loaded ({type(error).__name__}: {error})")
    is_ours = str(getattr(factory, "__module__", "")).split(".")[0] == "rrfp"
    return Known(name, "built in" if is_ours else _plugin(group, name), first_line(factory.__doc__))


def _plugin(group: str, name: str) -> str:
    """The distribution that registers ``name``."""
    found = (point.dist.name for point in entry_points(group=group, name=name) if point.dist is not None)
    return f"plugin {next(found, '?')}"


def _show(known: Iterable[Known], *, json: bool) -> None:
    if json:
        print_json([asdict(one) for one in known])
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "origin", "what it does", box=None, pad_edge=False)
    for one in known:
        table.add_row(one.name, one.origin, one.description)
    Console(highlight=False, markup=False).print(table)
