"""Breakdowns as tables of a terminal, and as plain text."""

import io
from collections.abc import Callable, Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from rrfp.tables import mebibytes
from rrfp.trace.breakdown import Breakdown, mean

#: Characters of a line that fits any such table.
_WIDEST = 80
#: Columns that are left out where they are 0 on every stage.
_OPTIONAL = ("memory", "TP order", "choice")


def breakdown_table(
    stages: Sequence[Breakdown],
    *,
    peak_held: Sequence[int] | None = None,
    peak_bytes: Sequence[int] | None = None,
    numbers: Sequence[int] | None = None,
) -> Table:
    """One row a stage, their mean, and the largest peaks; MiB where bytes were held.

    The caption names the unit of the times, which the length of the step decides. It fits 60 columns where no group
    of ranks waited for its order, else 68, and 54 without peaks. Peaks that are None, and bytes of zeros alone, have no
    column.
    """
    average = mean(stages)
    numbers = _one_a_stage("numbers", range(len(stages)) if numbers is None else numbers, len(stages))
    columns = [name for name, seconds in average.parts.items() if name not in _OPTIONAL or seconds > 0]
    unit, time = _unit(average.step)
    peaks = _peaks(len(stages), peak_held, peak_bytes)
    heads = (*(name.replace(" ", "\n") for name in columns), "blocked", *peaks)
    table = _table(heads, f"times in {unit}; a step took {time(average.step)}")
    for index, (number, part) in enumerate(zip(numbers, stages, strict=True)):
        most = [cells[index] for cells, _ in peaks.values()]
        table.add_row(str(number), *(time(part.parts[name]) for name in columns), _blocked(part), *most)
    table.add_section()
    table.add_row("mean", *(time(average.parts[name]) for name in columns), _blocked(average))
    if peaks:
        table.add_row("max", *[""] * (len(heads) - len(peaks)), *(worst for _, worst in peaks.values()))
    return table


def breakdown_text(stages: Sequence[Breakdown], *, peak_held: Sequence[int], peak_bytes: Sequence[int]) -> str:
    """`breakdown_table` in ASCII, which any stream takes."""
    table = breakdown_table(stages, peak_held=peak_held, peak_bytes=peak_bytes)
    console = Console(file=io.StringIO(), width=_WIDEST, color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip().replace("─", "-") for line in captured.get().splitlines())


def peaks_table(
    *, peak_held: Sequence[int], peak_bytes: Sequence[int] | None = None, numbers: Sequence[int] | None = None
) -> Table:
    """The peaks alone, for narrow terminals; see `breakdown_table`."""
    numbers = _one_a_stage("numbers", range(len(peak_held)) if numbers is None else numbers, len(peak_held))
    peaks = _peaks(len(peak_held), peak_held, peak_bytes)
    table = _table(peaks)
    for index, number in enumerate(numbers):
        table.add_row(str(number), *(cells[index] for cells, _ in peaks.values()))
    table.add_section()
    table.add_row("max", *(worst for _, worst in peaks.values()))
    return table


def duration(seconds: float) -> str:
    """A step's time in the unit that its table has."""
    unit, time = _unit(seconds)
    return f"{time(seconds)} {unit}"


def _table(heads: Iterable[str], caption: str | None = None) -> Table:
    table = Table(caption=caption, box=SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    table.caption_justify = "left"
    table.add_column("stage", no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def _peaks(
    num_stages: int, peak_held: Sequence[int] | None, peak_bytes: Sequence[int] | None
) -> dict[str, tuple[list[str], str]]:
    """By heading: the cell of every stage, and the largest."""
    peaks: dict[str, tuple[list[str], str]] = {}
    for name, values, heading, text in (
        ("peak_held", peak_held, "peak\nheld", str),
        ("peak_bytes", peak_bytes if peak_bytes and any(peak_bytes) else None, "peak\nMiB", mebibytes),
    ):
        if values is None:
            continue
        _one_a_stage(name, values, num_stages)
        peaks[heading] = ([text(value) for value in values], text(max(values)))
    return peaks


def _one_a_stage(name: str, values: Iterable[int], num_stages: int) -> list[int]:
    entries = list(values)
    if len(entries) != num_stages:
        raise ValueError(f"{name} has {len(entries)} entries, must have {num_stages} (one a stage)")
    return entries


def _unit(step: float) -> tuple[str, Callable[[float], str]]:
    """The unit for a step's times, and their text."""
    unit, scale = ("s", 1.0) if step >= 10 else ("ms", 1e3) if step >= 1e-2 else ("us", 1e6)
    decimals = 1 if step * scale < 1000 else 0
    return unit, lambda seconds: f"{seconds * scale:.{decimals}f}"


def _blocked(part: Breakdown) -> str:
    return f"{part.blocking_share:.1%}"
