"""One rank of two: trains modules with and without activation checkpointing, and saves the trace of each job.

Arguments: a folder, then jobs: the stages that checkpoint, such as ``0``, ``0,1`` or ``none``; or the file of a plan,
which says what they are. Rank 0 prints the most bytes that each stage held in the last step of a job, a line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rrfp

STEPS, MICROBATCHES, ROWS, WIDTH, LAYERS = 7, 6, 64, 32, 4

#: Seconds of a layer's forward; backward takes twice that.
FORWARD_S = 0.001


class Work(torch.autograd.Function):
    """Takes the time of an accelerator, which needs no core."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(2 * FORWARD_S)
        return gradient


class Layer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        worked: Tensor = Work.apply(super().forward(x))  # type: ignore[no-untyped-call]
        return worked.tanh()


class Stage(nn.Sequential):
    def __init__(self, *, recomputes: bool) -> None:
        super().__init__(*(Layer(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        whole: Any = super().forward
        y: Tensor = checkpoint(whole, x, use_reentrant=False) if self.recomputes else whole(x)
        return y


def run(folder: Path, number: int, job: str, topology: rrfp.Topology) -> None:
    """All steps of one job."""
    options: dict[str, Any] = {"limit": "n"}
    if job.endswith(".json"):
        options = {"plan": job}
        stages = json.loads(Path(job).read_text())["plan"]["recompute"]
    else:
        stages = [] if job == "none" else [int(stage) for stage in job.split(",")]
    batch = [torch.randn(ROWS, WIDTH) for _ in range(MICROBATCHES)]
    module = Stage(recomputes=topology.stage in stages)
    with rrfp.Pipeline(module, topology=topology, loss_fn=nn.functional.mse_loss, **options) as pipe:
        for _ in range(STEPS):
            result = pipe.step(batch, batch)
        pipe.save_trace(folder / f"{number}.json")
        if topology.stage == 0:
            sys.stdout.write(json.dumps({"peak_bytes": result.peak_bytes}) + "\n")


def main() -> None:
    """Entry point under torchrun's variables."""
    folder, *jobs = sys.argv[1:]
    topology = rrfp.Topology.from_env()
    for number, job in enumerate(jobs):
        run(Path(folder), number, job, topology)


if __name__ == "__main__":
    main()
