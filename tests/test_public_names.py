"""The public face: the names that programs rely on, and how they are loaded."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from rrfp.cli import app
from rrfp.costs import from_json
from rrfp.errors import ConfigError
from rrfp.pipeline.options import option_table


@pytest.mark.parametrize("package", ["rrfp", "rrfp.transports"])
def test_every_public_name_loads_and_type_checkers_see_the_same_names(package: str) -> None:
    module = import_module(package)
    assert module.__file__ is not None
    source = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    block = next(node for node in source.body if isinstance(node, ast.If))
    declared = {
        alias.name: (statement.module, alias.asname)
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert sorted(declared) == module.__all__ == dir(module)
    for name, (home, public) in declared.items():
        assert home is not None
        assert public == name
        assert getattr(module, name) is getattr(import_module(home), name)


@pytest.mark.parametrize("package", ["rrfp", "rrfp.hints", "rrfp.integrations", "rrfp.transports"])
def test_a_package_of_public_names_imports_no_torch(package: str) -> None:
    subprocess.run(
        [sys.executable, "-c", f"import sys, {package}; sys.exit('torch' in sys.modules)"], check=True, timeout=50
    )


def test_packages_are_attributes_of_rrfp_without_an_import_of_their_own() -> None:
    line = "import rrfp; rrfp.checkpoint.load; rrfp.callbacks.Progress; rrfp.hints.Hint; rrfp.transports.Transport"
    subprocess.run([sys.executable, "-c", line], check=True, timeout=50)


#: Every name that programs, plugins and files of users rely on. `python tests/test_public_names.py` writes it anew.
COMMITTED = Path(__file__).parent / "public_names.txt"

PACKAGES = ("rrfp", "rrfp.callbacks", "rrfp.checkpoint", "rrfp.costs", "rrfp.hints", "rrfp.transports")

TESTING = ("clock", "faults", "hint_checks", "lane_checks", "reference", "transport_checks")

#: Classes whose methods and attributes plugins and callers use, or implement.
CONTRACTS = (
    "rrfp.Pipeline",
    "rrfp.StepResult",
    "rrfp.Graph",
    "rrfp.Hint",
    "rrfp.View",
    "rrfp.ReadySet",
    "rrfp.Lane",
    "rrfp.StageProgram",
    "rrfp.Transport",
    "rrfp.callbacks.Callback",
)


def public_names() -> list[str]:
    """The public face of the package, as sorted lines."""
    return sorted({*_of_packages(), *_of_contracts(), *_of_testing(), *_of_options(), *_of_commands(), *_of_files()})


def _of_packages() -> Iterator[str]:
    for package in PACKAGES:
        yield from (f"{package}.{name}" for name in import_module(package).__all__)


def _of_contracts() -> Iterator[str]:
    for contract in CONTRACTS:
        package, _, name = contract.rpartition(".")
        members = dir(getattr(import_module(package), name))
        yield from (f"{contract}.{member}" for member in members if not member.startswith("_"))


def _of_testing() -> Iterator[str]:
    for module in TESTING:
        home = f"rrfp.testing.{module}"
        yield from (f"{home}.{name}" for name in dir(import_module(home)) if name.startswith("run_"))
    yield "rrfp.testing.reference.reference"


def _of_options() -> Iterator[str]:
    yield from (f"option {name}" for name in option_table())


def _of_commands() -> Iterator[str]:
    """Each command and option of the console script, and the entry points."""
    commands: list[tuple[str, Any]] = [("rrfp", get_command(app))]
    for name, command in commands:
        yield f"$ {name}"
        for parameter in command.params:
            yield from (f"$ {name} {flag}" for flag in parameter.opts if flag.startswith("--"))
        commands += [(f"{name} {each}", child) for each, child in getattr(command, "commands", {}).items()]
    scripts = entry_points(group="console_scripts", value="rrfp.cli:main")
    yield from (f"console script {script.name}" for script in scripts)


def _of_files() -> Iterator[str]:
    """The fields of cost files, and what each category of event in a trace file says of itself."""
    for unknown in ({"other": 1}, {"other": 1, "virtual_stages": []}):  # of a chain and of a graph
        with pytest.raises(ConfigError) as caught:
            from_json(json.dumps(unknown))
        known = re.search(r"field 'other' is unknown, must be one of ([^;\n]*)", str(caught.value))
        assert known is not None
        yield from (f"cost file {field}" for field in known[1].split(", "))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        arguments = [
            "simulate",
            "--profile",
            "multimodal",
            "--save-costs",
            f"{folder}/costs.json",
            "--trace",
            str(path),
        ]
        result = CliRunner().invoke(app, [*arguments, "--hint", "bf"])
        assert result.exit_code == 0, result.output
        document = json.loads(path.read_text(encoding="utf-8"))
    yield from (f"trace file {name}" for name in document)
    yield from (f"trace file otherData {name}" for name in document.get("otherData", {}))
    for event in document["traceEvents"]:
        kind = f"trace file {event['ph']} {event.get('cat', '')}"
        yield from (f"{kind} {name}" for name in event.get("args", {}))


def test_the_public_face_is_the_committed_one() -> None:
    committed = COMMITTED.read_text(encoding="utf-8").splitlines()
    assert public_names() == committed, "say so in CHANGELOG.md, and run: python tests/test_public_names.py"


if __name__ == "__main__":
    COMMITTED.write_text("\n".join(public_names()) + "\n", encoding="utf-8")
