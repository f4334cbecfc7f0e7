"""The report of a sweep: a row a method and workload with mean and spread over seeds, or everything as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rrfp.commands.output import print_json
from rrfp.tables import Column, print_table, terminal

if TYPE_CHECKING:
    from rrfp.sim.sweep.rows import Row
    from rrfp.sim.sweep.runs import Skip, SweepResult
    from rrfp.sim.sweep.summary import Group, Spread


def show_sweep(result: SweepResult, *, json: bool) -> None:
    """Print all runs and their summary as JSON, or the summary as a table."""
    from rrfp.sim.sweep.summary import in_common, summarise

    groups = summarise(result.rows)
    if json:
        document = {"runs": list(map(asdict, result.rows)), "summary": [group.to_json() for group in groups]}
        print_json({**document, "skipped": list(map(_plain, result.skipped))})
        return
    console = terminal()
    console.print(in_common(result.rows), soft_wrap=True)
    _print_groups(result.rows, groups)
    methods = Counter(
        (skip.experiment.method.name, skip.experiment.method.kind, skip.reason) for skip in result.skipped
    )
    for (name, kind, reason), count in methods.items():
        runs = "1 run" if count == 1 else f"{count} runs"
        console.print(f"skipped {runs} of {name} ({kind}): {reason}", soft_wrap=True)


def _plain(skip: Skip) -> dict[str, Any]:
    method = skip.experiment.method
    return {**asdict(skip.experiment.workload), "method": method.name, "kind": method.kind, "reason": skip.reason}


def _print_groups(rows: Sequence[Row], groups: Sequence[Group]) -> None:
    """A row a group; an empty line between workloads."""
    from rrfp.sim.sweep.summary import changing, label, shown

    columns = changing(rows)
    over = {label(group.baseline[0]) for group in groups if group.baseline}
    figures = _figures(groups, has_speed_ups=bool(over))
    lines: list[tuple[str, ...]] = []
    before = None
    for group in groups:
        here = [shown(column, group.workload[column]) for column in columns]
        if before is not None and here != before:
            lines.append(("",) * (len(columns) + 1 + len(figures)))
        fresh = [""] * len(here) if here == before else here
        lines.append((*fresh, group.label, *(figure(group) for figure in figures.values())))
        before = here
    cells = list(zip(*lines, strict=True))
    names = [Column(head, each, "left") for head, each in zip((*columns, "method"), cells, strict=False)]
    print_table(names, [Column(head, each) for head, each in zip(figures, cells[len(names) :], strict=True)])
    if over:
        by_seed = ", seed by seed" if any(len(group.rows) > 1 for group in groups) else ""
        terminal().print(f"speed-up over {' or '.join(sorted(over))}{by_seed}", soft_wrap=True)


def _figures(groups: Sequence[Group], *, has_speed_ups: bool) -> dict[str, Callable[[Group], str]]:
    """The columns that hold figures: the head, and the text of a group's cell."""
    figures: dict[str, Callable[[Group], str]] = {"makespan (s)": lambda g: _mean(g.spread("makespan"), "#.4g", ".2g")}
    if any(len(group.rows) > 1 for group in groups):
        figures["least - most"] = lambda group: _range(group.spread("makespan"), "#.4g")
    figures["/ bound"] = lambda group: f"{group.spread('ratio').mean:.3f}"
    figures["peak held"] = _held
    if has_speed_ups:
        figures["speed-up"] = lambda g: "-" if g.speed_up is None else _mean(g.speed_up, ".3f", ".3f")
    if any(group.has_groups for group in groups):
        figures["coordination"] = _of_groups("coordination_share", ".2%")
        figures["failed rounds a task"] = _of_groups("failed_rounds_per_task", ".3g")
        figures["messages a task"] = _of_groups("messages_per_task", ".3g")
    return figures


def _held(group: Group) -> str:
    peak = group.spread("peak_max")
    return f"{peak.max:.0f}" if peak.min == peak.max else _range(peak, ".0f")


def _of_groups(column: str, form: str) -> Callable[[Group], str]:
    return lambda group: _mean(group.spread(column), form, form) if group.has_groups else "-"


def _range(spread: Spread, form: str) -> str:
    return f"{spread.min:{form}} - {spread.max:{form}}"


def _mean(spread: Spread, mean: str, std: str) -> str:
    """The mean, and the standard deviation where there are several seeds, each in its format."""
    text = f"{spread.mean:{mean}}"
    return text if spread.std is None else f"{text} ±{spread.std:{std}}"
