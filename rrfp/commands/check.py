"""`rrfp check hint|transport|lane NAME`: suites for plugins; beside `faults`, `admission` and `replay`."""

from __future__ import annotations

import os
import sysconfig
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

import rrfp
from rrfp.commands.command_line import (
    Command,
    CommandGroup,
    Json,
    completed,
    first_line,
    known_hints,
    known_lanes,
    known_transports,
    print_json,
)
from rrfp.errors import ConfigError, misspelt
from rrfp.laboratory import COMMANDS, load
from rrfp.testing.checks import NotOfferedError, SkippedError
from rrfp.testing.lanes import LANES, lanes_named

_Contract = TypeVar("_Contract", bound=Callable[..., object])

check = typer.Typer(cls=CommandGroup, help="Check that a plugin keeps its contract; exit code 1 if it does not.")
check.command(cls=Command)(load(COMMANDS["check faults"]))
check.command(cls=Command)(load(COMMANDS["check admission"]))
check.command(cls=Command)(load(COMMANDS["check replay"]))

#: The folders of Python's own modules.
_STANDARD = (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["platstdlib"])

#: Libraries that rrfp itself calls: for an error raised in one, its caller is named.
_USED = frozenset({"torch", "numpy", "zmq", "msgpack", "uvloop"})

Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="CHECK", help="Run this check only; may be given several times."),
]
First = Annotated[bool, typer.Option("-x", help="Stop at the first check that fails.")]

_MARKS = {"ok": "ok  ", "skipped": "skip", "failed": "FAIL"}


def _name(values: Callable[[], Iterable[str]], *, kinds: str = "A registered name") -> Any:
    text = f"{kinds}, module:attribute, or file.py:attribute."
    return typer.Argument(metavar="NAME", help=text, autocompletion=completed(values))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one check."""

    name: str
    #: Whether the contract holds; "skipped" where the check did not look.
    outcome: Literal["ok", "skipped", "failed"]
    #: The promise that holds, the part that a skipped check lacks, or the breach of the contract.
    message: str


@check.command(cls=Command)
def hint(name: Annotated[str, _name(known_hints)], only: Only = None, first: First = False, json: Json = False) -> None:
    """Run the checks for hints: only ready tasks are chosen, every run ends, same history, same choice."""
    from rrfp.hints.registry import create_hint, named_or_loaded_hint
    from rrfp.testing.hint_checks import ALL_CHECKS

    spec = named_or_loaded_hint(name)
    make_hint = partial(create_hint, spec)
    outcomes = (_outcome(contract, partial(contract, make_hint)) for contract in _chosen(ALL_CHECKS, only))
    _report("hint", name, outcomes, first=first, json=json)


@check.command(cls=Command)
def transport(
    name: Annotated[str, _name(known_transports)], only: Only = None, first: First = False, json: Json = False
) -> None:
    """Run the checks for transports, over two of them in this process.

    They may use tcp: with the secret of the environment, and tensors in plain text, or without a secret insecurely.
    """
    import asyncio

    from rrfp.plugins import named_or_loaded
    from rrfp.transports.registry import TRANSPORTS
    from rrfp.transports.secret import Secret

    spec = named_or_loaded("transport", name)
    if isinstance(spec, str):
        TRANSPORTS.load(spec)  # an unknown name is bad usage, not a failed check, and needs no torch

    from rrfp.testing.transport_checks import ALL_CHECKS, Check, PairOptions
    from rrfp.testing.transport_checks.pair import started_pair

    contracts = _chosen(ALL_CHECKS, only)
    secret = Secret.from_environment(os.environ)
    make_pair = partial(started_pair, spec, secret=secret, allow_insecure=secret is None)

    async def start() -> None:
        async with make_pair(PairOptions()):
            pass

    try:  # what is refused is said once, not by every check
        asyncio.run(start())
    except ConfigError:
        raise
    except Exception:  # what else goes wrong is for the checks to find
        pass

    def run(contract: Check) -> None:
        asyncio.run(contract(make_pair))

    outcomes = (_outcome(contract, partial(run, contract)) for contract in contracts)
    _report("transport", name, outcomes, first=first, json=json)


@check.command(cls=Command)
def lane(
    name: Annotated[str, _name(known_lanes, kinds=f"{', '.join(LANES.built_in)}; or the option lane=")],
    only: Only = None,
    first: First = False,
    json: Json = False,
) -> None:
    """Run the checks for lanes: order, completion, order with the caller's work, memory, late errors."""
    import asyncio

    from rrfp.plugins import named_or_loaded

    spec = named_or_loaded("lane", name)
    named = lanes_named(spec) if isinstance(spec, str) else None  # an unknown name needs no torch

    from rrfp.testing.lane_checks import ALL_CHECKS, Check, MakeLane, made_by

    contracts = _chosen(ALL_CHECKS, only)
    makers = {"": made_by(spec)} if named is None else named

    def run(contract: Check, make_lane: MakeLane) -> None:
        asyncio.run(contract(make_lane))

    outcomes = (
        replace(outcome, name=f"{outcome.name}{suffix}")
        for suffix, make_lane in makers.items()
        for contract in contracts
        if (outcome := _outcome(contract, partial(run, contract, make_lane))) is not None
    )
    _report("lane", name, outcomes, first=first, json=json)


