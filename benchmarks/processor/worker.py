"""One rank of the comparison of processor time; prints a line of JSON for each round of each system."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

import rrfp
from benchmarks.processor.settings import LANE, LOOP, OTHER, PIPELINE, SCHEDULE, TORCH, Case
from rrfp.integrations.torch import ScheduleRRFP

Step = Callable[[], object]


class Scale(nn.Module):
    """Multiplies by one parameter: next to no work, so that what a task costs is the runtime's."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Reads the output once."""
    return output.mean()


class Rank:
    """The systems on one rank, each with modules of its own."""

    def __init__(self, case: Case, stack: ExitStack) -> None:
        self._case = case
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._is_first, self._is_last = self._rank == 0, self._rank == self._ranks - 1
        self._inputs = torch.zeros(case.microbatches, case.elements)
        self._targets = torch.zeros(case.microbatches, 1)
        self.steps: dict[str, Step] = {
            TORCH: self._with_torch(),
            SCHEDULE: self._with_schedule(stack),
            PIPELINE: self._with_pipeline(stack),
        }

    @property
    def _limit(self) -> str:
        return "1f1b" if self._case.chunks == 1 else "n"

    def _stages(self) -> list[PipelineStage]:
        total = self._ranks * self._case.chunks
        indices = range(self._rank, total, self._ranks)
        return [PipelineStage(Scale(), index, total, torch.device("cpu")) for index in indices]

    def _step_of(self, schedule: Any) -> Step:
        arguments = (self._inputs,) if self._is_first else ()

        def step() -> object:
            losses: dict[str, Any] = {"target": self._targets, "losses": []} if self._is_last else {}
            return schedule.step(*arguments, return_outputs=False, **losses)

        return step

    def _with_torch(self) -> Step:
        stages, count = self._stages(), self._case.microbatches
        if len(stages) == 1:
            return self._step_of(Schedule1F1B(stages[0], count, loss_of, scale_grads=False))
        return self._step_of(ScheduleInterleaved1F1B([*stages], count, loss_of, scale_grads=False))

    def _with_schedule(self, stack: ExitStack) -> Step:
        schedule = ScheduleRRFP(self._stages(), self._case.microbatches, loss_of, scale_grads=False, limit=self._limit)
        stack.callback(schedule.close)
        return self._step_of(schedule)

    def _with_pipeline(self, stack: ExitStack) -> Step:
        modules = [Scale() for _ in range(self._case.chunks)]
        part = modules if len(modules) > 1 else modules[0]
        pipe = stack.enter_context(rrfp.Pipeline(part, loss_fn=loss_of, limit=self._limit))
        inputs = list(self._inputs.tensor_split(self._case.microbatches)) if self._is_first else None
        targets = list(self._targets.tensor_split(self._case.microbatches)) if self._is_last else None
        return lambda: pipe.step(inputs, targets, microbatches=self._case.microbatches)


def _thread_seconds() -> dict[int, float]:
    """Processor seconds of each thread of this process."""
    seconds = {}
    for folder in Path("/proc/self/task").iterdir():
        try:
            fields = (folder / "schedstat").read_text().split()
        except OSError:  # it has ended
            continue
        seconds[int(folder.name)] = int(fields[0]) * 1e-9
    return seconds


def _by_role(before: dict[int, float], after: dict[int, float]) -> dict[str, float]:
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    roles: dict[str, float] = defaultdict(float)
    for thread, seconds in after.items():
        name = names.get(thread, "")
        is_loop = name.startswith("rrfp-") and name.removeprefix("rrfp-").isdigit()
        role = LOOP if is_loop else LANE if name.startswith("rrfp-lane") else OTHER
        roles[role] += seconds - before.get(thread, 0.0)
    return dict(roles)


def main(case: Case) -> None:
    """Measure all systems in turns."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with ExitStack() as stack:
        rank = Rank(case, stack)
        for _ in range(case.warm_up):
            for step in rank.steps.values():
                step()
        tasks = 2 * case.microbatches * case.chunks * case.steps
        for _ in range(case.rounds):
            for system, step in rank.steps.items():
                dist.barrier()
                before, begin, wall = _thread_seconds(), time.process_time(), time.perf_counter()
                for _ in range(case.steps):
                    step()
                used, wall = time.process_time() - begin, time.perf_counter() - wall
                roles = _by_role(before, _thread_seconds())
                if dist.get_rank() == 0:
                    seconds = {role: each / tasks for role, each in roles.items()}
                    line = {"system": system, "used": used / tasks, "wall": wall / tasks, "roles": seconds}
                    print(json.dumps(line), flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Case(**json.loads(sys.argv[1])))
