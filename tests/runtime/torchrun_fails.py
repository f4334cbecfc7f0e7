"""A user's program under torchrun whose stage 1 raises in its third step. With "record" torchrun gets an error file."""

from __future__ import annotations

import sys

import torch
from torch.distributed.elastic.multiprocessing.errors import record

import rrfp
from rrfp.lab.emulated import EmulatedStage
from rrfp.model.graph import TaskGraph


class Bomb(EmulatedStage):
    """Raises once it has run two steps."""

    def forward(self, task: rrfp.Task, inputs: tuple[rrfp.Payload, ...]) -> rrfp.Payload:
        self.runs = getattr(self, "runs", 0) + 1
        if self.runs == 10:
            raise ValueError("out of luck")
        return super().forward(task, inputs)


def main() -> None:
    torch.set_num_threads(1)
    place = rrfp.Topology.from_env()
    kind = Bomb if place.stage == 1 else EmulatedStage
    program = kind(TaskGraph.chain(place.stages), lambda task: 0.001, num_bytes=64)
    with rrfp.Pipeline(program, topology=place).blocking() as pipe:
        for _ in range(100):
            pipe.step(microbatches=4)


if __name__ == "__main__":
    (record(main) if "record" in sys.argv else main)()