def _chosen(contracts: Sequence[_Contract], only: Sequence[str] | None) -> Sequence[_Contract]:
    """The named checks in the suite's order; all by default."""
    by_name = {_name_of(contract): contract for contract in contracts}
    if unknown := [name for name in only or () if name not in by_name]:
        wrong = ", ".join(misspelt(name, by_name) for name in unknown)
        raise ConfigError(f"--only is {wrong}, must be one of: {', '.join(by_name)}")
    return [contract for name, contract in by_name.items() if not only or name in only]


def _name_of(contract: Callable[..., object]) -> str:
    return contract.__name__.removeprefix("check_")


def _outcome(contract: Callable[..., object], run: Callable[[], object]) -> Outcome | None:
    """None where the check is about an option not offered."""
    name = _name_of(contract)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about some dtypes that the checks send
            run()
    except NotOfferedError:
        return None
    except SkippedError as error:
        return Outcome(name, "skipped", str(error))
    except AssertionError as error:
        return Outcome(name, "failed", " ".join(str(error).split()))
    except Exception as error:  # the plugin may raise anything
        return Outcome(name, "failed", f"{' '.join(f'{type(error).__name__}: {error}'.split())}{_location(error)}")
    return Outcome(name, "ok", first_line(contract.__doc__))


def _location(error: Exception) -> str:
    """Where the plugin's own code raised; empty if it took no part."""
    ours = Path(rrfp.__file__).parent
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        parts = Path(frame.filename).parts
        is_standard = frame.filename.startswith(("<", *_STANDARD)) and "site-packages" not in parts
        if not (is_standard or Path(frame.filename).is_relative_to(ours) or _USED.intersection(parts)):
            return f" (at {frame.filename}:{frame.lineno}, in {frame.name})"
    return ""


def _report(kind: str, name: str, outcomes: Iterable[Outcome | None], *, first: bool, json: bool) -> None:
    """A line for each check as it has run; then a summary."""
    done: list[Outcome] = []
    for outcome in filter(None, outcomes):
        done.append(outcome)
        if not json:
            typer.echo(f"{_MARKS[outcome.outcome]} {outcome.name}: {outcome.message}")
        if first and outcome.outcome == "failed":
            break
    counts = Counter(outcome.outcome for outcome in done)
    failed = counts["failed"]
    if json:
        print_json({"kind": kind, "name": name, "ok": not failed, "checks": [asdict(outcome) for outcome in done]})
    else:
        typer.echo(f"{kind} {name}: {counts['ok']} ok, {counts['skipped']} skipped, {failed} failed")
    if failed:
        raise typer.Exit(1)
