"""docs/glossary.md: each term is defined once, and the project uses it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
GLOSSARY = ROOT / "docs" / "glossary.md"

#: More rows than this hide the terms that a reader of torch's documentation does not know.
MOST_ROWS = 40


def rows() -> list[tuple[str, str]]:
    """The cells ``term`` and ``meaning`` of every row of the glossary."""
    lines = [line for line in GLOSSARY.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [(row[0], row[1]) for row in cells if row[0] != "term"]


def terms() -> list[str]:
    """Every term; a row may define several, separated by commas."""
    return [term.strip() for row, _ in rows() for term in row.split(",")]


def test_each_term_is_defined_once() -> None:
    assert len(terms()) == len(set(terms()))
    assert all(meaning for _, meaning in rows())


def test_each_term_is_used_in_documentation_or_code() -> None:
    files = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("rrfp/**/*.py"), ROOT / "README.md"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files if path != GLOSSARY)
    unused = [term for term in terms() if not re.search(rf"\b{re.escape(term)}(s|e?d|ing)?\b", text)]
    assert not unused


def test_the_glossary_has_only_terms_that_a_torch_user_does_not_know() -> None:
    assert len(rows()) <= MOST_ROWS
