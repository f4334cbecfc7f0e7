"""What `rrfp simulate` does with several runs: a bar while they run, a CSV file, a picture, a table or JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rrfp.commands.output import print_json
from rrfp.commands.simulate_show import check_folder
from rrfp.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from rrfp.sim.sweep.experiment import Cell
    from rrfp.sim.sweep.runs import Row, Skip, SweepResult
    from rrfp.sim.sweep.summary import Group, Spread

#: Columns of a table that goes to a file.
FILE_WIDTH = 140


def check_picture(path: Path, cells: Sequence[Cell]) -> None:
    """Refuse a picture that could not be drawn, before anything runs.

    Raises:
        ConfigError: if there is nothing to draw with, too much to draw, or no folder to write to.
    """
    from dataclasses import replace

    from rrfp.sim.sweep.plot import check_size
    from rrfp.trace.plot import require_matplotlib

    require_matplotlib("a plot")
    check_size(len({cell.method for cell in cells}), len({replace(cell.workload, seed=0) for cell in cells}))
    check_folder(path)


def run_sweep(cells: Sequence[Cell], *, jobs: int | None, csv: Path | None) -> SweepResult:
    """Run all cells with a progress bar on the terminal, and write each row as soon as it is known.

    Raises:
        ConfigError: if no cell fits, or the file cannot be written.
        DeadlockError, HintError: see `rrfp.sim.sweep.runs.sweep`.
    """
    from rrfp.sim.sweep.runs import Row, RowFile, sweep

    with nullcontext() if csv is None else RowFile(csv) as file, progress_bar(len(cells)) as advance:

        def on_outcome(outcome: Row | Skip) -> None:
            if file is not None and isinstance(outcome, Row):
                file.add(outcome)
            advance()

        try:
            result = sweep(cells, jobs=jobs, progress=on_outcome)
        except KeyboardInterrupt:
            if file is not None:
                typer.echo(f"{csv} has the first {file.rows} of {len(cells)} runs", err=True)
            raise
    if not result.rows:
        raise ConfigError(result.skipped[0].reason)
    return result


@contextmanager
def progress_bar(total: int) -> Iterator[Any]:
    """A bar on a terminal's stderr; gives what advances it by one."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    # Without a thread that refreshes it: the sweep forks, and a forked process has only the thread that forked.
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True, auto_refresh=False
    ) as bar:
        task = bar.add_task("", total=total)
        bar.refresh()
        yield lambda: bar.update(task, advance=1, refresh=True)


def show_sweep(result: SweepResult, *, json: bool) -> None:
    """Print all runs and their summary as JSON, or the summary as a table."""
    from rrfp.sim.sweep.summary import in_common, summarise

    groups = summarise(result.rows)
    if json:
        skipped = [{**asdict(skip.cell.workload), **_named(skip), "reason": skip.reason} for skip in result.skipped]
        document = {"runs": list(map(asdict, result.rows)), "summary": [group.to_json() for group in groups]}
        print_json({**document, "skipped": skipped})
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:  # a file or a pager has no edge to wrap at
        console.width = max(console.width, FILE_WIDTH)
    console.print(in_common(result.rows), soft_wrap=True)
    console.print(_table(result.rows, groups))
    counts: dict[tuple[str, str], int] = {}
    for skip in result.skipped:
        key = (f"{skip.cell.method.name} ({skip.cell.method.kind})", skip.reason)
        counts[key] = counts.get(key, 0) + 1
    for (method, reason), count in counts.items():
        runs = "1 run" if count == 1 else f"{count} runs"
        console.print(f"skipped {runs} of {method}: {reason}", soft_wrap=True)


def _named(skip: Skip) -> dict[str, str]:
    return {"method": skip.cell.method.name, "kind": skip.cell.method.kind}


def _table(rows: Sequence[Row], groups: Sequence[Group]) -> Table:
    """A row a group; an empty line between workloads."""
    from rich.table import Table

    from rrfp.sim.sweep.summary import WORKLOAD_COLUMNS, label, varied

    changing = varied(rows, WORKLOAD_COLUMNS)
    over = {label(group.baseline[0]) for group in groups if group.baseline}
    table = Table(box=None, pad_edge=False, header_style="bold")
    if over:
        table.caption = f"speed-up over {' or '.join(sorted(over))}, seed by seed"
    for column in (*changing, "method"):
        table.add_column(column, no_wrap=True)
    seeds = ["least - most"] if any(len(group.rows) > 1 for group in groups) else []
    for column in ("makespan (s)", *seeds, "/ bound", "peak held", *(["speed-up"] if over else [])):
        table.add_column(column, justify="right")
    before = None
    for group in groups:
        here = [str(group.workload[column]) for column in changing]
        if before is not None and here != before:
            table.add_row()
        shown = [""] * len(here) if here == before else here
        table.add_row(*shown, group.label, *_figures(group, has_seeds=bool(seeds), has_speed_ups=bool(over)))
        before = here
    return table


def _figures(group: Group, *, has_seeds: bool, has_speed_ups: bool) -> list[str]:
    makespan, ratio, peak = (group.spread(column) for column in ("makespan", "ratio", "peak_max"))
    held = f"{peak.max:.0f}" if peak.min == peak.max else f"{peak.min:.0f} - {peak.max:.0f}"
    least_most = [f"{makespan.min:#.4g} - {makespan.max:#.4g}"] if has_seeds else []
    figures = [_mean(makespan, "#.4g", ".2g"), *least_most, f"{ratio.mean:.3f}", held]
    if has_speed_ups:
        speed_up = group.speed_up
        figures.append("-" if speed_up is None else _mean(speed_up, ".3f", ".3f"))
    return figures


def _mean(spread: Spread, mean: str, std: str) -> str:
    """The mean, and the standard deviation where several seeds tell it, each in its format."""
    text = f"{spread.mean:{mean}}"
    return text if spread.std is None else f"{text} ±{spread.std:{std}}"
