"""All commands of the console script ``rrfp``, and a line for every error.

Exit codes: 0 done, 1 failed, 2 bad usage or bad input, 3 the simulated run deadlocks, 130 interrupted. A command's
module is imported for ``rrfp --help`` as well, so those modules import numpy, torch and the like when they run.
"""

import errno
import os
import sys
from typing import Annotated, Any

import typer

import rrfp
from rrfp.commands.check import check
from rrfp.commands.command_line import Command, CommandGroup, UsageError, usage_text
from rrfp.commands.doctor import doctor
from rrfp.commands.plugins import hints, transports
from rrfp.commands.secret import secret
from rrfp.commands.top import top
from rrfp.errors import ConfigError, DeadlockError, RrfpError
from rrfp.laboratory import COMMAND_CLASSES, COMMANDS, load

FAILED, USAGE, DEADLOCK, INTERRUPTED = 1, 2, 3, 130

#: The groups of commands in the help.
FIRST, MY_JOB, WHAT_IF, EXTEND = "First look", "My job", "What if", "Extend"


class Commands(CommandGroup):
    """The commands; an `RrfpError` becomes a line and an exit code."""

    # Several independent faults of a line become a line each.

    def main(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["standalone_mode"] = False
        try:
            result = super().main(*args, **kwargs)
            if sys.stdout is not None:  # as where a shell has closed it
                sys.stdout.flush()
        except UsageError as error:
            _fail(usage_text(error), USAGE)
        except ConfigError as error:
            _fail("\nrrfp: ".join(map(_one_line, error.faults or (error,))), USAGE)
        except DeadlockError as error:
            _fail(str(error), DEADLOCK)
        except RrfpError as error:
            _fail(_one_line(error), FAILED)
        except (typer.Abort, KeyboardInterrupt):
            _fail("interrupted", INTERRUPTED)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.ENOSPC):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # where what is left goes at the end
            if error.errno == errno.ENOSPC:
                _fail(f"the output cannot be written ({error.strerror})", FAILED)
            sys.exit(FAILED)  # the reader of the output, such as `head`, is gone
        if result == INTERRUPTED:  # typer caught Ctrl-C itself and prints nothing
            _fail("interrupted", INTERRUPTED)
        sys.exit(result if isinstance(result, int) else 0)


def _one_line(error: Exception | str) -> str:
    return " ".join(str(error).split())


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


app.command(cls=Command, rich_help_panel=FIRST)(load(COMMANDS["demo"]))
app.command(cls=Command, rich_help_panel=MY_JOB)(load(COMMANDS["trace"]))
app.command(cls=load(COMMAND_CLASSES["advise"]), rich_help_panel=MY_JOB)(load(COMMANDS["advise"]))
app.command(cls=load(COMMAND_CLASSES["plan"]), rich_help_panel=MY_JOB)(load(COMMANDS["plan"]))
app.command(cls=Command, rich_help_panel=MY_JOB)(load(COMMANDS["report"]))
app.command(cls=Command, rich_help_panel=MY_JOB)(top)
app.command(cls=Command, rich_help_panel=MY_JOB)(load(COMMANDS["costs"]))
app.command(cls=Command, rich_help_panel=MY_JOB)(doctor)
app.command(cls=Command, rich_help_panel=MY_JOB)(secret)
app.command(cls=load(COMMAND_CLASSES["simulate"]), rich_help_panel=WHAT_IF)(load(COMMANDS["simulate"]))
app.command(cls=load(COMMAND_CLASSES["sweep"]), rich_help_panel=WHAT_IF)(load(COMMANDS["sweep"]))
app.command(cls=Command, rich_help_panel=EXTEND)(hints)
app.command(cls=Command, rich_help_panel=EXTEND)(transports)
app.add_typer(check, name="check", rich_help_panel=EXTEND)
