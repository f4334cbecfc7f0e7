"""A leader beside an all-gather at every task: groups of two ranks, in real processes and in the engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

import benchmarks.tp
from benchmarks.paper.claims import TABLE_3
from benchmarks.shared.comparison import Cell
from benchmarks.shared.workers import run_workers
from benchmarks.tp.run import figures_of
from benchmarks.tp.settings import METHODS, Settings
from rrfp.hints.registry import create_hint
from rrfp.lab.cluster.coordination import Agreement, Coordination, Leader
from rrfp.lab.cluster.simulation import TensorParallelResult, run_tensor_parallel
from rrfp.lab.generators.latency import RankLatencies
from rrfp.model.tasks import Kind, Task

TP = 2
#: The paper's share of coordination at TP 2 on `PAPER_PROFILE`'s workload, in which every task needs an all-gather.
PAPER_PROFILE = "mllm"
PAPER_SHARE = TABLE_3[TP][1].coordination / TABLE_3[TP][1].iteration

_WAYS: dict[str, Coordination] = {
    "leader, depth 2": Leader(depth=2),
    "leader, depth 1": Leader(),
    "agreement": Agreement(),
}
_BASE = "leader, depth 2"


@dataclass(frozen=True, slots=True)
class Coordinated:
    """One way for the ranks of a group to agree.

    Attributes:
        cell: where.
        method: the way.
        ratio: its step over the leader's at depth 2, median.
        ratio_interval: 95% of that, see `median_interval`.
        share: mean part of a step lost to coordination.
        messages: between the ranks of a group, a task.
        simulated: as ``ratio``, in the engine with the same tables and delays.
        simulated_share: as ``share``.
        paper_share: of the all-gather.
    """

    cell: Cell
    method: str
    ratio: float
    ratio_interval: tuple[float, float]
    share: float
    messages: float
    simulated: float
    simulated_share: float
    paper_share: float | None


def measured(settings: Settings) -> Iterator[Coordinated]:
    """Run the processes: a row for each way."""
    script = Path(benchmarks.tp.__path__[0]) / "worker.py"
    lines = list(run_workers(script, settings.stages * settings.tp, settings.to_json()))
    figures = figures_of(settings, lines)
    planned = {
        name: [_simulated(settings, number, name) for number in range(1, settings.rounds + 1)] for name in METHODS
    }
    for name, one in figures.items():
        ratios = [own.makespan / base.makespan for own, base in zip(planned[name], planned[_BASE], strict=True)]
        yield Coordinated(
            Cell(settings.stages, settings.profile, settings.jitter),
            name,
            one.iteration,
            one.iteration_interval,
            one.coordination,
            one.messages_per_task,
            fmean(ratios),
            fmean(each.coordination_share for each in planned[name]),
            PAPER_SHARE if (name, settings.profile) == ("agreement", PAPER_PROFILE) else None,
        )


def _simulated(settings: Settings, number: int, name: str) -> TensorParallelResult:
    limits = [settings.limit()] * settings.stages
    return run_tensor_parallel(
        settings.costs(number), _latencies(settings, number), partial(create_hint, "bf"), limits, _WAYS[name]
    )


def _latencies(settings: Settings, number: int) -> RankLatencies:
    """The delays of every rank's messages."""

    def late(task: Task, member: int) -> float:
        return settings.delay_s(number, task.virtual_stage * settings.tp + member, str(task))

    def cube(kind: Kind, first: int) -> Any:
        rows = [
            [
                [late(Task(kind, m, first + edge), member) for member in range(settings.tp)]
                for m in range(settings.microbatches)
            ]
            for edge in range(settings.stages - 1)
        ]
        return np.array(rows)

    return RankLatencies(cube(Kind.F, 0), cube(Kind.B, 1))


def plain(row: Coordinated) -> dict[str, Any]:
    """As plain data."""
    return {**asdict(row), "cell": str(row.cell)}
