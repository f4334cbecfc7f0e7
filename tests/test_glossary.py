"""Code and documentation use the words of docs/glossary.md: the old ones are listed here, each with the better one.

Names of variables, parameters, attributes and functions are read from the syntax tree, so a name in a string or in
another word is no hit.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: An old word in any text, as a regular expression, and the better word.
TEXT = {
    r"\btold\b": "passed, received, raised, notified, reported",
    r"\bnobody\b": "no rank, no task, no caller",
    r"\b(any|every|some)body\b": "a rank, all ranks, a caller",
    r"\bwhoever\b": "the rank, the caller or the sender that",
    r"\bfor ever\b": "forever",
    r"\bmoreover\b": "also, or nothing",
    r"\bcomes? to (one|an) order\b": "agree on an order",
    r"\b(its|their|rank's|many) likes\b": "counterparts",
    r"\bcame and went\b": "connected, then left",
    r"\b(can|could) be had\b": "is available",
    r"\bbest-ranked\b": "highest-priority",
    r"\b(rank|ranks) (tasks|microbatches|whatever)\b": "order: a rank is a process",
    r"\ba stranger\b|\bstranger's\b": "an unauthenticated sender",
    r"\bsign of life\b": "heartbeat",
    r"\b(is|are) given back\b": "is released, is returned",
}

#: An old name of a variable, parameter, attribute or function, and the better one.
NAMES = {
    "told": "what it holds: fields, values, reports",
    "tell": "send, notify, apply",
    "say": "send, report, print",
    "hear": "receive, on_ and the event",
    "heard": "received",
    "take": "get, acquire, pop, on_ and the event",
    "found": "what it holds",
    "given": "what it holds",
    "its": "what it holds",
    "one": "what it holds: task, rank, result",
    "place": "topology, index, coordinate",
}

FILES = sorted(
    path.relative_to(ROOT).as_posix() for pattern in ("rrfp/**/*.py", "docs/**/*.md") for path in ROOT.glob(pattern)
)


def old_words(path: str, text: str) -> Iterator[str]:
    """``file:line: old word: better word`` for each hit."""
    for word, better in TEXT.items():
        for hit in re.finditer(word, text, re.IGNORECASE):
            yield f"{path}:{1 + text.count(chr(10), 0, hit.start())}: {hit.group()!r}, better: {better}"
    if path.endswith(".py"):
        for number, name in _names(ast.parse(text)):
            if (old := name.strip("_")) in NAMES:
                yield f"{path}:{number}: the name {name!r}, better: {NAMES[old]}"


def _names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and name of everything that the code names."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name


def hits_in(path: str) -> list[str]:
    """The old words of one file; the glossary itself may name them."""
    return [] if path == "docs/glossary.md" else list(old_words(path, (ROOT / path).read_text(encoding="utf-8")))


def test_old_words_are_gone() -> None:
    hits = [hit for path in FILES for hit in hits_in(path)]
    assert not hits, "\n".join(["docs/glossary.md has the words of this project:", *hits])


def test_a_hit_names_file_line_old_and_better_word() -> None:
    text = "def f(told):\n    # wait for ever\n    return told\n"
    assert list(old_words("a.py", text)) == [
        "a.py:1: 'told', better: passed, received, raised, notified, reported",
        "a.py:3: 'told', better: passed, received, raised, notified, reported",
        "a.py:2: 'for ever', better: forever",
        "a.py:1: the name 'told', better: what it holds: fields, values, reports",
    ]
