"""Output shared by all commands: JSON on stdout, and the option for it."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rrfp.errors import ConfigError

#: The option that every command has.
Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON instead of text.")]


def print_json(document: Mapping[str, Any] | Sequence[Any]) -> None:
    """Write ``document`` as one line; equal documents give equal bytes."""
    typer.echo(json.dumps(document, allow_nan=False))


def check_output(path: Path, *inputs: str | Path) -> None:
    """Refuse an unwritable file, or one of ``inputs``, in advance."""
    if path.resolve() in {Path(file).resolve() for file in inputs}:
        raise ConfigError(f"{path}: is read by this command, must be another file to be written")
    if not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise ConfigError(f"{path}: cannot be written (no such folder, or not allowed)")


def first_line(text: str | None) -> str:
    """A docstring's first line without full stop, if there is one."""
    lines = (text or "").strip().splitlines()
    return lines[0].strip().removesuffix(".") if lines else ""
