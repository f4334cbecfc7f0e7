"""`rrfp hints` and `rrfp transports`: the known names, their origins and descriptions."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

from rrfp.commands.command_line import Json, first_line, print_json
from rrfp.plugins import Registry, name_of
from rrfp.tables import terminal


@dataclass(frozen=True, slots=True)
class KnownPlugin:
    """A name and its plugin."""

    name: str
    #: ``built in``, ``schedule``, or ``plugin`` and the distribution that declares it.
    origin: str
    #: The first line of its docstring, its full name where it has none, or why it cannot be loaded.
    description: str


def hints(json: Json = False) -> None:
    """List the hints: how a stage orders the tasks that are ready."""
    from rrfp.hints.registry import HINTS
    from rrfp.schedules.registry import schedule_generator, schedule_names

    schedules = schedule_names()
    known = [_known(HINTS, name) for name in HINTS.names() if name not in schedules]
    known += [KnownPlugin(name, "schedule", first_line(schedule_generator(name).__doc__)) for name in schedules]
    _show(known, json=json)


def transports(json: Json = False) -> None:
    """List the transports: how stages exchange tensors."""
    from rrfp.transports.registry import TRANSPORTS

    _show((_known(TRANSPORTS, name) for name in TRANSPORTS.names()), json=json)


def _known(registry: Registry[Any], name: str) -> KnownPlugin:
    with _interrupts() as interrupts:
        try:
            plugin = registry.load(name)
            description = first_line(plugin.__doc__) or f"{name_of(plugin)}, which has no docstring"
        except BaseException as error:  # a plugin's import may raise anything, and must not hide the others
            if interrupts:
                raise
            first = error.__cause__ if isinstance(error.__cause__, SystemExit) else error
            description = f"cannot be loaded ({type(first).__name__}: {first})"
    return KnownPlugin(name, registry.origin(name), description)


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Notes the user's Ctrl-Cs, since plugins may raise KeyboardInterrupt too."""
    seen: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGINT, on_signal)
    except ValueError:  # not the main thread, which gets the signal
        yield seen
        return
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def _show(known: Iterable[KnownPlugin], *, json: bool) -> None:
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
