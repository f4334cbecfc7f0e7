"""A pipeline whose device breaks some time after a forward of the last stage, while all stages have work.

Arguments: the device, microseconds until it breaks, and the number of stages. The caller keeps all that it can get hold
of. Prints how many steps were complete, the error of the next one as JSON, and at its end "ended".
"""

from __future__ import annotations

import json
import sys

import torch
from gpu.failing import described
from gpu.stub.control import CudaStub
from torch import Tensor, nn

import rrfp
from benchmarks.gpu.target import Target, open_target
from rrfp.errors import PipelineAborted
from rrfp.lab.device_double import DoubleDevice

MICROBATCHES, BREAKS_IN, ROWS, WIDTH = 8, 18, 16, 64


class Scale(nn.Module):
    """Keeps its last inputs, as a module may."""

    def __init__(self, target: Target, breaks_after_us: int | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, device=target.where))
        self._target = target
        self._breaks_after_us = breaks_after_us
        self._forwards = 0
        self._kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Row by row."""
        self._forwards += 1
        self._kept = [*self._kept[-2:], x]
        if self._breaks_after_us is not None and self._forwards == BREAKS_IN:
            if isinstance(device := self._target.device, DoubleDevice):
                device.fail(after=1 + self._breaks_after_us // 100)
            else:
                CudaStub().break_device(after_us=self._breaks_after_us)
        return x * self.weight


def main(device: str, after_us: str, stages: str) -> None:
    """Run steps until one fails."""
    with open_target(device) as target:
        count = int(stages)
        modules = [Scale(target, int(after_us) if i == count - 1 else None) for i in range(count)]
        inputs = [torch.ones(ROWS, WIDTH, device=target.where) for _ in range(MICROBATCHES)]
        targets = [torch.zeros(ROWS, WIDTH, device=target.where) for _ in range(MICROBATCHES)]
        results: list[object] = []
        report: dict[str, object] = {}
        try:
            with rrfp.local(modules, loss_fn=nn.functional.mse_loss, **target.options).blocking() as pipe:
                while len(results) < 10:
                    results.append(pipe.step(inputs, targets))
        except PipelineAborted as error:
            report = described(error)
        problems = target.take_problems()
        report |= {"steps": len(results), "problems": problems}
    sys.stdout.write(json.dumps(report) + "\nended\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
