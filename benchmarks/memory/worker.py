"""One rank of the memory benchmark, started by torchrun: one method after the other, in one process.

Every rank prints a line of JSON for each measured step. The process is measured by the kernel's own mark of the largest
resident size, which is set back before a step.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.memory.settings import BASELINE, NARROW, OWN_BYTES, PARTS, SLOWER, WIDE, Method, Settings
from rrfp.compute.torch_stage import TorchStage
from rrfp.lab.emulated import Durations, PacedStage, table_durations
from rrfp.model.graph import TaskGraph
from rrfp.model.topology import Topology
from rrfp.pipeline.api import Pipeline
from rrfp.runtime.steps.result import StepResult

_STATUS, _SET_BACK = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Part(nn.Module):
    """Narrow rows to wide ones, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(NARROW, WIDE), nn.Linear(WIDE, NARROW)

    def forward(self, x: Tensor) -> Tensor:
        """Rows x narrow; kept for backward are the input and one wide activation."""
        result: Tensor = self.narrow(torch.relu_(self.widen(x)))
        return result


class Process:
    """How much this process grows."""

    def __init__(self) -> None:
        gc.collect()  # or what an earlier pipeline left might go in the middle of the step
        _SET_BACK.write_text("5")  # the largest resident size becomes the current one
        self._before = _status("VmRSS")

    def grown(self) -> int:
        """Bytes by which it was larger since then, at most."""
        return max(0, _status("VmHWM") - self._before)


def _status(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


class Worker:
    """This rank.

    Args:
        settings: the run's.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._place = Topology.from_env()
        torch.manual_seed(settings.seed)
        #: What each method held by stage, by its name and limit.
        self._held_bytes: dict[tuple[str, str], Sequence[int]] = {}

    def run(self, method: Method) -> None:
        """All steps of one method, in a pipeline of its own. The first is neither paced nor measured."""
        settings, place = self._settings, self._place
        graph = TaskGraph.chain(settings.stages, chunks=method.chunks, layout=method.placement, split=method.split)
        parts = PARTS // method.chunks
        modules: dict[int, nn.Module] = {
            v: nn.Sequential(*[Part() for _ in range(parts)]) for v in graph.placement.virtual_stages(place.stage)
        }
        program = TorchStage(modules, graph, loss_fn=nn.functional.mse_loss)
        paced = PacedStage(program, lambda task: 0.0)
        with Pipeline(paced, topology=place, **method.options(self._most_bytes(method))).blocking() as pipe:
            for number in range(1 + settings.rounds):
                table = max(0, number - 1)  # the step before the measured ones has the first one's microbatches
                rows = [torch.randn(count, NARROW) for count in settings.rows_of(table)]
                targets = [torch.zeros_like(each) for each in rows] if self._has_losses(graph) else None
                inputs = rows if place.stage == 0 else None
                del rows
                process = Process()
                result = pipe.step(inputs, targets, microbatches=settings.microbatches, sizes=settings.sizes(table))
                if number:
                    self._say(method, number, result, process.grown(), paced.overrun_share)
                paced.durations = _slowed(table_durations(settings.costs(number, method)))
                paced.reset_overrun()
        self._held_bytes[method.name, method.limit] = result.peak_bytes

    def _most_bytes(self, method: Method) -> int:
        """The limit on this rank's bytes, where ``method`` has one: of the last step of another method."""
        if method.limit == OWN_BYTES:
            return self._held_bytes[method.name, "n"][self._place.stage]
        return max(self._held_bytes.get((BASELINE, ""), (1,)))

    def _has_losses(self, graph: TaskGraph) -> bool:
        return any(not graph.successors[v] for v in graph.placement.virtual_stages(self._place.stage))

    def _say(self, method: Method, number: int, result: StepResult, grown: int, overrun: float) -> None:
        peaks = result.peaks[self._place.stage]
        line = {
            "name": method.name,
            "limit": method.limit,
            "round": number,
            "stage": self._place.stage,
            "seconds": result.seconds,
            "held": peaks.held,
            "held_bytes": peaks.num_bytes,
            "received_bytes": peaks.received_bytes,
            "grown_bytes": grown,
            "overrun": overrun,
        }
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


def _slowed(durations: Durations) -> Durations:
    return lambda task: SLOWER * durations(task)


def main() -> None:
    """Entry point under torchrun."""
    torch.set_num_threads(1)
    settings = Settings.from_json(sys.argv[1])
    worker = Worker(settings)
    for method in settings.methods:
        worker.run(method)


if __name__ == "__main__":
    main()
