"""Tables keep every head and every cell whole at any width."""

from __future__ import annotations

import pytest
from rich.console import Console

from rrfp.tables import Column, fitted, mebibytes

KEYS = [Column("method", ["bf", "slot-aware-pyramid"], "left")]
COLUMNS = [
    Column("median ms", ["1234", "7"]),
    Column("/ bound", ["1.01", "1.2"]),
    Column("failed rounds a task", ["0", "12"]),
    Column("held", ["4 3 2 1", "8 8 8 8"]),
]


def lines(width: int) -> list[list[str]]:
    """Each part of the table as the lines that a terminal shows."""
    console = Console(width=width, color_system=None)
    parts = []
    for table in fitted(KEYS, COLUMNS, width):
        with console.capture() as capture:
            console.print(table)
        parts.append([line.rstrip() for line in capture.get().splitlines()])
    return parts


def test_where_there_is_room_it_is_one_table_with_heads_in_one_line() -> None:
    assert lines(80) == [
        [
            "method              median ms  / bound  failed rounds a task     held",
            "bf                       1234     1.01                     0  4 3 2 1",
            "slot-aware-pyramid          7      1.2                    12  8 8 8 8",
        ]
    ]


def test_heads_are_stacked_before_columns_go_below() -> None:
    (part,) = lines(56)
    assert part[0].split() == ["failed"]
    assert part[-2].split() == ["bf", "1234", "1.01", "0", "4", "3", "2", "1"]


@pytest.mark.parametrize("width", range(27, 81))
def test_nothing_is_cut_off_and_every_part_names_its_rows(width: int) -> None:
    parts = lines(width)
    words = " ".join(line for part in parts for line in part).split()
    assert max(len(line) for part in parts for line in part) <= width
    assert not any("…" in word for word in words)
    for column in COLUMNS:
        for text in (column.head, *column.cells):
            assert set(text.split()) <= set(words)
    assert all(part[-2].startswith("bf ") and part[-1].startswith("slot-aware-pyramid ") for part in parts)


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [(0, "0.0"), (1 << 10, "0.001"), (24_000, "0.02"), (1 << 19, "0.5"), (264 << 20, "264.0"), (3 << 30, "3072")],
)
def test_a_little_memory_does_not_look_like_none(num_bytes: int, shown: str) -> None:
    assert mebibytes(num_bytes) == shown
