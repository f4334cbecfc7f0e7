"""Schedules as CSV in the compute-only grammar of torch.distributed.pipelining.

One line a stage (torch: rank), one cell a task: virtual stage (torch: stage index), type, microbatch, such as ``2F0``.
Empty cells are idle slots and mean nothing here. Types: F is F; I is a split backward's B; W is W; B is an unsplit
backward, which on a split virtual stage means B and W together.
"""

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass

from rrfp.errors import ConfigError
from rrfp.model.graph import TaskGraph
from rrfp.model.schedule import Schedule
from rrfp.model.tasks import Kind, Task

# Nine digits are more than any pipeline has, and an int for certain.
_CELL = re.compile(rf"([0-9]{{1,9}})([I{''.join(Kind)}])([0-9]{{1,9}})")
_FORMS = "a virtual stage, a type (F, B, I or W) and a microbatch, such as 2F0"


@dataclass(frozen=True, slots=True)
class CsvSchedule:
    """The text of a schedule file: a schedule for whatever graph it fits."""

    name: str
    text: str

    def __str__(self) -> str:
        return self.name

    def for_graph(self, graph: TaskGraph, microbatches: int) -> Schedule:
        """Every stage's order, validated; a ConfigError names the line."""
        schedule = from_csv(self.text, graph, self.name)
        try:
            return schedule.validate(graph, microbatches)
        except ConfigError as error:
            raise ConfigError(
                f"{error} (stage i is line i + 1, with every task of {microbatches} microbatches)"
            ) from None


def to_csv(schedule: Schedule, graph: TaskGraph) -> str:
    """The schedule in torch's grammar: a line for each stage."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for order in schedule.orders:
        writer.writerow([_cell(task, graph) for task in order])
    return text.getvalue()


def from_csv(text: str, graph: TaskGraph, name: str = "csv") -> Schedule:
    """Parse a schedule, without validating it (see `Schedule.validate`).

    A cell that is not in the compute-only grammar, or does not fit ``graph``, is a ConfigError with its line and
    column.
    """
    stages = graph.placement.stages
    lines = _lines(text, name)
    if len(lines) != stages:
        raise ConfigError(f"schedule {name}: number of lines is {len(lines)}, must be {stages}, one for each stage")
    orders = []
    for stage, cells in enumerate(lines):
        order: list[Task] = []
        for column, cell in enumerate(cells, 1):
            order += _tasks(cell.strip(), stage, graph, f"schedule {name}: line {stage + 1}, column {column}")
        orders.append(tuple(order))
    return Schedule(name, tuple(orders))


def _lines(text: str, name: str) -> list[list[str]]:
    """The cells of each line; blank lines at the end are none."""
    lines = []
    for number, line in enumerate(text.rstrip().splitlines(), 1):
        try:
            lines.append(next(csv.reader([line]), []))
        except csv.Error as error:
            raise ConfigError(f"schedule {name}: line {number}: is not CSV ({error})") from None
    return lines


def _cell(task: Task, graph: TaskGraph) -> str:
    kind = "I" if task.kind is Kind.B and graph.split[task.virtual_stage] else task.kind
    return f"{task.virtual_stage}{kind}{task.microbatch}"


def _tasks(cell: str, stage: int, graph: TaskGraph, where: str) -> Iterator[Task]:
    if not cell:
        return
    match = _CELL.fullmatch(cell)
    if match is None:
        raise ConfigError(f"{where}: {cell!r} must be {_FORMS}")
    virtual_stage, kind, microbatch = int(match[1]), match[2], int(match[3])
    own = graph.placement.virtual_stages(stage)
    if virtual_stage not in own:
        raise ConfigError(f"{where}: {cell!r}: the virtual stages of this line are {', '.join(map(str, own))}")
    split = graph.split[virtual_stage]
    if kind in "IW" and not split:
        raise ConfigError(f"{where}: {cell!r}: the backward of virtual stage {virtual_stage} is not split: F or B")
    if kind == "B" and split:
        yield Task(Kind.B, microbatch, virtual_stage)
        yield Task(Kind.W, microbatch, virtual_stage)
    else:
        yield Task(Kind.B if kind == "I" else Kind(kind), microbatch, virtual_stage)
