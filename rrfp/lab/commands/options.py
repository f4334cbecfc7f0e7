"""Options that several commands share: those of a simulated run, of a timeline, and of the replay of a trace.

Those of `rrfp simulate` and `rrfp sweep` are the fields of the dataclasses that they fill. A field with metadata
(`rrfp.lab.sweep.workloads.as_option`) becomes an option. The keys:

- ``help``, in which ``{default}`` stands for the field's default; ``metavar``, empty for the known values;
- ``known``: the values that complete, or ``module:attribute`` of them;
- ``option``: the option's name, where it is not the field's;
- ``least``: the option takes one whole number, at least this; without it a text, which may list values;
- ``reads``: ``module:attribute`` of the function that makes the value from a text;
- ``beside``: other fields, with which one value alone can be checked; without it that is left to the command;
- ``is_list``: False where a comma is part of the value.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, fields
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

import typer

from rrfp.commands.command_line import Command, completed
from rrfp.errors import ConfigError, Faults
from rrfp.lab.sweep.experiment import Experiment, SimulatedMethod
from rrfp.lab.sweep.workloads import CostFile
from rrfp.laboratory import load
from rrfp.plain import whole

if TYPE_CHECKING:
    from rrfp.lab.advice.advice import Wishes
    from rrfp.lab.traces.timeline import TimeWindow

METHOD, WORKLOAD, OUTPUT = "Method", "Workload", "Output"

PICTURE = "FILE.png|svg|pdf"

#: Option -> its value, None where it was not given.
Given: TypeAlias = Mapping[str, Any]

T = TypeVar("T")


def option(
    name: str,
    metavar: str,
    help: str,
    panel: str | None = None,
    *,
    least: int | None = None,
    # Raises a `ConfigError` for a value that is wrong by itself.
    check: Callable[[str], object] | None = None,
    # Known values, for completion.
    values: Callable[[], Iterable[str]] | None = None,
    # Whether commas separate several values, each of which is checked.
    is_list: bool = True,
) -> Any:
    return typer.Option(
        f"--{name}",
        metavar=metavar,
        help=help,
        rich_help_panel=panel,
        callback=_checked(name, check, is_list=is_list) if check is not None else at_least(name, least),
        autocompletion=None if values is None else completed(values),
    )


def _checked(name: str, check: Callable[[str], object], *, is_list: bool) -> Callable[[Any], Any]:
    def callback(value: Any) -> Any:
        if value is None:
            return None
        with Faults() as faults:
            for each in listed(name, value) if is_list else [value]:
                with faults.kept():
                    check(each)
        return value

    return callback


def at_least(name: str, least: int | None) -> Callable[[int | None], int | None] | None:
    """Refuses numbers below ``least``; None where any will do."""
    if least is None:
        return None

    return lambda value: None if value is None else whole(f"--{name}", value, least)


def listed(name: str, text: str) -> list[str]:
    values = [value.strip() for value in text.split(",")]
    for value in values:
        if values.count(value) > 1:
            raise ConfigError(f"{name} is {text!r}, must name {value!r} once")
    return values


def check_output(path: Path, *inputs: str | Path) -> None:
    """Refuse an unwritable file, or one of ``inputs``, in advance."""
    if path.resolve() in {Path(file).resolve() for file in inputs}:
        raise ConfigError(f"{path}: is read by this command, must be another file to be written")
    if path.is_dir():
        raise ConfigError(f"{path}: cannot be written (is a folder)")
    if not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise ConfigError(f"{path}: cannot be written (no such folder, or not allowed)")


def check_outputs(given: Given, *paths: Path | None) -> None:
    """`check_output` of every path, with the files that ``given`` names; no two paths may be the same file."""
    outputs = [path for path in paths if path is not None]
    with Faults() as faults:
        for index, path in enumerate(outputs):
            with faults.kept():
                check_output(path, *_files_in(given))
                if path.resolve() in {other.resolve() for other in outputs[:index]}:
                    raise ConfigError(f"{path}: is written twice by this command, must be a file of one option")


def _files_in(given: Given) -> Iterator[str]:
    """The files that the values of options name: alone, in a list, or as ``file.py:attribute``."""
    for value in given.values():
        for text in value if isinstance(value, list) else [value]:
            for part in [text, *text.split(",")] if isinstance(text, str) else ():
                yield from (path for path in (part, part.rpartition(":")[0]) if path and Path(path).is_file())


def options_of(cls: type[Any], panel: str) -> list[Parameter]:
    return [_option(cls, each, panel) for each in fields(cls) if each.metadata]


def as_parameter(name: str, kind: Any, info: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, info])


def with_options(*options: Parameter, behind: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command that gets ``options``, shown behind one of its own or first, as a mapping: its first argument."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**values: Any) -> None:
            command({each.name: values.pop(each.name) for each in options}, **values)

        _, *own = signature(command, eval_str=True).parameters.values()
        own = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in own]
        start = [each.name for each in own].index(behind) + 1 if behind else 0
        run.__signature__ = Signature([*own[:start], *options, *own[start:]])  # type: ignore[attr-defined]
        run.__annotations__ = {}
        return run

    return decorate


def _option(cls: type[Any], field: Field[Any], panel: str) -> Parameter:
    told, name = field.metadata, _name(field)
    text = told["help"].format(default=field.default)
    if field.type == "bool":
        return as_parameter(name, bool, typer.Option(f"--{name}/--no-{name}", help=text, rich_help_panel=panel))
    kind = float if field.type == "float" else int if "least" in told else str
    known = told.get("known", ())
    info = option(
        name,
        told["metavar"] or "|".join(known),
        text,
        panel,
        least=told.get("least"),
        check=partial(_check, cls, field) if "beside" in told else None,
        values=partial(_known, known) if known else None,
        is_list=kind is str and told.get("is_list", True),
    )
    return as_parameter(name, kind, info)


def _name(field: Field[Any]) -> str:
    name: str = field.metadata.get("option", field.name)
    return name


def _known(names: str | Iterable[str]) -> Iterable[str]:
    found: Any = load(names) if isinstance(names, str) else names
    return (name for name in (found() if callable(found) else found) if ":" not in name or names is found)


def _check(cls: type[Any], field: Field[Any], value: Any) -> None:
    cls(**{**field.metadata["beside"], field.name: _value(field, value)})


def _value(field: Field[Any], given: Any) -> Any:
    """The field's value; other text stays as it is, for the dataclass to refuse."""
    if "reads" in field.metadata:
        return load(field.metadata["reads"])(given)
    try:
        return int(given) if str(field.type).removesuffix(" | None") == "int" else given
    except ValueError:
        return given


