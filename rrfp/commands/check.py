"""`rrfp check hint|transport NAME`: the conformance suites, for authors of plugins; beside `faults` and `admission`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated

import typer

from rrfp.commands.check_admission import admission
from rrfp.commands.check_faults import faults
from rrfp.commands.naming import named_or_loaded, named_or_loaded_hint
from rrfp.commands.output import Json, first_line, print_json

check = typer.Typer(help="Check that a plugin keeps its contract; exit code 1 if it does not.")
check.command()(faults)
check.command()(admission)

_NAME = "A registered name, module:attribute, or file.py:attribute."
Name = Annotated[str, typer.Argument(metavar="NAME", help=_NAME)]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one check.

    Attributes:
        name: the check's name.
        ok: whether the contract holds.
        message: what was checked, or how it broke.
    """

    name: str
    ok: bool
    message: str


@check.command()
def hint(name: Name, json: Json = False) -> None:
    """Run the checks for hints: only ready tasks are chosen, every run ends, same history, same choice."""
    from rrfp.hints.registry import create_hint
    from rrfp.testing.hint_checks import ALL_CHECKS

    spec = named_or_loaded_hint(name)
    make_hint = partial(create_hint, spec)
    outcomes = (_outcome(one, partial(one, make_hint)) for one in ALL_CHECKS)
    _report("hint", name, outcomes, json=json)


@check.command()
def transport(name: Name, json: Json = False) -> None:
    """Run the checks for transports, over two of them in this process."""
    import asyncio

    from rrfp.commands.pair import started_pair
    from rrfp.testing.transport_checks import ALL_CHECKS, Check
    from rrfp.transports.registry import transport_factory

    spec = named_or_loaded("transport", name)
    if isinstance(spec, str):
        transport_factory(spec)  # an unknown name is bad usage, not a failed check
    make_pair = partial(started_pair, spec)

    def run(one: Check) -> None:
        asyncio.run(one(make_pair))

    outcomes = (_outcome(one, partial(run, one)) for one in ALL_CHECKS)
    _report("transport", name, outcomes, json=json)


def _outcome(what: Callable[..., object], run: Callable[[], object]) -> Outcome:
    name = what.__name__.removeprefix("check_")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of dtypes that the checks send
            run()
    except AssertionError as error:
        return Outcome(name, False, " ".join(str(error).split()))
    except Exception as error:  # the plugin may raise anything
        return Outcome(name, False, " ".join(f"{type(error).__name__}: {error}".split()))
    return Outcome(name, True, first_line(what.__doc__))


def _report(kind: str, name: str, outcomes: Iterable[Outcome], *, json: bool) -> None:
    """A line for each check as soon as it has run, then a summary."""
    done: list[Outcome] = []
    for outcome in outcomes:
        done.append(outcome)
        if not json:
            typer.echo(f"{'ok  ' if outcome.ok else 'FAIL'} {outcome.name}: {outcome.message}")
    failed = sum(not outcome.ok for outcome in done)
    if json:
        print_json({"kind": kind, "name": name, "ok": not failed, "checks": [asdict(outcome) for outcome in done]})
    else:
        typer.echo(f"{kind} {name}: {len(done) - failed} of {len(done)} checks passed")
    if failed:
        raise typer.Exit(1)
