"""The breakdown of a step as a table for the terminal. Nothing is printed here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table

from rrfp.trace.breakdown import Breakdown, mean

#: Heading and value of the columns between the stage and the peak; times in seconds.
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
    stages: Sequence[Breakdown], *, peak_held: Sequence[int] | None = None, title: str | None = None
) -> Table:
    """One row a stage, stage 0 first, and their mean; milliseconds.

    Args:
        stages: the breakdown of every stage, at least one.
        peak_held: for each stage the most microbatches it held; without it the column is left out.
        title: the table's title.

    Raises:
        ValueError: if there is no stage, or ``peak_held`` has not one entry a stage.
    """
    if peak_held is not None and len(peak_held) != len(stages):
        raise ValueError(f"peak_held has {len(peak_held)} entries, must have {len(stages)} (one a stage)")
    average = mean(stages)
    columns = [(name, value) for name, value in _TIMES if name not in _OPTIONAL or value(average) > 0]
    table = Table(title=title, caption=f"milliseconds; the step took {average.step * 1e3:.1f}", title_justify="left")
    table.add_column("stage")
    for name, _ in columns:
        table.add_column(name, justify="right")
    table.add_column("blocked", justify="right")
    if peak_held is not None:
        table.add_column("peak held", justify="right")
    for stage, part in enumerate(stages):
        peak = [] if peak_held is None else [str(peak_held[stage])]
        table.add_row(str(stage), *(_milliseconds(value(part)) for _, value in columns), _blocked(part), *peak)
    table.add_section()
    peak = [] if peak_held is None else [f"max {max(peak_held)}"]
    table.add_row("mean", *(_milliseconds(value(average)) for _, value in columns), _blocked(average), *peak)
    return table


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _blocked(part: Breakdown) -> str:
    return f"{part.blocking_share:.1%}"
