"""What all commands share: a line whose faults are all named, options whose values complete, and JSON on stdout."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from rrfp.errors import ConfigError, nearest_to

# The base of typer's errors about arguments. Its module depends on typer's version.
UsageError: type[Exception] = typer.BadParameter.__mro__[2]

#: One run and many: an option of the one that is passed to the other is answered with the right command.
_SIBLINGS = {"simulate": "sweep", "sweep": "simulate"}


class Command(TyperCommand):
    """A command whose error names all independent faults of the line."""

    def get_params(self, ctx: Any) -> list[Any]:
        """All parameters; the help shows no value for those that take none."""
        return _flags_without_value(super().get_params(ctx))

    def check_together(self, named: Collection[str]) -> None:
        """Refuse options that do not go together."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        line = list(args)
        try:
            rest: list[str] = super().parse_args(ctx, args)
            if not ctx.resilient_parsing:
                self.check_together(self.make_parser(ctx).parse_args(args=list(line))[0])
        except (UsageError, ConfigError):
            errors = list(self._errors(ctx, line))
            texts = [text for error in errors for text in getattr(error, "faults", ()) or (_text(error),)]
            if any(isinstance(error, UsageError) for error in errors):
                texts[-1] += f" (see {ctx.command_path} --help)"
            raise ConfigError.joining(texts) from None
        return rest

    def _errors(self, context: Any, line: list[str]) -> Iterator[Exception]:
        """Unreadable options, then wrong values, then wrong combinations."""
        unread: set[str] = set()
        while True:
            try:
                named, rest, _ = self.make_parser(context).parse_args(args=list(line))
                break
            except UsageError as error:
                yield error
                name = getattr(error, "option_name", "")
                if (others := _without(line, name)) is None:
                    return
                unread.add(name)
                line = others
        for parameter in self.get_params(context):
            if not parameter.is_eager and unread.isdisjoint(parameter.opts):
                try:
                    _, rest = parameter.handle_parse_result(context, named, rest)
                except (UsageError, ConfigError) as error:
                    yield _no_number(error, parameter.opts[0], named.get(parameter.name)) or error
        try:
            self.check_together(named)
            if rest and not unread:  # beside an unknown option it may be that one's value
                context.fail(f"Got unexpected extra argument(s) ({' '.join(rest)})")
        except (UsageError, ConfigError) as error:
            yield error


class CommandGroup(TyperGroup):
    """Several commands. Without one of them it prints its help."""

    def get_params(self, ctx: Any) -> list[Any]:
        """All parameters; the help shows no value for those that take none."""
        return _flags_without_value(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the line as far as the command."""
        if not args and not ctx.resilient_parsing:
            typer.echo(ctx.get_help())
            ctx.exit()
        rest: list[str] = super().parse_args(ctx, args)
        return rest


def _flags_without_value(parameters: list[Any]) -> list[Any]:
    """Some versions of typer show ``<bool>`` behind a flag."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False) and parameter.metavar is None:
            parameter.metavar = ""
    return parameters


def _no_number(error: Exception, name: str, given: Any) -> ConfigError | None:
    """What typer says of an option that takes a number, in words that do not depend on its version."""
    kind = re.search("valid (integer|float|number)", getattr(error, "message", ""))
    if kind is None:
        return None
    values = ", ".join(map(repr, given if isinstance(given, list | tuple) else [given]))
    return ConfigError(f"{name} is {values}, must be a {'whole ' if kind[1] == 'integer' else ''}number")


def usage_text(error: Exception) -> str:
    """A fault that typer found, with choices and the help option."""
    context = getattr(error, "ctx", None)
    return _text(error) if context is None else f"{_text(error)} (see {context.command_path} --help)"


def _text(error: Exception) -> str:
    if not isinstance(error, UsageError):
        return " ".join(str(error).split())
    fault: Any = error
    message, _, suggestion = " ".join(fault.format_message().split()).partition(". Did you mean ")
    message = message.removesuffix(".")
    if possibilities := getattr(error, "possibilities", None):  # some of which are rather far
        nearest = nearest_to(fault.option_name, possibilities)
        message = fault.message + (f" (did you mean {nearest}?)" if nearest else "")
    context = getattr(error, "ctx", None)
    if context is None:
        return message
    if _is_siblings(getattr(error, "option_name", None), context):
        message = f"{fault.message}; it is an option of rrfp {_SIBLINGS[context.command.name]}"
    if isinstance(context.command, TyperGroup) and "option" not in message:
        message += f", must be one of: {', '.join(context.command.list_commands(context))}"
    return f"{message}; did you mean {suggestion}" if suggestion else message


def _is_siblings(option: str | None, context: Any) -> bool:
    if option is None or context.command.name not in _SIBLINGS:
        return False
    sibling = context.parent.command.commands[_SIBLINGS[context.command.name]]
    return any(option in parameter.opts for parameter in sibling.params)


def _without(line: list[str], name: str) -> list[str] | None:
    """The line without an option and a negative number behind it."""
    for index, text in enumerate(line):
        if name and text.partition("=")[0] == name:
            behind = "" if "=" in text else "".join(line[index + 1 : index + 2])
            return [*line[:index], *line[index + (2 if re.match(r"-\.?\d", behind) else 1) :]]
    return None


def completed(values: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Completes the last of the values between commas."""

    def complete(incomplete: str) -> list[str]:
        before, comma, begun = incomplete.rpartition(",")
        return [f"{before}{comma}{value}" for value in values() if value.startswith(begun)]

    return complete


def known_hints() -> Iterable[str]:
    """All hints, plugins and schedules included."""
    from rrfp.hints.registry import hint_names

    return hint_names()


def known_transports() -> Iterable[str]:
    """All transports, plugins included."""
    from rrfp.transports.registry import TRANSPORTS

    return TRANSPORTS.names()


def known_lanes() -> Iterable[str]:
    """All lanes that ``check lane`` names, plugins included."""
    from rrfp.testing.lanes import LANES

    return LANES.names()


#: The option that every command has.
Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON instead of text.")]


def print_json(document: Mapping[str, Any] | Sequence[Any]) -> None:
    """Write ``document`` as one line; equal documents give equal bytes."""
    typer.echo(json.dumps(document, allow_nan=False))


def first_line(text: str | None) -> str:
    """A docstring's first line without full stop, if there is one."""
    lines = (text or "").strip().splitlines()
    return lines[0].strip().removesuffix(".") if lines else ""
