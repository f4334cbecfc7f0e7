"""The options that `rrfp simulate` and `rrfp sweep` share, and the methods that they name.

A value that is wrong by itself is refused here, before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from rrfp.commands.command_line import Command, listed, option
from rrfp.commands.known_names import known_hints, known_schedules
from rrfp.errors import ConfigError, Faults

if TYPE_CHECKING:
    from rrfp.lab.sweep.experiment import Experiment, SimulatedMethod
    from rrfp.schedules.registry import ScheduleSpec

METHOD, WORKLOAD, OUTPUT = "SimulatedMethod", "Workload", "Output"

#: The accepted files of pictures.
PICTURE = "FILE.png|svg|pdf"

#: The accepted forms of a hint, for help texts.
HINT_FORMS = "a name that `rrfp hints` lists, module:attribute, or file.py:attribute"
_HINT = (
    f"Dispatch by this hint: {HINT_FORMS}. Default of rrfp simulate without --strict: slot-aware-pyramid, with "
    "--order natural slot-aware."
)
_STRICT = "Run this schedule to the letter: a name that `rrfp hints` lists as one, or a file in torch's grammar."
_LIMIT = (
    "Microbatches a stage may hold: a number, 1f1b (N - i on stage i), n or 2n; bytes:LIMIT: as many bytes as it holds "
    "under that limit; SIZE: bytes, such as 8MB. Not with --strict; default 2n."
)
_LIMITS = ("1f1b", "n", "2n", "bytes:1f1b", "bytes:n", "bytes:2n")
_ADMISSION = "How chunks share the limit's slots. Not with --strict; default staircase."
_ORDER = "natural: microbatches of one kind run as 0, 1, 2, ... on each virtual stage. Not with --strict; default free."
_SENDS = "blocking: 1f1b sends as Megatron does, sender and receiver wait for each other. With --strict only."
_SIZES = (
    "Sizes of microbatches for hints: a JSON list of M numbers, or planned, the file's own sums of times. Default: the "
    "cost file's, if it has any."
)
_COORDINATION = "How the ranks of a group agree on the same order. With --tp, not with --strict; default leader."
TP_HELP = "Ranks of a tensor-parallel group: each stage is T ranks, whose messages take times of their own."


def check_hint(text: str) -> None:
    """Refuse a text that makes no hint."""
    from rrfp.hints.registry import named_or_loaded_hint

    named_or_loaded_hint(text)


def _check_strict(text: str) -> None:
    _check_method(strict=_named_or_read_schedule(text))


def _check_method(**values: Any) -> None:
    """Refuse a value of a method that is wrong by itself."""
    from rrfp.lab.sweep.experiment import SimulatedMethod

    SimulatedMethod(**values)


def _of_hint(name: str) -> Callable[[str], None]:
    return lambda text: _check_method(hint="bf", **{name: text})


def _of_strict(name: str) -> Callable[[str], None]:
    return lambda text: _check_method(strict="1f1b", **{name: text})


def choice(name: str, values: str, help: str, panel: str, check: Callable[[str], object]) -> Any:
    """An option whose values are those between the bars of ``values``."""
    return option(name, values, help, panel, check=check, values=partial(values.split, "|"))


HintName = Annotated[str | None, option("hint", "NAME", _HINT, METHOD, check=check_hint, values=known_hints)]
Strict = Annotated[
    str | None, option("strict", "NAME|FILE.csv", _STRICT, METHOD, check=_check_strict, values=known_schedules)
]
LimitText = Annotated[
    str | None,
    option("limit", "[bytes:]K|1f1b|n|2n|SIZE", _LIMIT, METHOD, check=_of_hint("limit"), values=lambda: _LIMITS),
]
Admission = Annotated[str | None, choice("admission", "staircase|paper", _ADMISSION, METHOD, _of_hint("admission"))]
Order = Annotated[str | None, choice("order", "free|natural", _ORDER, METHOD, _of_hint("order"))]
Sends = Annotated[str | None, choice("sends", "eager|blocking", _SENDS, METHOD, _of_strict("sends"))]
CoordinationName = Annotated[
    str | None, choice("coordination", "leader|agreement", _COORDINATION, METHOD, _of_hint("coordination"))
]
Sizes = Annotated[str | None, option("sizes", "FILE|planned", _SIZES, WORKLOAD, values=lambda: ("planned",))]

#: Option -> its text, None where it was not given.
Texts: TypeAlias = Mapping[str, Any]


class MethodCommand(Command):
    """A command that runs the methods that its options name."""

    def check_together(self, named: Collection[str]) -> None:
        """Refuse an option without the one that it goes with, or beside one that excludes it."""
        is_strict = "strict" in named and "hint" not in named
        reasons = {
            "limit": "a strict schedule holds what its order holds",
            "admission": "a strict schedule holds what its order holds",
            "order": "a strict schedule is the order of all tasks",
            "coordination": "a strict schedule is the same order on every rank",
            "sizes": "a strict schedule knows its order",
        }
        with Faults() as faults:
            for name, reason in reasons.items():
                if name in named and is_strict:
                    with faults.kept():
                        raise ConfigError(f"--{name} goes with --hint; {reason}")
            if "sends" in named and "strict" not in named:
                with faults.kept():
                    raise ConfigError("--sends goes with --strict; readiness-driven stages never wait to send")
            if "coordination" in named and "tp" not in named:
                with faults.kept():
                    raise ConfigError("--coordination goes with --tp; one rank agrees with itself")


def methods_of(texts: Texts) -> list[SimulatedMethod]:
    """Every hint with every limit, admission rule, order and coordination, then every strict schedule with all sends.

    Args:
        texts: values of hint, strict, limit, admission, order, sends and coordination, each right by itself.
    """
    from rrfp.hints.registry import named_or_loaded_hint
    from rrfp.lab.simulation import DEFAULT_LIMIT
    from rrfp.lab.sweep.experiment import SimulatedMethod

    def values(name: str, default: str = "") -> list[Any]:
        return listed(name, texts[name] or default)

    coordinations = [None] if texts["coordination"] is None else values("coordination")
    methods = []
    for name in [] if texts["hint"] is None else values("hint"):
        hint = named_or_loaded_hint(name)
        methods += [
            SimulatedMethod(hint=hint, name=name, limit=limit, admission=rule, order=order, coordination=way)
            for limit, rule, order, way in product(
                values("limit", DEFAULT_LIMIT), values("admission", "staircase"), values("order", "free"), coordinations
            )
        ]
    for name in [] if texts["strict"] is None else values("strict"):
        schedule = _named_or_read_schedule(name)
        methods += [SimulatedMethod(strict=schedule, sends=how) for how in values("sends", "eager")]
    return methods


def one_method(texts: Texts) -> SimulatedMethod:
    """The only method that the options name; with neither hint nor schedule the default hint."""
    from rrfp.hints.registry import default_hint

    hint = texts["hint"] or default_hint(texts["order"] or "free")
    methods = methods_of(texts if texts["strict"] is not None else {**texts, "hint": hint})
    if len(methods) > 1:
        raise ConfigError(f"rrfp simulate runs one method, these are {len(methods)}: lists go with rrfp sweep")
    return methods[0]


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


def without_sizes(experiments: Iterable[Experiment]) -> str:
    """A sentence on what hints lack that want sizes of microbatches, as the cost files of ``experiments`` have none."""
    from rrfp.lab.sweep.workloads import CostFile

    files = dict.fromkeys(each.workload.costs_file for each in experiments if isinstance(each.workload, CostFile))
    hints = dict.fromkeys(each.method.name for each in experiments)
    names, verb = (next(iter(files)), "has") if len(files) == 1 else (f"{len(files)} cost files", "have")
    return (
        f"{names} {verb} no sizes of microbatches (step(sizes=...) in the job): without them "
        f"{' and '.join(hints)} {'keeps' if len(hints) == 1 else 'keep'} the caller's order"
    )


def warn_of_serial_chunks(experiments: Iterable[Experiment]) -> None:
    """Say on stderr that limit 1f1b makes chunks of a stage run one after the other, where one of these does that."""
    if any(experiment.method.limit == "1f1b" and experiment.workload.chunks > 1 for experiment in experiments):
        typer.echo(
            "warning: with several chunks --limit 1f1b leaves them few microbatches, those of the last stage one: they "
            "run one after the other; n holds what 1F1B holds on its first stage (rrfp.Pipeline refuses 1f1b here)",
            err=True,
        )