def filled(cls: type[T], given: Given) -> T:
    return cls(**{each.name: _value(each, given[_name(each)]) for each in _given(cls, given)})


def combinations(cls: type[Any], given: Given, but: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """Every combination of the listed values by field, the last one's innermost."""
    chosen = [each for each in _given(cls, given) if each.name not in but]
    lists = [_values(each, given[_name(each)]) for each in chosen]
    for values in product(*lists):
        yield {each.name: value for each, value in zip(chosen, values, strict=True)}


def _given(cls: Any, given: Given) -> list[Field[Any]]:
    return [each for each in fields(cls) if each.metadata and given.get(_name(each)) is not None]


def _values(field: Field[Any], given: Any) -> list[Any]:
    is_list = isinstance(given, str) and field.metadata.get("is_list", True)
    return [_value(field, text) for text in listed(_name(field), given)] if is_list else [given]


class MethodCommand(Command):
    """A command that runs the methods that its options name."""

    def check_together(self, named: Collection[str]) -> None:
        """Refuse options that exclude each other, or lack their companion."""
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
                    faults.keep(f"--{name} goes with --hint; {reason}")
            if "sends" in named and "strict" not in named:
                faults.keep("--sends goes with --strict; readiness-driven stages never wait to send")
            if "coordination" in named and "tp" not in named:
                faults.keep("--coordination goes with --tp; one rank agrees with itself")


def methods_of(given: Given) -> list[SimulatedMethod]:
    """Every hint with all its options, then every strict schedule with all sends."""
    from rrfp.hints.registry import named_or_loaded_hint

    methods = []
    for name in [] if given["hint"] is None else listed("hint", given["hint"]):
        hint, ways = named_or_loaded_hint(name), combinations(SimulatedMethod, given, but=("hint", "strict", "sends"))
        methods += [SimulatedMethod(hint=hint, name=name, **values) for values in ways]
    if given["strict"] is not None:
        ways = combinations(SimulatedMethod, given, but=("hint", "limit", "admission", "order", "coordination"))
        methods += [SimulatedMethod(**values) for values in ways]
    return methods


def one_method(given: Given) -> SimulatedMethod:
    """The only method that the options name; by default the default hint."""
    from rrfp.hints.registry import default_hint

    hint = given["hint"] or default_hint("natural" if given["order"] == "natural" else "free")
    methods = methods_of(given if given["strict"] is not None else {**given, "hint": hint})
    if len(methods) > 1:
        raise ConfigError(f"rrfp simulate runs one method, these are {len(methods)}: lists go with rrfp sweep")
    return methods[0]


def without_sizes(experiments: Iterable[Experiment]) -> str:
    """What hints lack without sizes of microbatches, as a sentence."""
    files = dict.fromkeys(each.workload.costs_file for each in experiments if isinstance(each.workload, CostFile))
    hints = dict.fromkeys(each.method.name for each in experiments)
    names, verb = (next(iter(files)), "has") if len(files) == 1 else (f"{len(files)} cost files", "have")
    return (
        f"{names} {verb} no sizes of microbatches (step(sizes=...) in the job): without them "
        f"{' and '.join(hints)} {'keeps' if len(hints) == 1 else 'keep'} the caller's order"
    )


def warn_of_serial_chunks(experiments: Iterable[Experiment]) -> None:
    """Say on stderr where limit 1f1b makes chunks run one after another."""
    if any(experiment.method.limit == "1f1b" and experiment.workload.chunks > 1 for experiment in experiments):
        typer.echo(
            "warning: with several chunks --limit 1f1b leaves them few microbatches, those of the last stage one: they "
            "run one after the other; n holds what 1F1B holds on its first stage (rrfp.Pipeline refuses 1f1b here)",
            err=True,
        )


@contextmanager
def progress_bar(total: int | None = None, *, quiet: bool = False) -> Iterator[Callable[..., None]]:
    """A bar on a terminal's stderr; gives what advances it by one, or shows a text behind it."""
    from rich import progress
    from rich.console import Console

    console, text = Console(stderr=True), progress.TextColumn("{task.description}", markup=False)
    times = progress.TimeElapsedColumn(), progress.TimeRemainingColumn()
    columns = ("runs", progress.BarColumn(), progress.MofNCompleteColumn(), *times, text)
    hidden = quiet or not console.is_terminal
    with progress.Progress(*columns, console=console, disable=hidden, transient=True) as bar:
        task = bar.add_task("", total=total)

        def advance(by: int = 1, text: str = "") -> None:
            bar.update(task, advance=by, description=text)

        yield advance


#: Tasks that a timeline can hold: beyond it takes minutes to draw and is too small to read.
MOST_BOXES = 20_000

_TIMELINE = "Draw the step's timeline; the suffix decides the format."
TimelineFile = Annotated[
    Path | None, typer.Option("--timeline", metavar=PICTURE, help=_TIMELINE, rich_help_panel=OUTPUT)
]
_FROM = "Draw the timeline from this time of the step on, in milliseconds."
From = Annotated[float | None, typer.Option("--from", metavar="MS", help=_FROM, rich_help_panel=OUTPUT)]
_TO = "Draw the timeline up to this time of the step, in milliseconds."
To = Annotated[float | None, typer.Option("--to", metavar="MS", help=_TO, rich_help_panel=OUTPUT)]


def checked_window(path: Path | None, start_ms: float | None, end_ms: float | None) -> TimeWindow:
    """The window of a timeline, refused before the work that it shows."""
    from rrfp.lab.traces.timeline import TimeWindow

    for name, value in (("from", start_ms), ("to", end_ms)):
        if path is None and value is not None:
            raise ConfigError(f"--{name} goes with --timeline FILE")
    if path is not None:
        check_picture(path, "a timeline")
    return TimeWindow.of_milliseconds(start_ms, end_ms)


def check_tasks(tasks: int, instead: str) -> None:
    if tasks > MOST_BOXES:
        raise ConfigError(f"a timeline shows at most {MOST_BOXES} tasks, this step has {tasks}: {instead}")


def check_picture(path: Path, picture: str) -> None:
    """Refuse a picture that could not be written, before anything runs."""
    from rrfp.lab.traces.pictures import picture_format, require_matplotlib

    with Faults() as faults:
        with faults.kept():
            require_matplotlib(picture)
        with faults.kept():
            picture_format(path)
        with faults.kept():
            check_output(path)


TRACE = "Trace (Chrome JSON) written by save_trace."
_RUN = "The run of this name, such as 'replica 1'; default: the first. A file of all replicas tells a slow rank."
_SKIP = "Training steps to leave out at the beginning; default 2."
_STEPS = "The most steps to replay, the newest; default 10."
_HINT = "The hint of the job, where the trace does not say it."
_STRICT = "The strict schedule of the job, where the trace does not say it."
_LIMIT = "The limit of the job, where the trace does not say it: a number, 1f1b, n, 2n, or bytes such as 8GB."

#: Those that say which steps are replayed.
RECORDED = (
    as_parameter("run", str, option("run", "NAME", _RUN)),
    as_parameter("skip_first", int, option("skip-first", "N", _SKIP, least=0)),
    as_parameter("steps", int, option("steps", "N", _STEPS, least=5)),
)


def _check_strict(name: str) -> None:
    from rrfp.hints.registry import create_strict

    create_strict(name)


#: Those, and how the job ran: of all commands that replay a trace.
REPLAYED = (
    *RECORDED,
    as_parameter("hint", str, option("hint", "NAME", _HINT)),
    as_parameter("strict", str, option("strict", "NAME", _STRICT, check=_check_strict, is_list=False)),
    as_parameter("limit", str, option("limit", "K|1f1b|n|2n", _LIMIT)),
)


def wishes_of(given: Given) -> Wishes:
    from rrfp.hints.registry import named_or_loaded_hint
    from rrfp.lab.advice.advice import Wishes

    values = {name: value for name, value in given.items() if value is not None}
    if "hint" in values:
        values["hint"] = named_or_loaded_hint(values["hint"])
    return Wishes(**values)


class ReplayCommand(Command):
    """A command that replays the steps of a trace."""

    def check_together(self, named: Collection[str]) -> None:
        """Refuse what does not go with a strict schedule."""
        with Faults() as faults:
            for name in ("hint", "limit"):
                if "strict" in named and name in named:
                    faults.keep(f"--{name} goes without --strict: a schedule is the order of all tasks")
