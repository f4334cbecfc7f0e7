"""Public names that are loaded when first used: the same for a program and for its type checker."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest


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
