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
import torch
from typer.main import get_command
from typer.testing import CliRunner

from rrfp import callbacks, local
from rrfp.callbacks import RunAborted
from rrfp.commands.app import app
from rrfp.costs import from_json
from rrfp.errors import ConfigError
from rrfp.hints import BegunReported
from rrfp.hints.registry import HINTS
from rrfp.lab.device_double import DoubleDevice
from rrfp.pipeline.options import option_table
from rrfp.schedules.registry import schedule_names
from rrfp.testing.lanes import LANES
from rrfp.transports.registry import TRANSPORTS


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


def test_a_renamed_name_still_works_and_names_the_new_one() -> None:
    with pytest.warns(
        DeprecationWarning, match=r"rrfp\.callbacks\.Aborted is now rrfp\.callbacks\.RunAborted"
    ) as caught:
        from rrfp.callbacks import Aborted
    assert Aborted is RunAborted
    assert caught[0].filename == __file__
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = callbacks.nothing
    with pytest.warns(DeprecationWarning, match=r"rrfp\.hints\.Announced is now rrfp\.hints\.BegunReported"):
        from rrfp.hints import Announced
    assert Announced is BegunReported


#: Every name that programs, plugins and files of users rely on. `python tests/test_public_names.py` writes it anew.
COMMITTED = Path(__file__).parent / "public_names.txt"

PACKAGES = (
    *("rrfp", "rrfp.callbacks", "rrfp.checkpoint", "rrfp.costs", "rrfp.hints", "rrfp.transports"),
    *(
        f"rrfp.testing.{name}"
        for name in ("clock", "faults", "hint_checks", "lane_checks", "reference", "transport_checks")
    ),
)

#: Classes whose methods and attributes plugins and callers use, or implement: by module of their names.
CONTRACTS = {
    "rrfp": (
        *("Batch", "Graph", "Hint", "Lane", "Pipeline", "ReadySet", "StageProgram", "StepResult", "Transport", "View"),
    ),
    "rrfp.callbacks": ("Callback",),
    "rrfp.devices.base": ("Device",),
    "rrfp.testing.lane_checks": ("Subject",),
    "rrfp.testing.transport_checks": ("Pair", "PairOptions"),
    "rrfp.transports": (
        *("DeliversMessages", "DeviceCopies", "LendsMemory", "Loan", "Rendezvous", "SendsAtOnce", "SharesDeviceMemory"),
        "TransportContext",
    ),
}

#: Names by which plugins are chosen, and the entry point groups of further ones.
REGISTRIES = (HINTS, TRANSPORTS, LANES)


def public_names() -> list[str]:
    """The public face of the package, as sorted lines."""
    parts = (_of_packages(), _of_contracts(), _of_registries(), _of_options(), _of_commands(), _of_files())
    return sorted({line for part in parts for line in part})


def _of_packages() -> Iterator[str]:
    """The names, and the fields of records."""
    for package in PACKAGES:
        module = import_module(package)
        yield from (f"{package}.{name}, deprecated" for name in getattr(module, "_RENAMED", ()))
        for name in module.__all__:
            yield f"{package}.{name}"
            fields = getattr(
                getattr(module, name), "__dataclass_fields__", getattr(getattr(module, name), "_fields", ())
            )
            yield from (f"{package}.{name}.{field}" for field in fields if not field.startswith("_"))


def _of_contracts() -> Iterator[str]:
    for home, names in CONTRACTS.items():
        for name in names:
            contract = getattr(import_module(home), name)
            # A field without a default is an annotation alone.
            members = {
                *dir(contract),
                *(each for cls in contract.__mro__ for each in getattr(cls, "__annotations__", ())),
            }
            yield from (f"{home}.{name}.{member}" for member in members if not member.startswith("_"))


def _of_registries() -> Iterator[str]:
    for registry in REGISTRIES:
        yield f"entry points {registry.group}"
        yield from (f"{registry.group} {name}" for name in registry.built_in)
    yield from (f"schedule {name}" for name in schedule_names())


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
        known = re.search(r"field 'other' is unknown, must be one of: ([^;\n]*)", str(caught.value))
        assert known is not None
        yield from (f"cost file {field}" for field in known[1].split(", "))
    for document in _traces():
        yield from (f"trace file {name}" for name in document)
        yield from (f"trace file otherData {name}" for name in _keys(document.get("otherData", {})))
        for event in document["traceEvents"]:
            kind, arguments = f"trace file {event['ph']} {event.get('cat', '')}", event.get("args", {})
            yield from (f"{kind} {name}" for name in arguments)
            yield from (f"{kind} peaks {name}" for peaks in arguments.get("peaks", {}).values() for name in peaks)


def _keys(value: Any, prefix: str = "") -> Iterator[str]:
    """The keys of nested objects, with those above each."""
    if isinstance(value, list):
        yield from (key for entry in value for key in _keys(entry, prefix))
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield f"{prefix}{key}"
            yield from _keys(inner, f"{prefix}{key} ")


def _traces() -> Iterator[dict[str, Any]]:
    """A simulated step, and a real one over the device double."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        simulate = ("simulate", "--profile", "multimodal", "--hint", "bf", "--trace", str(path))
        result = CliRunner().invoke(app, simulate)
        assert result.exit_code == 0, result.output
        yield json.loads(path.read_text(encoding="utf-8"))
        device, batch = DoubleDevice(0.0), [torch.ones(1, 1)] * 2
        loss_fn = torch.nn.functional.mse_loss
        try:
            with local([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)], loss_fn=loss_fn, device=device) as pipe:
                pipe.step(batch, batch, sizes=[1, 1])
                pipe.save_trace(str(path))
        finally:
            device.close()
        yield json.loads(path.read_text(encoding="utf-8"))


def test_the_public_face_is_the_committed_one() -> None:
    committed = COMMITTED.read_text(encoding="utf-8").splitlines()
    assert public_names() == committed, "say so in CHANGELOG.md, and run: python tests/test_public_names.py"


if __name__ == "__main__":
    COMMITTED.write_text("\n".join(public_names()) + "\n", encoding="utf-8")
