"""A pipeline whose last stage fails in one forward: prints the error of `step` as JSON, and ends.

Arguments: the device and the fault. In a process of its own, since a device assert makes CUDA unusable; under torchrun,
each stage in one. A device assert breaks the CUDA context of its process, so work of other stages in it fails with the
same error. By then the other stages have completed all that they run before the fault: only one task can be named.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from typing import Any

import torch
from gpu.models import DEMO, loss_fn
from torch import Tensor, nn

import rrfp
from benchmarks.gpu.target import Target, open_target
from rrfp.errors import PipelineAborted
from rrfp.lab.device_double import DoubleDevice

#: The last forward of the last stage; under `gpipe` every other stage has run its forwards, and no backward begins.
STAGES, MICROBATCH = 4, 3


class Faulty(nn.Module):
    """Passes its input on, and fails in the forward of one microbatch.

    Args:
        fault: ``"assert"``: a kernel reads out of bounds, which shows later; ``"memory"``: an allocation is too large.
        target: the device.
    """

    def __init__(self, fault: str, target: Target) -> None:
        super().__init__()
        self._fault = fault
        self._target = target
        self._calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Microbatches come in order."""
        self._calls += 1
        if self._calls != MICROBATCH + 1:
            return x
        if self._fault == "memory":
            self._use_up_memory()
        elif isinstance(device := self._target.device, DoubleDevice):
            device.fail()
        else:
            table = torch.zeros(4, device=x.device)
            x = x + table[torch.tensor([9], device=x.device)]
        return x

    def _use_up_memory(self) -> None:
        if not self._target.is_cuda:
            raise torch.OutOfMemoryError("the double has as much memory as its host: this error stands for a device's")
        torch.empty(2 * torch.cuda.get_device_properties(0).total_memory, dtype=torch.uint8, device=self._target.where)


def main(device: str, fault: str) -> None:
    """Run one step."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    stages = world if world > 1 else STAGES
    with open_target(device) as target:
        model = replace(DEMO[device], microbatches=MICROBATCH + 1)
        modules = model.build(target, stages)
        assert isinstance(modules[-1], nn.Sequential)
        modules[-1].insert(0, Faulty(fault, target))
        batch, options = model.batch(target, 0), {"loss_fn": loss_fn, "strict": "gpipe", **target.options}
        pipeline: Any = rrfp.local(modules, **options) if world == 1 else rrfp.Pipeline(modules[rank], **options)
        report: dict[str, object] = {"rank": rank}
        began = time.monotonic()
        try:
            with pipeline.blocking() as pipe:
                began = time.monotonic()
                pipe.step(*batch)
        except Exception as error:
            report["seconds"] = time.monotonic() - began
            report |= described(error)
        sys.stdout.write(json.dumps(report) + "\n")
        sys.stdout.flush()


def described(error: BaseException) -> dict[str, object]:
    """The error, the task that it names, and all notes of its causes."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    notes = [note for cause in causes for note in getattr(cause, "__notes__", [])]
    task = error.origin.task if isinstance(error, PipelineAborted) else None
    return {"error": type(error).__name__, "task": task, "text": str(error), "notes": notes}


if __name__ == "__main__":
    main(*sys.argv[1:])
