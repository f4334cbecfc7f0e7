"""Programs for groups of ranks in threads: what they run, and how all of them end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from runtime.ranks import SOON_S, Outcome
from runtime.toys import Ones

import rrfp
from rrfp.errors import PipelineAborted
from rrfp.model.mesh import Mesh
from rrfp.model.tasks import Task
from rrfp.pipeline.faces import BlockingPipeline

#: Rank 2 leads stage 1, rank 3 follows it.
MESH = Mesh((("pp", 2), ("tp", 2)))
NAMES = [MESH.name(rank) for rank in range(4)]


class Program(Ones):
    """Outputs are ones. May do something in one forward; its last stage has losses.

    Args:
        rank: which.
        check: called with every task that runs.
    """

    def __init__(self, rank: int, check: Callable[[Task], object], is_last: bool) -> None:
        self.ran: list[Task] = []
        self._rank, self._check, self._is_last = rank, check, is_last

    def forward(self, task: Task, inputs: tuple[rrfp.Payload, ...]) -> rrfp.Payload:
        self._check(task)
        self.ran.append(task)
        return rrfp.Payload.pack(torch.ones(1))

    def backward(self, task: Task, grads: tuple[rrfp.Payload, ...]) -> tuple[rrfp.Payload, ...]:
        self._check(task)
        self.ran.append(task)
        return super().backward(task, grads)

    def losses(self) -> Mapping[int, float]:
        return {task.microbatch: 1.0 + self._rank + task.microbatch for task in self.ran if self._is_last}


def programs(mesh: Mesh = MESH, checks: Mapping[int, Callable[[Task], object]] | None = None) -> list[Program]:
    """One a rank; some check their tasks."""
    ends = [mesh.place_of(rank).stage == mesh.stages - 1 for rank in range(mesh.size)]
    return [Program(rank, (checks or {}).get(rank, bool), is_last) for rank, is_last in enumerate(ends)]


def steps(count: int) -> Callable[[int, BlockingPipeline], Any]:
    return lambda rank, pipe: [pipe.step(microbatches=4) for _ in range(count)][-1]


def aborted(outcomes: Sequence[Outcome], but: int | None = None) -> list[PipelineAborted]:
    """The aborts of all ranks but one, which came within `SOON_S` of each other."""
    told = [outcome for rank, outcome in enumerate(outcomes) if rank != but]
    assert max(outcome.ended for outcome in told) - min(outcome.ended for outcome in told) < SOON_S
    return [outcome.abort for outcome in told]
