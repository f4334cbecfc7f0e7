"""The private names of torch stand in one file, and both torch versions that the integration is for have them."""

from __future__ import annotations

import ast
import json
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from installed import ROOT
from integrations import torch_names
from integrations.torch_names import ATTRIBUTES, CALLS, LIST, OPTIONAL, RECEIVE_ATTRIBUTES, Call, facts

PACKAGE = ROOT / "rrfp" / "integrations" / "torch"
PRIVATE = PACKAGE / "private.py"
LATER: dict[str, Any] = json.loads(LIST.read_text())
INSTALLED = facts(Path(torch.__file__).parent)


@pytest.mark.parametrize("known", [INSTALLED, LATER], ids=["installed", LATER["torch"]])
def test_every_name_is_there_and_takes_our_calls(known: dict[str, Any]) -> None:
    unfit = {name: known["calls"][name] for name, call in CALLS.items() if not call.fits(known["calls"][name])}
    assert unfit == {}
    assert sorted(set(ATTRIBUTES) - set(known["attributes"])) == []
    assert known["receive_info"] == sorted(RECEIVE_ATTRIBUTES)


def test_the_list_is_of_a_later_torch() -> None:
    assert LATER["torch"] == "2.15.0"
    assert torch.__version__.startswith("2.13.")


def underscored(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        names += [node.attr] if isinstance(node, ast.Attribute) and not _is_own(node) else []
        yield from (name for name in names if re.match(r"_[^_]", name))


def _is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def test_private_names_stand_in_one_file() -> None:
    """Of torch: `Tensor._version`, which the whole runtime reads, and of Python the frames of a thread, but these."""
    others = {path.name: set(underscored(ast.parse(path.read_text()))) for path in PACKAGE.glob("*.py")}
    others.pop(PRIVATE.name)
    assert {name: names for name, names in others.items() if names} == {
        "limits.py": {"_current_frames"},
        "program.py": {"_version"},
    }


def test_the_list_has_every_private_name_of_that_file() -> None:
    tree = ast.parse(PRIVATE.read_text())
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    inherited = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_own(node)}
    used = {*underscored(tree), *(name for name in inherited if re.match(r"_[^_]", name))} - own
    listed = set(re.findall(r"\w+", " ".join((*CALLS, *ATTRIBUTES, *OPTIONAL))))
    assert used - listed == set()


@pytest.mark.parametrize("name", OPTIONAL)
def test_there_is_another_way_without_an_optional_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is loaded once more, without that name."""
    home, _, own = name.rpartition(".")
    monkeypatch.delattr(sys.modules[home], own)
    private = runpy.run_path(str(PRIVATE))
    with private["record_function"]("PP:0F0"):
        pass
    assert private["record_function"] is torch.profiler.record_function


def test_only_public_names_of_rrfp_are_used() -> None:
    """Those of docs/plugins.md and docs/reference/api.md, and the integration's own."""
    pages = "".join((ROOT / "docs" / page).read_text() for page in ("plugins.md", "reference/api.md"))
    import rrfp.errors

    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("rrfp"):
                continue
            if node.module == "rrfp":
                assert {alias.name for alias in node.names} <= set(rrfp.__all__)
            elif node.module == "rrfp.errors":
                assert {alias.name for alias in node.names} <= set(rrfp.errors.__all__)
            elif not (node.module or "").startswith("rrfp.integrations."):
                for alias in node.names:
                    assert f"{node.module}.{alias.name}" in pages, path


def test_a_changed_signature_is_noticed() -> None:
    call = Call(1, ("loss",))
    assert call.fits({"names": ["chunk", "loss"], "required": ["chunk"], "any": False})
    assert not call.fits({"names": ["chunk", "value"], "required": ["chunk"], "any": False})
    assert not call.fits({"names": ["chunk", "loss", "extra"], "required": ["chunk", "extra"], "any": False})
    assert not call.fits({"names": [], "required": [], "any": False})
    assert torch_names.parameters_of(Path(torch.__file__).parent, next(iter(CALLS)))["required"][0] == "stages"
