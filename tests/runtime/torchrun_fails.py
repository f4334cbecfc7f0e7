"""A user's program under torchrun that fails in one of several ways. With "record" torchrun gets error files.

- ``raise``, ``kill``: stage 1 does so in its third step;
- ``refuse``, ``start``: stage 1 has an option that it refuses at once, or when it starts;
- ``misspelt``, ``insecure``, ``differ``: all ranks raise the same, at once, when they start, or once they have met.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import record

import rrfp
from rrfp.lab.emulated import EmulatedStage
from rrfp.model.graph import TaskGraph


class Bomb(EmulatedStage):
    """Goes off once it has run two steps."""

    def forward(self, task: rrfp.Task, inputs: tuple[rrfp.Payload, ...]) -> rrfp.Payload:
        self.runs = getattr(self, "runs", 0) + 1
        if self.runs == 10 and "kill" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.runs == 10 and "raise" in sys.argv:
            raise ValueError("out of luck")
        return super().forward(task, inputs)


class Refusing(rrfp.Hint):
    """A hint that cannot be made."""

    def __init__(self) -> None:
        raise rrfp.ConfigError("its file is missing")

    def choose(self, ready: rrfp.ReadySet, view: rrfp.View) -> rrfp.Task:
        return next(iter(ready))


def options(stage: int) -> dict[str, Any]:
    """Of the pipeline on ``stage``."""
    if "insecure" in sys.argv:  # as on several hosts
        os.environ["LOCAL_WORLD_SIZE"] = "1"
        os.environ.pop("RRFP_SECRET", None)
        return {"transport": "zmq"}
    if "misspelt" in sys.argv:
        return {"hint": "slot-awar"}
    if "differ" in sys.argv:
        return {"seed": stage}
    if "refuse" in sys.argv and stage == 1:
        return {"seed": 0.5}
    if "start" in sys.argv:
        return {"hint": Refusing if stage == 1 else "bf"}
    return {}


def main() -> None:
    torch.set_num_threads(1)
    settings = options(rrfp.Topology.from_env().stage)
    place = rrfp.Topology.from_env()
    kind = Bomb if place.stage == 1 else EmulatedStage
    program = kind(TaskGraph.chain(place.stages), lambda task: 0.001, num_bytes=64)
    with rrfp.Pipeline(program, topology=place, **settings).blocking() as pipe:
        for _ in range(100):
            pipe.step(microbatches=4)


if __name__ == "__main__":
    (record(main) if "record" in sys.argv else main)()
