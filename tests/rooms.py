"""Figures of the package's form, by room: `make figures` prints them, `tests/test_rooms.py` holds two of them.

It reads text only; nothing of the package is imported.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: The most modules of a room that import one another in a row, and the most files beside its sub-rooms.
MOST_IN_A_ROW, MOST_FILES = 6, 15


@dataclass(frozen=True)
class Room:
    """A package, without those inside it."""

    name: str
    #: Its modules, its ``__init__`` (under the room's own name) among them.
    modules: tuple[str, ...]
    #: The longest chain of imports among these, each importing the next.
    chain: tuple[str, ...]

    @property
    def files(self) -> int:
        """Its modules, ``__init__`` not counted."""
        return len(self.modules) - 1


@functools.cache
def modules(package: str = "rrfp") -> Mapping[str, Path]:
    """All modules by name."""
    paths = sorted((ROOT / package).rglob("*.py"))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


@functools.cache
def tree_of(module: str) -> ast.Module:
    """The syntax of a module."""
    return ast.parse(modules()[module].read_text(encoding="utf-8"))


@functools.cache
def imports(module: str, *, for_type_checkers: bool) -> set[str]:
    """The modules of the package that ``module`` imports, wherever in it; in blocks for type checkers, if wanted."""
    found = set()
    for node in _walk(tree_of(module), for_type_checkers=for_type_checkers):
        names = [alias.name for alias in node.names]
        for name in names if isinstance(node, ast.Import) else [f"{node.module}.{name}" for name in names]:
            home = name
            while home and home not in modules():
                home = home.rpartition(".")[0]
            found.add(home)
    return found - {"", module}


def _walk(node: ast.AST, *, for_type_checkers: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node
    is_skipped = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    children: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if is_skipped and not for_type_checkers:
        assert isinstance(node, ast.If)
        children = node.orelse
    for child in children:
        yield from _walk(child, for_type_checkers=for_type_checkers)


@functools.cache
def rooms() -> list[Room]:
    """All rooms, by name."""
    by_room: dict[str, list[str]] = defaultdict(list)
    for module, path in modules().items():
        by_room[module if path.name == "__init__.py" else module.rpartition(".")[0]].append(module)
    return [Room(name, tuple(found), _longest_chain(found)) for name, found in sorted(by_room.items())]


def _longest_chain(own: list[str]) -> tuple[str, ...]:
    reads = {module: imports(module, for_type_checkers=False) & {*own} for module in own}
    longest: dict[str, tuple[str, ...]] = {}

    def chain(module: str, above: frozenset[str]) -> tuple[str, ...]:
        if module not in longest:
            below = [chain(each, above | {module}) for each in sorted(reads[module] - above)]
            longest[module] = (module, *max(below, key=len, default=()))
        return longest[module]

    return max((chain(module, frozenset({module})) for module in own), key=len)


def single_importers() -> dict[str, str]:
    """By module that exactly one other module imports: that one."""
    importers: dict[str, set[str]] = defaultdict(set)
    for module in modules():
        for read in imports(module, for_type_checkers=True):
            importers[read].add(module)
    return {
        module: next(iter(importers[module]))
        for module, path in modules().items()
        if len(importers[module]) == 1 and path.name != "__init__.py"
    }


def lines(module: str) -> int:
    """The lines of a module."""
    return len(modules()[module].read_text(encoding="utf-8").splitlines())


def docstring_lines(module: str) -> int:
    """The lines of its docstrings."""
    total = 0
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                total += (first.end_lineno or 0) - first.lineno + 1
    return total


def table() -> str:
    """A line for each room, and one for all."""
    single = single_importers()
    head = f"{'room':36} {'files':>5} {'lines':>6} {'docstrings':>10} {'one importer':>12} {'in a row':>8}"
    rows = [head]
    for room in rooms():
        ours = sum(module in single for module in room.modules)
        figures = room.files, sum(map(lines, room.modules)), sum(map(docstring_lines, room.modules)), ours
        rows.append("{:36} {:5} {:6} {:10} {:12} {:8}".format(room.name, *figures, len(room.chain)))
    total = len(modules()), sum(map(lines, modules())), sum(map(docstring_lines, modules())), len(single)
    rows.append("{:36} {:5} {:6} {:10} {:12}".format("all", *total))
    return "\n".join(rows)


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
