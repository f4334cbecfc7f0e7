"""Cases for 4 ranks: two stages by two replicas of which one is slow, compared with the one-process reference."""

from __future__ import annotations

import time
from typing import Any

from runtime.data_parallel_cases import STAGES, Job
from runtime.toys import TOLERANCE, data

from rrfp.compute.rng import replica_seed
from rrfp.compute.split import backward as split_backward
from rrfp.testing.reference import reference

CONFIGURATIONS: list[dict[str, Any]] = [
    {"tokens": True, "learned": True, "share_replicas": True},
    {"hint": "bfw", "split": True, "layout": "mesh", "sized": True, "share_replicas": True},
    {"split": True, "reduction": "sum", "tokens": True, "transport": "zmq", "limit": 1, "share_replicas": True},
    {"chunks": 2, "placement": "v", "hint": "bfw", "split": True, "layout": "mesh", "share_replicas": True},
    {"chunks": 2, "split": True, "tokens": True, "sized": True, "limit": "4kB", "share_replicas": True},
    {"split": True, "tokens": True, "learned": True, "sized": True, "limit": "2kB", "share_replicas": True},
    {"tokens": True, "learned": True},
    {"chunks": 2, "placement": "v", "hint": "bfw", "split": True, "layout": "mesh", "sized": True},
    {"chunks": 2, "split": True, "reduction": "sum", "tokens": True, "transport": "zmq"},
]


class SlowJob(Job):
    """The last stage of replica 1 is slow, and replicas share microbatches."""

    def __init__(self, options: dict[str, Any]) -> None:
        options = {"share_replicas": "dealt", **options}
        self._sized = options.pop("sized", False)
        super().__init__(options)
        slow = self.place.replica == 1 and self.place.stage == STAGES - 1
        for module in self.own[:1] if slow else ():
            module.register_forward_pre_hook(lambda *_: time.sleep(0.02))

    def losses(self, seed: int) -> list[float]:
        """Of this replica's microbatches, before the step."""
        batch, number = self._batches(seed)[self.place.replica], seed
        with_state = [parameter.grad for module in self.expected for parameter in module.parameters()]
        found = reference(
            self._model, batch.inputs, batch.targets, loss_fn=self._loss, seed=replica_seed(0, self.place.replica),
            step=number, reduction="sum", grad_scale=0.0,
        ).losses  # fmt: skip
        for parameter, grad in zip(
            (p for module in self.expected for p in module.parameters()), with_state, strict=True
        ):
            parameter.grad = grad
        return list(found)

    def sizes(self, seed: int) -> list[float] | None:
        """Of this replica's microbatches."""
        return self._batches(seed)[self.place.replica].lengths if self._sized else None

    def _batches(self, seed: int) -> list[Any]:
        return [data(4, seed=2 * seed), data(8, seed=2 * seed + 1)]


def gradients_of_a_shared_step_are_the_references(rank: int) -> None:
    """Every configuration, one pipeline after the other."""
    split_backward.MIN_FLOPS = 0.0  # or nothing of this size would be deferred
    for options in CONFIGURATIONS:
        job, dealt = SlowJob(options), 0
        with job.pipeline.blocking() as pipe:
            for number in range(6):
                losses = job.losses(number)
                result = job.step(pipe, number, sizes=job.sizes(number))
                job.check()
                job.gap = max(job.gap, *(abs(a - b) for a, b in zip(result.losses, losses, strict=True)))
                dealt += bool(result.dealt)
                assert not result.dealt or sum(result.dealt) == 12, result.dealt
                assert not result.dealt or job.is_v or result.dealt[1] < 8, result.dealt
        assert job.gap < TOLERANCE, f"{options}: {job.gap}"
        assert dealt >= 3, f"{options}: {dealt} steps were shared"
