"""The product and the laboratory: what loads which."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from rrfp.laboratory import COMMAND_CLASSES, COMMANDS, METHODS, PLUGINS, PUBLIC, load

#: Loaded by nothing that a training job does with default options.
APART = ("lab", "engine", "costs")

#: Packages are attributes of rrfp without an import of their own.
JOB = """
import sys, rrfp
rrfp.checkpoint.load, rrfp.callbacks.Progress, rrfp.hints.Hint, rrfp.transports.Transport
import torch
from torch import nn
with rrfp.local([nn.Linear(4, 4), nn.Linear(4, 4)], loss_fn=nn.functional.mse_loss) as pipe:
    batch = [torch.ones(2, 4) for _ in range(4)]
    print(pipe.step(batch, batch))
    pipe.evaluate(batch, batch)
"""


@pytest.mark.parametrize("program", ["import sys, rrfp", JOB], ids=["import", "job"])
def test_the_product_finds_its_packages_and_loads_neither_laboratory_nor_engine_nor_costs(program: str) -> None:
    found = f"print(*(name for name in sys.modules if name.split('.')[:2] in {[['rrfp', room] for room in APART]}))"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\n{found}"], check=True, capture_output=True, text=True, timeout=50
    )
    assert done.stdout.splitlines()[-1] == ""


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_of_the_laboratory_load_and_type_checkers_see_the_same_names(module: str) -> None:
    loaded = import_module(module)
    assert loaded.__file__ is not None
    source = ast.parse(Path(loaded.__file__).read_text(encoding="utf-8"))
    block = next(node for node in source.body if isinstance(node, ast.If))
    declared = {
        alias.name: statement.module
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert {name: home for name, home in declared.items() if home and home.startswith("rrfp.lab.")} == PUBLIC[module]
    assert {*declared} <= {*loaded.__all__}
    for name, home in declared.items():
        assert home is not None
        assert getattr(loaded, name) is getattr(import_module(home), name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = loaded.nothing


NAMED = (COMMANDS, COMMAND_CLASSES, METHODS, *PLUGINS.values())


@pytest.mark.parametrize("target", [home for homes in NAMED for home in homes.values()])
def test_commands_methods_and_plugins_of_the_laboratory_load(target: str) -> None:
    assert callable(load(target))
