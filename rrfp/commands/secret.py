"""`rrfp secret`: makes the secret of a job."""

import os
from pathlib import Path
from typing import Annotated

import typer

from rrfp.commands.command_line import Json, print_json
from rrfp.errors import ConfigError

#: Of the file: only its owner may use it.
_MODE = 0o600


def secret(
    path: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="File to make, with mode 0600; printed instead by default.")
    ] = None,
    json: Json = False,
) -> None:
    """Make a secret, with which the ranks of a job on several hosts know each other."""
    from rrfp.transports.secret import FILE_VARIABLE, new_secret

    text = new_secret()
    if path is None:
        if json:
            print_json({"secret": text})
        else:
            typer.echo(text)
        return
    _write(path, text)
    if json:
        print_json({"file": str(path)})
    else:
        typer.echo(f"wrote {path}: copy it to every host, with mode 0600, and set {FILE_VARIABLE} to its path there")


def _write(path: Path, text: str) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
    except FileExistsError as error:
        raise ConfigError(f"{path}: exists, must be a new file: jobs may use the old one") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from error
    try:
        with open(descriptor, "w") as file:
            os.fchmod(descriptor, _MODE)  # whatever the umask says
            file.write(f"{text}\n")
    except OSError as error:
        path.unlink()  # half a secret is none
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from error
