"""The console script ``rrfp``: all commands, and one line for every error.

Exit codes: 0 done, 1 failed, 2 bad usage or bad input, 3 the simulated run deadlocks, 130 interrupted. A command's
module is imported for ``rrfp --help`` as well, so those modules import numpy, torch and the like when they run.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import rrfp
from rrfp.commands.check import check
from rrfp.commands.demo import demo
from rrfp.commands.doctor import doctor
from rrfp.commands.plugins import hints, transports
from rrfp.commands.simulate import simulate
from rrfp.commands.sweep import sweep
from rrfp.commands.trace import trace
from rrfp.errors import ConfigError, DeadlockError, RrfpError

FAILED, USAGE, DEADLOCK, INTERRUPTED = 1, 2, 3, 130

#: One run and many: an option of the one that is passed to the other is answered with the right command.
_SIBLINGS = {"simulate": "sweep", "sweep": "simulate"}

# The base of typer's errors about arguments. Its module depends on typer's version.
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]


class Commands(TyperGroup):
    """The commands. An `RrfpError` becomes one line on stderr and an exit code."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command line and exit."""
        kwargs["standalone_mode"] = False
        try:
            result = super().main(*args, **kwargs)
            sys.stdout.flush()
        except _UsageError as error:
            _fail(_usage(error), USAGE)
        except ConfigError as error:
            _fail(_one_line(error), USAGE)
        except DeadlockError as error:
            _fail(str(error), DEADLOCK)
        except RrfpError as error:
            _fail(_one_line(error), FAILED)
        except (typer.Abort, KeyboardInterrupt):
            _fail("interrupted", INTERRUPTED)
        except BrokenPipeError:  # the reader of the output, such as `head`, is gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.exit(FAILED)
        if result == INTERRUPTED:  # typer caught Ctrl-C itself and prints nothing
            _fail("interrupted", INTERRUPTED)
        sys.exit(result if isinstance(result, int) else 0)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _usage(error: Any) -> str:
    """The fault in the arguments, the choices where a command is missing or unknown, and the help option."""
    message = " ".join(error.format_message().split()).removesuffix(".")
    context = getattr(error, "ctx", None)
    if context is None:
        return message
    if _is_siblings(getattr(error, "option_name", None), context):
        message += f"; it is an option of rrfp {_SIBLINGS[context.command.name]}"
    if isinstance(context.command, TyperGroup) and "option" not in message:
        message += f", must be one of: {', '.join(context.command.list_commands(context))}"
    return f"{message} (see {context.command_path} --help)"


def _is_siblings(option: str | None, context: Any) -> bool:
    """Whether an option that is unknown to a command is one of its sibling's."""
    if option is None or context.command.name not in _SIBLINGS:
        return False
    sibling = context.parent.command.commands[_SIBLINGS[context.command.name]]
    return any(option in parameter.opts for parameter in sibling.params)


def _fail(message: str, code: int) -> None:
    typer.echo(f"rrfp: {message}", err=True)
    sys.exit(code)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"rrfp {rrfp.__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=Commands,
    name="rrfp",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _rrfp(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Pipeline-parallel training in which a schedule is a hint, never a command."""


app.command()(demo)
app.command()(simulate)
app.command()(sweep)
app.command()(trace)
app.command()(hints)
app.command()(transports)
app.add_typer(check, name="check")
app.command()(doctor)


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
