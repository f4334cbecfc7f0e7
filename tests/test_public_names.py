"""`import rrfp`: the public names, for a program and for its type checker."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import rrfp


def test_every_public_name_loads_and_type_checkers_see_the_same_names() -> None:
    source = ast.parse(Path(rrfp.__file__).read_text(encoding="utf-8"))
    block = next(node for node in source.body if isinstance(node, ast.If))
    declared = {
        alias.name: (statement.module, alias.asname)
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert sorted(declared) == rrfp.__all__ == dir(rrfp)
    for name, (home, public) in declared.items():
        assert home is not None
        assert public == name
        assert getattr(rrfp, name) is getattr(import_module(home), name)
