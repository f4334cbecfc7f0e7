"""Small changes to Python source, found by its syntax tree: each should make some test fail.

A change replaces the text of one expression or statement and leaves the rest of the file as it is. What only words an
error or a log line (strings, f-strings) is left alone, and so are docstrings, annotations and ``assert``.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

_Node = TypeVar("_Node", bound=ast.AST)

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}

#: Statements that may go without leaving a syntax error.
_REMOVABLE = (ast.AugAssign, ast.Expr, ast.Raise, ast.Delete, ast.Continue, ast.Break)


@dataclass(frozen=True, slots=True, order=True)
class Change:
    """One change to one file.

    Attributes:
        where: the function or class that it is in, dotted; empty on the level of the module.
        operator: the sort of change, such as "comparison".
        old: the text that goes, on one line.
        new: the text that comes.
        nth: from 0, among the changes of this function that read alike.
        line: where it begins, from 1.
        span: the same as offsets into the source, from and to.
    """

    where: str
    operator: str
    old: str
    new: str
    nth: int
    line: int
    span: tuple[int, int]

    def applied(self, source: str) -> str:
        """``source`` with the change made."""
        return source[: self.span[0]] + self.new + source[self.span[1] :]


def changes(source: str) -> list[Change]:
    """Every change to a file, in the order of its text."""
    return _Finder(source).changes()


class _Finder:
    def __init__(self, source: str) -> None:
        self._source = source
        self._lines = source.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        self._found: list[Change] = []
        self._seen: dict[tuple[str, str, str, str], int] = {}

    def changes(self) -> list[Change]:
        for statement in ast.parse(self._source).body:
            self._statement(statement, ())
        return self._found

    def _statement(self, node: ast.stmt, where: tuple[str, ...]) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for inner in node.body:
                self._statement(inner, (*where, node.name))
            return
        if _is_left_alone(node):
            return
        if where and _may_go(node):
            self._add(node, where, "removed statement", "pass")
        for operator, new in _of_statement(node):
            self._add(node, where, operator, ast.unparse(new))
        if isinstance(node, ast.If | ast.While):
            self._add(node.test, where, "negated condition", f"(not ({ast.unparse(node.test)}))")
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                self._statement(child, where)
            elif not (isinstance(node, ast.AnnAssign) and child is node.annotation):
                self._inside(child, where)

    def _inside(self, node: ast.AST, where: tuple[str, ...]) -> None:
        """Expressions, and what holds statements without being one: a handler, a case."""
        if isinstance(node, ast.JoinedStr | ast.pattern):
            return
        if isinstance(node, ast.expr):
            for operator, new in _of_expression(node):
                self._add(node, where, operator, f"({ast.unparse(new)})")
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                self._statement(child, where)
            else:
                self._inside(child, where)

    def _add(self, node: ast.stmt | ast.expr, where: tuple[str, ...], operator: str, new: str) -> None:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        span = self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)
        old = " ".join(self._source[slice(*span)].split())
        key = (".".join(where), operator, old, new)
        nth = self._seen.get(key, 0)
        self._seen[key] = nth + 1
        self._found.append(Change(*key, nth, node.lineno, span))

    def _offset(self, line: int, column: int) -> int:
        """The place of a column, which syntax trees count in bytes."""
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())


def _is_left_alone(node: ast.stmt) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom | ast.Assert | ast.Pass):
        return True
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return True
    is_slots = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__"
    return is_slots or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def _may_go(node: ast.stmt) -> bool:
    """Whether it can be removed: not where it sets a local name, without which the function would only crash."""
    if not isinstance(node, ast.Assign):
        return isinstance(node, _REMOVABLE)
    return all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)


def _of_statement(node: ast.stmt) -> Iterator[tuple[str, ast.stmt]]:
    if isinstance(node, ast.AugAssign) and type(node.op) in _ARITHMETIC:
        yield "arithmetic", _with(node, op=_ARITHMETIC[type(node.op)]())
    if isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield "return", _with(node, value=ast.Constant(None))


def _of_expression(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    match node:
        case ast.Compare(ops=[operator]):
            yield "comparison", _with(node, ops=[_COMPARISONS[type(operator)]()])
        case ast.BoolOp(op=operator):
            yield "boolean", _with(node, op=ast.Or() if isinstance(operator, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "boolean", operand
        case ast.IfExp(test=test):
            yield "negated condition", _with(node, test=ast.UnaryOp(ast.Not(), test))
        case ast.BinOp(op=operator) if type(operator) in _ARITHMETIC:
            yield "arithmetic", _with(node, op=_ARITHMETIC[type(operator)]())
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", ast.Constant(value + 1)
        case ast.Call(func=ast.Name(id=name) as function) if name in _CALLS:
            yield "call", _with(node, func=_with(function, id=_CALLS[name]))


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _with(node: _Node, **changed: object) -> _Node:
    other = copy.copy(node)
    for field, value in changed.items():
        setattr(other, field, value)
    return other
