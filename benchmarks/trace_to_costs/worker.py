"""One rank, started by torchrun: trains with one method after the other, and saves the trace of the first.

Rank 0 prints a line of JSON for each measured step.
"""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor, nn

from benchmarks.trace_to_costs.settings import METHODS, WIDTH, Method, Settings
from rrfp.compute.program import StageProgram
from rrfp.compute.torch_stage import TorchStage
from rrfp.lab.emulated import PacedStage, table_durations
from rrfp.model.graph import TaskGraph
from rrfp.model.topology import Topology
from rrfp.pipeline.api import Pipeline


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Rows x width."""
        result: Tensor = x + self.narrow(torch.relu(self.widen(x)))
        return result


class Worker:
    """This rank.

    Args:
        settings: the run's.
        path: of the trace.
    """

    def __init__(self, settings: Settings, path: str) -> None:
        self._settings, self._path = settings, path
        self._place = Topology.from_env()
        torch.manual_seed(settings.seed)
        paced = settings.workload == "paced"
        self._blocks = nn.Sequential(*[Block() for _ in range(1 if paced else settings.layers(self._place.stage))])
        self._inputs = [torch.randn(settings.rows, WIDTH) for _ in range(settings.microbatches)]
        self._targets = [torch.zeros(settings.rows, WIDTH)] * settings.microbatches

    def run(self, method: Method, *, saves: bool) -> None:
        """All steps of one method, in a pipeline of its own."""
        settings, stage = self._settings, self._place.stage
        graph = TaskGraph.chain(settings.stages)
        program: StageProgram = TorchStage({stage: self._blocks}, graph, loss_fn=nn.functional.mse_loss)
        paced = PacedStage(program, table_durations(settings.costs(0)))
        if settings.workload == "paced":
            program = paced
        optimizer = torch.optim.SGD(self._blocks.parameters(), lr=1e-4)
        steps = settings.warm_up + settings.steps
        with Pipeline(program, topology=self._place, trace_steps=settings.steps, **method.options).blocking() as pipe:
            for number in range(steps):
                paced.durations = table_durations(settings.costs(number))
                result = pipe.step(
                    self._inputs if stage == 0 else None,
                    self._targets if stage == settings.stages - 1 else None,
                    microbatches=settings.microbatches,
                )
                optimizer.step()
                optimizer.zero_grad()
                if stage == 0 and number >= settings.warm_up:
                    print(json.dumps({"method": str(method), "seconds": result.seconds}), flush=True)
            if saves:
                pipe.save_trace(self._path)


def main() -> None:
    """Entry point under torchrun."""
    torch.set_num_threads(1)
    worker = Worker(Settings.from_json(sys.argv[1]), sys.argv[2])
    for number, method in enumerate(METHODS):
        worker.run(method, saves=number == 0)


if __name__ == "__main__":
    main()
