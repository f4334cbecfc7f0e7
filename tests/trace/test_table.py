"""The terminal table."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import TypedDict

import pytest
from rich.console import Console
from rich.table import Table

from rrfp.trace.breakdown import Breakdown
from rrfp.trace.breakdown_table import breakdown_table, duration, peaks_table

STAGES = (
    Breakdown(step=0.2, compute=0.15, input=0.03, drained=0.014, other=0.006),
    Breakdown(step=0.2, compute=0.1, input=0.08, drained=0.02),
)


class Peaks(TypedDict):
    peak_held: list[int]
    peak_bytes: list[int]


def lines(table: Table, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def render(table: Table, width: int = 80) -> list[list[str]]:
    """The words of every line but the rule and empty ones."""
    return [line.split() for line in lines(table, width) if line.strip("\u2500 ")]


def test_a_row_a_stage_their_mean_and_the_largest_peak() -> None:
    assert render(breakdown_table(STAGES, peak_held=[4, 3])) == [
        ["nothing", "peak"],
        ["stage", "compute", "input", "left", "other", "blocked", "held"],
        ["0", "150.0", "30.0", "14.0", "6.0", "22.0%", "4"],
        ["1", "100.0", "80.0", "20.0", "0.0", "50.0%", "3"],
        ["mean", "125.0", "55.0", "17.0", "3.0", "36.0%"],
        ["max", "4"],
        ["times", "in", "ms;", "a", "step", "took", "200.0"],
    ]


def test_rows_have_the_numbers_of_the_stages_that_were_recorded() -> None:
    assert [row[0] for row in render(breakdown_table(STAGES, numbers=[2, 5]))[2:4]] == ["2", "5"]
    assert [row[0] for row in render(peaks_table(peak_held=[1, 2], numbers=[2, 5]))[2:4]] == ["2", "5"]


def test_memory_and_tp_order_have_a_column_where_they_happened() -> None:
    part = Breakdown(step=0.2, compute=0.1, memory=0.04, order=0.06)
    assert render(breakdown_table([part]))[:2] == [
        ["TP", "nothing"],
        ["stage", "compute", "input", "memory", "order", "left", "other", "blocked"],
    ]


def test_peak_bytes_are_shown_in_mebibytes_where_there_are_any() -> None:
    rows = render(breakdown_table(STAGES, peak_held=[4, 3], peak_bytes=[3 << 20, 1 << 19]))
    assert rows[1][-2:] == ["held", "MiB"]
    assert [rows[i][-2:] for i in (2, 3, 5)] == [["4", "3.0"], ["3", "0.5"], ["4", "3.0"]]
    assert render(breakdown_table(STAGES, peak_bytes=[0, 0])) == render(breakdown_table(STAGES))
    assert render(peaks_table(peak_held=[4, 3], peak_bytes=[3 << 20, 1 << 19])) == [
        ["peak", "peak"], ["stage", "held", "MiB"], ["0", "4", "3.0"], ["1", "3", "0.5"], ["max", "4", "3.0"]
    ]  # fmt: skip


@pytest.mark.parametrize("step", [9e-5, 0.00999, 0.0999, 0.9999, 9.99, 123.4, 86_400.0])
def test_every_table_fits_80_columns_and_without_peaks_or_tp_order_60(step: float) -> None:
    """A head that does not fit would be cut, so nothing is measured by eye."""
    share = step / 7
    worst = Breakdown(step=step, compute=step, input=share, memory=share, order=share, drained=share, other=share)
    peaks: Peaks = {"peak_held": [1024], "peak_bytes": [99_999 << 20]}
    without_order = replace(worst, order=0.0)
    for table, width in (
        (breakdown_table([worst], **peaks), 80),
        (breakdown_table([worst]), 60),
        (breakdown_table([without_order], **peaks), 60),
        (peaks_table(**peaks), 60),
    ):
        assert "\u2026" not in "".join(lines(table, width))
        assert [line.split() for line in lines(table, width)] == [line.split() for line in lines(table, 200)]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.0 us"), (0.00123, "1230 us"), (0.01, "10.0 ms"), (0.2314, "231.4 ms"), (2.3, "2300 ms"), (12, "12.0 s")],
)
def test_the_unit_goes_with_the_length_of_the_step(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_one_peak_a_stage() -> None:
    with pytest.raises(ValueError, match="peak_held has 1 entries, must have 2"):
        breakdown_table(STAGES, peak_held=[1])
    with pytest.raises(ValueError, match="peak_bytes has 3 entries, must have 2"):
        breakdown_table(STAGES, peak_bytes=[1, 2, 3])
