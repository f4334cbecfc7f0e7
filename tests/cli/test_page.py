"""docs/reference/cli.md names each command and option, with its values, and no other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from cli.shell import rrfp

from rrfp.commands.app import app

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "cli.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
#: Options of all commands, which stand in a section of their own.
COMMON = {"--help", "--json"}


def commands(group: Any, path: str = "rrfp") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


COMMANDS = dict(commands(typer.main.get_command(app)))


def row(parameter: Any) -> str:
    """The first cell of a parameter's row."""
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar}`"
    if parameter.is_flag:
        return " / ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    return f"`{parameter.opts[0]} {parameter.metavar}`".replace("|", r"\|")


def rows(section: str) -> list[str]:
    return re.findall(r"^\| (`.*?) \| ", section, re.MULTILINE)


def test_every_command_has_a_section() -> None:
    assert [head.strip("`") for head in SECTIONS] == ["At a glance", "All commands", *COMMANDS]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_rows_of_a_section_are_the_options_of_the_command(name: str) -> None:
    own = [row(parameter) for parameter in COMMANDS[name].params if not COMMON & set(parameter.opts)]
    assert rows(SECTIONS[f"`{name}`"]) == own


@pytest.mark.parametrize("name", SECTIONS)
def test_no_code_is_nested_in_code(name: str) -> None:
    assert "``" not in SECTIONS[name].replace("```", "")


def test_the_common_options_are_those_of_the_console_script() -> None:
    own = {name for parameter in typer.main.get_command(app).params for name in parameter.opts}
    named = set(re.findall(r"`(--[a-z-]+)`", "\n".join(rows(SECTIONS["All commands"]))))
    assert named == own | COMMON


def test_the_error_on_the_page_is_what_the_command_says() -> None:
    line, messages = re.findall(r"^    \$ rrfp (.*)\n((?:    rrfp: .*\n)+)", PAGE, re.MULTILINE)[0]
    assert messages.count("rrfp: ") == 2
    assert rrfp(*line.split()).stderr == messages.replace("    rrfp: ", "rrfp: ")
