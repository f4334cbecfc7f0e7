"""Tables that are legible at the terminal's width: nothing is cut off, and columns without room follow below."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

#: Characters of a line that goes to a file or a pager, which have no edge, unless COLUMNS says otherwise.
FILE_WIDTH = 140
#: Spaces between two columns, where there is room.
GAP = 2


def mebibytes(num_bytes: int) -> str:
    """A number of bytes in MiB; one digit of less than 0.1, which would look like nothing."""
    amount = num_bytes / (1 << 20)
    if 0 < amount < 0.1:
        return f"{amount:.1g}"
    return f"{amount:.{1 if amount < 1000 else 0}f}"


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table."""

    #: Its head; the words stand below each other where the head would make the column wider than its cells.
    head: str
    #: One text for each row.
    cells: Sequence[str]
    justify: Literal["left", "right"] = "right"

    @property
    def width(self) -> int:
        return max(len(line) for text in (self.head, *self.cells) for line in text.split("\n"))

    def stacked(self) -> Column:
        """The same column with a head as narrow as its cells, as far as its words allow."""
        words = re.split(r"(?<!/)\s", self.head)
        return replace(
            self, head=textwrap.fill(self.head, max(map(len, (*words, *self.cells))), break_long_words=False)
        )


def terminal() -> Console:
    """The console for tables on stdout: as wide as the terminal, COLUMNS or, in a file, `FILE_WIDTH`."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = FILE_WIDTH
    return console


def print_table(keys: Sequence[Column], columns: Sequence[Column], sections: Collection[int] = ()) -> None:
    """Print a table on stdout; each part of one that is too wide has the ``keys``, and a line follows ``sections``."""
    console = terminal()
    for index, table in enumerate(fitted(keys, columns, console.width, sections)):
        if index:
            console.print()
        console.print(table, soft_wrap=True)


def fitted(
    keys: Sequence[Column], columns: Sequence[Column], width: int, sections: Collection[int] = ()
) -> list[Table]:
    """A table in as many parts as ``width`` requires; see `print_table`."""
    everything = [*keys, *columns]
    stacked = [column.stacked() for column in everything]
    for whole, gap in ((everything, GAP), (stacked, GAP), (stacked, 1)):
        if _width(whole, gap) <= width:
            return [_table(whole, sections, gap)]
    parts: list[list[Column]] = [[]]
    for column in stacked[len(keys) :]:
        if parts[-1] and _width([*stacked[: len(keys)], *parts[-1], column], GAP) > width:
            parts.append([])
        parts[-1].append(column)
    return [_table([*stacked[: len(keys)], *part], sections, GAP) for part in parts]


def _width(columns: Sequence[Column], gap: int) -> int:
    return sum(column.width for column in columns) + gap * (len(columns) - 1)


def _table(columns: Sequence[Column], sections: Collection[int], gap: int) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column.head, justify=column.justify, no_wrap=True, min_width=column.width, vertical="bottom")
    for index, cells in enumerate(zip(*(column.cells for column in columns), strict=True)):
        table.add_row(*cells)
        if index in sections:
            table.add_row(*("-" * column.width for column in columns))
    return table
