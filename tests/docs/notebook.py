"""docs/tutorial.md as a notebook, docs/tutorial.ipynb: `python tests/docs/notebook.py` writes it anew.

A file of the page becomes a cell that writes it, a command a cell that runs it: the one-process pipeline inside the
notebook, where the step's timeline follows. All else is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, NOTEBOOK = DOCS / "tutorial.md", DOCS / "tutorial.ipynb"

_FILE = r'```python title="(?P<file>[^"]+)"\n(?P<text>.*?)```\n'
_COMMAND = r"^    \$ (?P<command>.+)\n(?:    .+\n)*"
_PIECE = re.compile(f"(?s:{_FILE})|{_COMMAND}", re.MULTILINE)

#: The file that runs inside the notebook, and what its cell returns.
INSIDE, SHOWN = "local.py", "result.trace"


def cells(page: str) -> Iterator[tuple[str, str]]:
    """The type and the text of each cell."""
    at = 0
    for piece in _PIECE.finditer(page):
        yield "markdown", page[at : piece.start()]
        at = piece.end()
        if piece["file"] is not None:
            yield "code", f"%%writefile {piece['file']}\n{piece['text']}"
        elif piece["command"] == f"python {INSIDE}":
            yield "code", f"%run {INSIDE}"
            yield "code", SHOWN
        else:
            yield "code", f"!{piece['command']}"
    yield "markdown", page[at:]


def notebook(page: str) -> str:
    """The notebook's file."""
    made: list[dict[str, Any]] = []
    for kind, text in cells(page):
        lines = text.strip().splitlines(keepends=True)
        if lines:
            cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{len(made)}", "metadata": {}, "source": lines}
            made.append(cell | ({"execution_count": None, "outputs": []} if kind == "code" else {}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    document = {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
