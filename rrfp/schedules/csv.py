"""Schedules as CSV in the compute-only grammar of torch.distributed.pipelining.

One row a stage (torch: rank), one cell a task: virtual stage (torch: stage index), type, microbatch, such as ``2F0``.
Empty cells are idle slots and are ignored. Types: F is F; I is a split backward's B; W is W; B is an unsplit
backward, which on a split virtual stage means B and W together.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator

from rrfp.core.graph import Graph
from rrfp.core.schedule import Schedule
from rrfp.core.tasks import Kind, Task
from rrfp.errors import ConfigError

_CELL = re.compile(r"([0-9]+)([FBIW])([0-9]+)")


def to_csv(schedule: Schedule, graph: Graph) -> str:
    """The schedule in torch's grammar: a line for each stage."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for order in schedule.orders:
        writer.writerow([_cell(task, graph) for task in order])
    return text.getvalue()


def from_csv(text: str, graph: Graph, name: str = "csv") -> Schedule:
    """Parse a schedule, without validating it (see `Schedule.validate`).

    Raises:
        ConfigError: naming row and column of a cell that is not in the compute-only grammar or does not fit ``graph``.
    """
    rows = list(csv.reader(io.StringIO(text)))
    if len(rows) != graph.placement.stages:
        raise ConfigError(
            f"schedule {name}: has {len(rows)} rows, must have {graph.placement.stages}, one for each stage"
        )
    orders = []
    for row, cells in enumerate(rows):
        order: list[Task] = []
        for column, cell in enumerate(cells):
            order += _tasks(cell.strip(), graph, f"schedule {name}: row {row}, column {column}")
        orders.append(tuple(order))
    return Schedule(name, tuple(orders))


def _cell(task: Task, graph: Graph) -> str:
    kind = "I" if task.kind is Kind.B and graph.split[task.virtual_stage] else task.kind
    return f"{task.virtual_stage}{kind}{task.microbatch}"


def _tasks(cell: str, graph: Graph, where: str) -> Iterator[Task]:
    if not cell:
        return
    match = _CELL.fullmatch(cell)
    if match is None:
        raise ConfigError(f"{where}: {cell!r} is not a compute action such as 2F0 (types F, B, I, W)")
    virtual_stage, kind, microbatch = int(match[1]), match[2], int(match[3])
    if virtual_stage >= graph.placement.num_virtual_stages:
        raise ConfigError(f"{where}: {cell!r}: virtual stages are 0..{graph.placement.num_virtual_stages - 1}")
    split = graph.split[virtual_stage]
    if kind in "IW" and not split:
        raise ConfigError(f"{where}: {cell!r}: the backward of virtual stage {virtual_stage} is not split")
    if kind == "B" and split:
        yield Task(Kind.B, microbatch, virtual_stage)
        yield Task(Kind.W, microbatch, virtual_stage)
    else:
        yield Task(Kind.B if kind == "I" else Kind(kind), microbatch, virtual_stage)
