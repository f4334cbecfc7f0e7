"""Programs of two stages by two replicas, one rank of which is slow."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import rrfp
from rrfp.model.mesh import Mesh
from rrfp.pipeline.faces import BlockingPipeline
from rrfp.runtime.steps.dealer import FEW

#: Two stages by two replicas; the second stage of replica 0 is slow.
MESH = Mesh((("pp", 2), ("dp", 2)))
SLOW = 2
GIVEN = (8, 6)
QUICK_S, SLOW_S = 0.001, 0.006
STEPS = FEW + 2


class Counts(rrfp.StageProgram):
    """Each stage adds what the caller passed it to what it received; the loss is the sum."""

    def __init__(self, rank: int, seconds: float = QUICK_S) -> None:
        self.place, self.seconds = MESH.place_of(rank), seconds
        self.opened: list[rrfp.Batch] = []
        self.reopened: list[rrfp.Batch] = []
        self.ran: list[int] = []

    def open(self, step: Any, batch: rrfp.Batch) -> None:
        self.opened.append(batch)
        self._begin(batch)

    def reopen(self, step: Any, batch: rrfp.Batch) -> None:
        self.reopened.append(batch)
        self._begin(batch)

    def _begin(self, batch: rrfp.Batch) -> None:
        self._batch: Any = batch
        self._losses: dict[int, float] = {}
        self.ran = []
        self.sizes: dict[int, int] = {}

    def forward(self, task: rrfp.Task, inputs: tuple[rrfp.Payload, ...]) -> rrfp.Payload:
        m = task.microbatch
        self.ran.append(m)
        is_first = self.place.stage == 0
        received: Any = self._batch.inputs[m] if is_first else inputs[0].unpack()
        self.sizes[m] = received.numel()
        time.sleep(self.seconds * self.sizes[m])
        if is_first:
            return rrfp.Payload.pack(received + self._batch.kwargs[m]["more"])
        self._losses[m] = float((received + self._batch.targets[m]).mean())
        return rrfp.Payload()

    def backward(self, task: rrfp.Task, grads: tuple[rrfp.Payload, ...]) -> tuple[rrfp.Payload, ...]:
        time.sleep(self.seconds * self.sizes[task.microbatch])
        return () if self.place.stage == 0 else (rrfp.Payload((torch.ones(1),)),)

    def losses(self) -> Mapping[int, float]:
        return self._losses


def batch_of(rank: int, number: int, sizes: Sequence[int] | None = None) -> dict[str, Any]:
    """What the caller on a rank passes: numbers that tell step, replica and microbatch, each so often."""
    stage, replica, _ = MESH.place_of(rank)
    count = GIVEN[replica]
    rows = [1] * count if sizes is None else sizes
    own = [torch.full((rows[m],), 100.0 * number + 10 * replica + m) for m in range(count)]
    if stage == 0:
        return {"inputs": own, "kwargs": [{"more": m / 8} for m in range(count)]}
    return {"targets": own, "weights": [(1.0 + m) / 16 for m in range(count)]}


def programs(slow: float = SLOW_S, quick: float = QUICK_S) -> list[Counts]:
    """One a rank; the slow rank's takes so many seconds a task, the others' so many."""
    return [Counts(rank, slow if rank == SLOW else quick) for rank in range(MESH.size)]


def steps(rank: int, pipe: BlockingPipeline) -> list[rrfp.StepResult]:
    """A body."""
    return [pipe.step(**batch_of(rank, number)) for number in range(STEPS)]


def losses_of(replica: int, number: int) -> list[float]:
    """Of the microbatches of a replica's caller."""
    return [2 * (100.0 * number + 10 * replica + m) + m / 8 for m in range(GIVEN[replica])]


def mean(number: int) -> float:
    """The loss of a step."""
    pairs = [(1.0 + m, loss) for replica in range(2) for m, loss in enumerate(losses_of(replica, number))]
    return sum(weight * loss for weight, loss in pairs) / sum(weight for weight, _ in pairs)
