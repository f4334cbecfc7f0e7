"""The options that `rrfp simulate` and `rrfp sweep` share, and the methods that they name.

A value that is wrong by itself is refused here, before anything runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from rrfp.commands.naming import named_or_loaded_hint
from rrfp.errors import ConfigError

if TYPE_CHECKING:
    from rrfp.schedules.registry import ScheduleSpec
    from rrfp.sim.sweep.experiment import Experiment, Method

METHOD, WORKLOAD, OUTPUT = "Method", "Workload", "Output"


def option(name: str, metavar: str, help: str, panel: str, least: int | None = None) -> Any:
    """An option ``--name METAVAR`` in a panel of the help."""
    return typer.Option(f"--{name}", metavar=metavar, help=help, rich_help_panel=panel, min=least)


_HINT = "Dispatch by this hint: a name of `rrfp hints`, module:attribute, or file.py:attribute."
_STRICT = "Run this schedule to the letter: a name that `rrfp hints` lists as one, or a file in torch's grammar."
_LIMIT = "Microbatches a stage may hold: a number, 1f1b (N - i on stage i), n or 2n. With --hint only; default 2n."
_ADMISSION = "How chunks share the limit's slots. With --hint only; default staircase."
_SENDS = "blocking: 1f1b sends as Megatron does, sender and receiver wait for each other. With --strict only."
_SIZES = "Sizes of microbatches for hints: a JSON list of M numbers, or planned, the file's own sums of times."
_COORDINATION = "How ranks of a group agree on one order. With --tp and --hint only; default leader."
TP_HELP = "Ranks of a tensor-parallel group: each stage is T ranks, whose messages take times of their own."

HintName = Annotated[str | None, option("hint", "NAME", _HINT, METHOD)]
Strict = Annotated[str | None, option("strict", "NAME|FILE.csv", _STRICT, METHOD)]
LimitText = Annotated[str | None, option("limit", "K|1f1b|n|2n", _LIMIT, METHOD)]
Admission = Annotated[str | None, option("admission", "staircase|paper", _ADMISSION, METHOD)]
Sends = Annotated[str | None, option("sends", "eager|blocking", _SENDS, METHOD)]
CoordinationName = Annotated[str | None, option("coordination", "leader|agreement", _COORDINATION, METHOD)]
Sizes = Annotated[str | None, option("sizes", "FILE|planned", _SIZES, WORKLOAD)]

#: Option -> its text, None where it was not given.
Texts: TypeAlias = Mapping[str, Any]


def methods_of(texts: Texts) -> list[Method]:
    """Every hint with every limit, admission rule and coordination, then every strict schedule with all sends.

    Args:
        texts: values of hint, strict, limit, admission, sends, coordination, tp and sizes.

    Raises:
        ConfigError: for a value that is not allowed, or one that goes with nothing.
    """
    from rrfp.sim.simulation import DEFAULT_LIMIT
    from rrfp.sim.sweep.experiment import Method

    _check_company(texts)
    limits = listed("limit", texts["limit"], DEFAULT_LIMIT)
    admissions: list[Any] = listed("admission", texts["admission"], "staircase")
    coordinations: list[Any] = (
        [None] if texts["coordination"] is None else listed("coordination", texts["coordination"])
    )
    sends: list[Any] = listed("sends", texts["sends"], "eager")
    methods = []
    for name in [] if texts["hint"] is None else listed("hint", texts["hint"]):
        hint = named_or_loaded_hint(name)
        methods += [
            Method(hint=hint, name=name, limit=limit, admission=rule, coordination=way)
            for limit, rule, way in product(limits, admissions, coordinations)
        ]
    for name in [] if texts["strict"] is None else listed("strict", texts["strict"]):
        schedule = _named_or_read_schedule(name)
        methods += [Method(strict=schedule, sends=how) for how in sends]
    return methods


def one_method(texts: Texts) -> Method:
    """The only method that the options name.

    Raises:
        ConfigError: as `methods_of`, and unless there is exactly one.
    """
    if (texts["hint"] is None) == (texts["strict"] is None):
        raise ConfigError("exactly one of --hint NAME and --strict NAME is needed (names: rrfp hints)")
    methods = methods_of(texts)
    if len(methods) > 1:
        raise ConfigError(f"rrfp simulate runs one method, these are {len(methods)}: lists go with rrfp sweep")
    return methods[0]


def _check_company(texts: Texts) -> None:
    """Refuse an option without the one that it goes with."""
    if texts["hint"] is None and texts["strict"] is None:
        raise ConfigError("at least one of --hint NAME and --strict NAME is needed (names: rrfp hints)")
    reasons = {
        "limit": "a strict schedule holds what its order holds",
        "admission": "a strict schedule holds what its order holds",
        "coordination": "a strict schedule is one order on every rank",
        "sizes": "a strict schedule knows its order",
    }
    for name, reason in reasons.items():
        if texts["hint"] is None and texts[name] is not None:
            raise ConfigError(f"--{name} goes with --hint; {reason}")
    if texts["strict"] is None and texts["sends"] is not None:
        raise ConfigError("--sends goes with --strict; readiness-driven stages never wait to send")
    if texts["tp"] is None and texts["coordination"] is not None:
        raise ConfigError("--coordination goes with --tp; one rank agrees with itself")


def _named_or_read_schedule(text: str) -> ScheduleSpec:
    """A schedule's name, or the content of a file whose name ends in .csv."""
    from rrfp.schedules.csv import CsvSchedule

    if not text.endswith(".csv"):
        return text
    try:
        return CsvSchedule(text, Path(text).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"strict is {text!r}: cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError:
        raise ConfigError(f"strict is {text!r}: is not CSV (not UTF-8 text)") from None


def listed(name: str, text: str | None, default: str = "") -> list[str]:
    """The values between commas; none twice, or a row of the sweep would count double."""
    values = [value.strip() for value in (default if text is None else text).split(",")]
    for value in values:
        if values.count(value) > 1:
            raise ConfigError(f"{name} is {text!r}, must name {value!r} once")
    return values


def warn_of_serial_chunks(experiments: Iterable[Experiment]) -> None:
    """Say on stderr that limit 1f1b makes chunks of a stage run one after the other, where one of these does that."""
    if any(experiment.method.limit == "1f1b" and experiment.workload.chunks > 1 for experiment in experiments):
        typer.echo(
            "warning: with several chunks --limit 1f1b leaves the last stage one microbatch for all of them: they run "
            "one after the other; n holds what 1F1B holds on its first stage (rrfp.Pipeline refuses 1f1b here)",
            err=True,
        )
