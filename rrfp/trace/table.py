"""The breakdown of a step as a table for the terminal: times by cause, and peaks. Prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table

from rrfp.trace.breakdown import Breakdown, mean

#: Heading and value of the columns between the stage and the peaks; times in seconds.
_TIMES: tuple[tuple[str, Callable[[Breakdown], float]], ...] = (
    ("compute", lambda part: part.compute),
    ("input", lambda part: part.input),
    ("memory", lambda part: part.memory),
    ("TP order", lambda part: part.order),
    ("nothing left", lambda part: part.drained),
    ("other", lambda part: part.other),
)
#: Columns that are left out where they are 0 on every stage.
_OPTIONAL = ("memory", "TP order")


def breakdown_table(
    stages: Sequence[Breakdown],
    *,
    peak_held: Sequence[int] | None = None,
    peak_bytes: Sequence[int] | None = None,
    title: str | None = None,
) -> Table:
    """One row a stage, stage 0 first, and their mean; milliseconds, and MiB where bytes were held.

    Args:
        stages: the breakdown of every stage, at least one.
        peak_held: the most chunk tasks held, by stage; None leaves the column out.
        peak_bytes: the most bytes held, by stage; None, or zeros alone, leave the column out.
        title: the table's title.

    Raises:
        ValueError: if there is no stage, or a list of peaks does not have one entry for each stage.
    """
    peaks = _peaks(len(stages), peak_held, peak_bytes)
    average = mean(stages)
    columns = [(name, value) for name, value in _TIMES if name not in _OPTIONAL or value(average) > 0]
    table = Table(title=title, caption=f"milliseconds; the step took {average.step * 1e3:.1f}", title_justify="left")
    table.add_column("stage")
    for name in (*(name for name, _ in columns), "blocked", *peaks):
        table.add_column(name, justify="right")
    for stage, part in enumerate(stages):
        most = [cells[stage] for cells, _ in peaks.values()]
        table.add_row(str(stage), *(_milliseconds(value(part)) for _, value in columns), _blocked(part), *most)
    table.add_section()
    most = [f"max {worst}" for _, worst in peaks.values()]
    table.add_row("mean", *(_milliseconds(value(average)) for _, value in columns), _blocked(average), *most)
    return table


def _peaks(
    num_stages: int, peak_held: Sequence[int] | None, peak_bytes: Sequence[int] | None
) -> dict[str, tuple[list[str], str]]:
    """By heading: the cell of every stage, and the largest."""
    peaks: dict[str, tuple[list[str], str]] = {}
    for name, values, heading, text in (
        ("peak_held", peak_held, "peak held", str),
        ("peak_bytes", peak_bytes if peak_bytes and any(peak_bytes) else None, "peak MiB", _mebibytes),
    ):
        if values is None:
            continue
        if len(values) != num_stages:
            raise ValueError(f"{name} has {len(values)} entries, must have {num_stages} (one a stage)")
        peaks[heading] = ([text(value) for value in values], text(max(values)))
    return peaks


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f}"


def _blocked(part: Breakdown) -> str:
    return f"{part.blocking_share:.1%}"
