"""docs/plugins.md lists every name that plugins may rely on, and the example package relies on no other."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module

import griffe
import pytest
from installed import ROOT

from rrfp.hints import View

PAGE = (ROOT / "docs" / "plugins.md").read_text()
LISTED = re.findall(r"^\| `(rrfp[\w.]*)\.(\w+)` \|", PAGE, re.MULTILINE)
#: The names that the page says are names of `rrfp` as well.
(_SENTENCE, _SHORTER) = re.findall(r"^(`.+`) are also names of `rrfp`", PAGE, re.MULTILINE)
ALSO_IN_RRFP = set(re.findall(r"\w+", _SENTENCE + _SHORTER)) - {"and"}
#: Packages all of whose exports are for plugins.
PACKAGES = (
    "rrfp.hints",
    "rrfp.transports",
    "rrfp.callbacks",
    "rrfp.testing.hint_checks",
    "rrfp.testing.transport_checks",
    "rrfp.testing.lane_checks",
)
EXAMPLE = ROOT / "examples" / "plugins"


@cache
def documented() -> griffe.Module:
    package = griffe.load("rrfp", search_paths=[ROOT])
    assert isinstance(package, griffe.Module)
    return package


def public(path: str, name: str) -> griffe.Object:
    """The definition behind a public path."""
    found: griffe.Object | griffe.Alias = documented()[f"{path}.{name}".removeprefix("rrfp.")]
    return found.final_target if isinstance(found, griffe.Alias) else found


@pytest.mark.parametrize(("path", "name"), LISTED, ids=lambda part: part)
def test_a_listed_name_is_there_and_explains_itself_and_every_argument(path: str, name: str) -> None:
    assert hasattr(import_module(path), name)
    definition = public(path, name)
    assert definition.docstring is not None
    assert list(unexplained(definition)) == []


def unexplained(definition: griffe.Object) -> Iterator[str]:
    """The functions of a public definition without a docstring, and the arguments that none explains."""
    if isinstance(definition, griffe.Function):
        text = "" if definition.docstring is None else definition.docstring.value
        if not text:
            yield definition.path
        elif not text.startswith("See "):  # else the contract that it implements explains them
            yield from unexplained_arguments(definition, text)
    elif isinstance(definition, griffe.Class):
        for member in definition.members.values():
            if isinstance(member, griffe.Function) and member.name == "__init__" and definition.docstring:
                yield from unexplained_arguments(member, definition.docstring.value)
            elif isinstance(member, griffe.Function) and not member.name.startswith("_") and not is_internal(member):
                yield from unexplained(member)


def unexplained_arguments(function: griffe.Function, docstring: str) -> Iterator[str]:
    explained = re.split("Args:|Attributes:", docstring, maxsplit=1)[-1]
    for parameter in function.parameters:
        if parameter.name not in ("self", "cls") and not re.search(rf"^ +{parameter.name}: ", explained, re.MULTILINE):
            yield f"{function.path}({parameter.name})"


def is_internal(function: griffe.Function) -> bool:
    return function.docstring is not None and "For the core only." in function.docstring.value


@pytest.mark.parametrize("package", PACKAGES)
def test_every_exported_name_is_listed(package: str) -> None:
    assert sorted(name for path, name in LISTED if path == package) == sorted(import_module(package).__all__)


def test_names_that_are_also_in_rrfp_are_the_same() -> None:
    assert len(ALSO_IN_RRFP) == 8
    rrfp = import_module("rrfp")
    for path, name in LISTED:
        if name in ALSO_IN_RRFP:
            assert getattr(rrfp, name) is getattr(import_module(path), name)
        assert path != "rrfp" or name in rrfp.__all__


def test_the_view_is_listed_with_the_arguments_of_its_methods() -> None:
    listed = dict(re.findall(r"^\| `view\.(\w+)(?:\((.*?)\))?` \|", PAGE, re.MULTILINE))
    members = {name: member for name, member in vars(View).items() if not name.startswith("_")}
    assert listed.keys() == members.keys()
    for name, member in members.items():
        arguments = [] if isinstance(member, property) else list(inspect.signature(member).parameters.values())[1:]
        shown = [each.name if each.default is each.empty else f"{each.name}={each.default}" for each in arguments]
        assert listed[name] == ", ".join(shown)


def test_the_reference_shows_every_listed_name() -> None:
    reference = (ROOT / "docs" / "reference" / "api.md").read_text()
    shown = set(re.findall(r"^::: (\S+)", reference, re.MULTILINE))
    for path, name in LISTED:
        assert path in shown or f"{path}.{name}" in shown or f"rrfp.{name}" in shown, name


def test_the_example_package_imports_only_listed_names() -> None:
    files = sorted(EXAMPLE.rglob("*.py"))
    assert len(files) >= 10
    names = {(path, name) for path, name in LISTED} | {("rrfp", name) for name in ALSO_IN_RRFP}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                assert not [alias.name for alias in node.names if alias.name.split(".")[0] == "rrfp"], file
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rrfp":
                assert {(node.module, alias.name) for alias in node.names} <= names, file
