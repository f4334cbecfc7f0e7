"""The terminal table."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table

from rrfp.trace.breakdown import Breakdown
from rrfp.trace.table import breakdown_table

STAGES = (
    Breakdown(step=0.2, compute=0.15, input=0.03, drained=0.014, other=0.006),
    Breakdown(step=0.2, compute=0.1, input=0.08, drained=0.02),
)


def render(table: Table, width: int = 80) -> list[list[str]]:
    """The cells of every line that has some."""
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().replace("┃", "│").splitlines()
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if "│" in line]


def test_a_row_a_stage_and_their_mean() -> None:
    assert render(breakdown_table(STAGES, peak_held=[4, 3])) == [
        ["stage", "compute", "input", "nothing left", "other", "blocked", "peak held"],
        ["0", "150.0", "30.0", "14.0", "6.0", "22.0%", "4"],
        ["1", "100.0", "80.0", "20.0", "0.0", "50.0%", "3"],
        ["mean", "125.0", "55.0", "17.0", "3.0", "36.0%", "max 4"],
    ]


def test_memory_and_tp_order_have_a_column_where_they_happened() -> None:
    part = Breakdown(step=0.2, compute=0.1, memory=0.04, order=0.06)
    assert render(breakdown_table([part]))[0] == [
        "stage", "compute", "input", "memory", "TP order", "nothing left", "other", "blocked"
    ]  # fmt: skip


def test_peak_bytes_are_shown_in_mebibytes_where_there_are_any() -> None:
    rows = render(breakdown_table(STAGES, peak_held=[4, 3], peak_bytes=[3 << 20, 1 << 19]), width=100)
    assert [row[-2:] for row in rows] == [["peak held", "peak MiB"], ["4", "3.0"], ["3", "0.5"], ["max 4", "max 3.0"]]
    assert render(breakdown_table(STAGES, peak_bytes=[0, 0])) == render(breakdown_table(STAGES))


def test_one_peak_a_stage() -> None:
    with pytest.raises(ValueError, match="peak_held has 1 entries, must have 2"):
        breakdown_table(STAGES, peak_held=[1])
    with pytest.raises(ValueError, match="peak_bytes has 3 entries, must have 2"):
        breakdown_table(STAGES, peak_bytes=[1, 2, 3])
