"""Output shared by all commands: JSON on stdout, and the option for it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

#: The option that every command has.
Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON instead of text.")]


def print_json(document: Mapping[str, Any] | Sequence[Any]) -> None:
    """Write ``document`` as one line; equal documents give equal bytes."""
    typer.echo(json.dumps(document, allow_nan=False))


def first_line(text: str | None) -> str:
    """The first line of a docstring, without its full stop; empty where there is none."""
    lines = (text or "").strip().splitlines()
    return lines[0].strip().removesuffix(".") if lines else ""
