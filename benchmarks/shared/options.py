"""The options that benchmarks have in common: a smoke run, JSON, and counts that must be at least 1."""

from __future__ import annotations

import argparse


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
