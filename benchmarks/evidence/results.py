"""The result files that pages quote, what writes each of them, and tables of them in Markdown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

PAPER = "benchmarks/paper/results.json"
PARITY = "benchmarks/parity/results.json"
MECHANISMS = "benchmarks/mechanisms/results.json"
PEERS = "benchmarks/peers/results/headline.json"
PEERS_AGAIN = "benchmarks/peers/results/headline-2.json"
PEERS_ON_ANOTHER_DAY = "benchmarks/peers/results/headline-3.json"
PEERS_FULL_8 = "benchmarks/peers/results/full-8.json"
PEERS_FULL_4 = "benchmarks/peers/results/full-4.json"
HINTS = "benchmarks/hints/results.json"
REPLICAS = "benchmarks/replicas/results.json"
DISPATCH = "benchmarks/dispatch/results.json"

#: What writes each result file.
COMMANDS = {
    PAPER: f"python benchmarks/paper/run.py --json {PAPER}",
    PARITY: f'make parity ARGS="--full --results {PARITY} --picture docs/parity.png"',
    MECHANISMS: f"python benchmarks/mechanisms/run.py --json {MECHANISMS}",
    PEERS: f'make peers ARGS="--headline --json {PEERS}"',
    PEERS_AGAIN: f'make peers ARGS="--headline --json {PEERS_AGAIN}"',
    PEERS_ON_ANOTHER_DAY: f'make peers ARGS="--headline --json {PEERS_ON_ANOTHER_DAY}"',
    PEERS_FULL_8: f'make peers ARGS="--full --stages 8 --minutes 0 --json {PEERS_FULL_8}"',
    PEERS_FULL_4: f'make peers ARGS="--full --stages 4 --minutes 0 --json {PEERS_FULL_4}"',
    HINTS: f"python benchmarks/hints/run.py --profile llm --json {HINTS}",
    REPLICAS: f"python benchmarks/replicas/run.py --simulate --json {REPLICAS}",
    DISPATCH: f"python benchmarks/dispatch/run.py --json {DISPATCH}",
}
NOTHING = "-"
#: Marks what has no undisturbed step.
MARK = "†"


def read(root: Path, name: str) -> Any:
    """A result file, or None."""
    path = root / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def block(name: str, table: Callable[[Any], Iterable[str]]) -> Callable[[Path], str]:
    """A block that needs one result file."""

    def made(root: Path) -> str:
        document = read(root, name)
        return missing(name) if document is None else "\n".join(table(document))

    return made


def missing(name: str) -> str:
    """In the place of a table without its result file."""
    return f"`{name}` is missing: `{COMMANDS[name]}` writes it."


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The lines of a table."""
    yield _line(columns)
    yield "|" + "---|" * len(columns)
    yield from map(_line, rows)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
