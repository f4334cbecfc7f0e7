"""`rrfp hints` and `rrfp transports`: the known names, their origins and descriptions."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rrfp.commands.output import Json, first_line, print_json
from rrfp.core.registry import Registry
from rrfp.tables import terminal


@dataclass(frozen=True, slots=True)
class Known:
    """A name and its plugin.

    Attributes:
        name: the name.
        origin: ``built in``, ``schedule``, or ``plugin`` and the distribution that declares it.
        description: the first line of its docstring, or why it cannot be loaded.
    """

    name: str
    origin: str
    description: str


def hints(json: Json = False) -> None:
    """List the hints: how a stage orders the tasks that are ready."""
    from rrfp.hints.registry import HINTS
    from rrfp.schedules.registry import schedule_generator, schedule_names

    schedules = schedule_names()
    known = [_known(HINTS, name) for name in HINTS.names() if name not in schedules]
    for name in schedules:
        module = sys.modules[schedule_generator(name).__module__]
        known.append(Known(name, "schedule", first_line(module.__doc__)))
    _show(known, json=json)


def transports(json: Json = False) -> None:
    """List the transports: how stages exchange tensors."""
    from rrfp.transports.registry import TRANSPORTS

    _show((_known(TRANSPORTS, name) for name in TRANSPORTS.names()), json=json)


def _known(registry: Registry[Any], name: str) -> Known:
    try:
        description = first_line(registry.load(name).__doc__)
    except Exception as error:  # a plugin's import may raise anything, and must not hide the others
        description = f"cannot be loaded ({type(error).__name__}: {error})"
    return Known(name, registry.origin(name), description)


def _show(known: Iterable[Known], *, json: bool) -> None:
    if json:
        print_json([asdict(entry) for entry in known])
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for head in ("name", "origin"):
        table.add_column(head, no_wrap=True)
    table.add_column("description")
    for entry in known:
        table.add_row(entry.name, entry.origin, entry.description)
    terminal().print(table)
