"""The options that benchmarks have in common: a smoke run, JSON, and counts that must be at least 1."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def parser_of(
    description: str | None, *, quick: str = "a smoke run: its figures mean nothing", json_file: bool = False
) -> argparse.ArgumentParser:
    """A parser with ``--quick`` and ``--json``; ``json_file``: the latter takes a file too, and is its name or ""."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    if json_file:
        help_text = "write JSON to a file, or print it instead of tables"
        parser.add_argument("--json", nargs="?", const="", metavar="FILE", help=help_text)
    else:
        parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def parsed(parser: argparse.ArgumentParser, *counts: str) -> argparse.Namespace:
    """The command line, which ends the program where one of ``counts`` is below 1."""
    arguments = parser.parse_args()
    for name in counts:
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} is {getattr(arguments, name)}, must be at least 1")
    return arguments


def check_comparison(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End the program where ``--stages`` or ``--rounds`` is too small, or ``--json`` names no file."""
    for name, value, least in (("stages", min(arguments.stages), 2), ("rounds", arguments.rounds, 1)):
        if value < least:
            parser.error(f"--{name} is {value}, must be at least {least}")
    if arguments.json and (Path(arguments.json).is_dir() or not Path(arguments.json).parent.is_dir()):
        parser.error(f"--json is {arguments.json}, must be a file in a folder that exists")


def report(
    json_file: str | None,
    document: Mapping[str, Any],
    tables: Callable[[], None],
    text_of: Callable[[Mapping[str, Any]], str] = json.dumps,
) -> None:
    """Print ``tables``, or the document instead; or print the tables and write the document to a file."""
    if json_file == "":
        print(text_of(document))
        return
    tables()
    if json_file:
        Path(json_file).write_text(text_of(document))


def text_of(document: Mapping[str, Any]) -> str:
    """JSON with a line for each entry of lists and mappings, so that two runs can be compared by line."""
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {_lines_of(value)}" for name, value in document.items()) + "\n}\n"


def _lines_of(value: Any) -> str:
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"
    if isinstance(value, dict) and value:
        return "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in value.items()) + "\n}"
    return json.dumps(value)
