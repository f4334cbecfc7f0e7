"""One rank of the comparison, started by torchrun: both runtimes in one process, their methods alternating by step.

Rank 0 prints one line of JSON for each step. All ranks start a step at the same instant, agreed on beforehand, and it
takes until the last of them has returned from it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from benchmarks.against_torch.settings import JITTERS, METHODS, NUM_BYTES, RRFP_METHODS, Settings
from benchmarks.against_torch.sleeping import SleepingStage, loss_fn
from rrfp.compute.lanes.precise_sleep import sleep_until
from rrfp.core.topology import Topology
from rrfp.pipeline.api import Pipeline
from rrfp.pipeline.options import Options
from rrfp.trace.plain import to_plain
from rrfp.trace.spans import StepTrace

#: Between agreeing on a start and the start, in seconds.
LEAD_S = 0.02

#: Runs a step; returns the rank's trace, if the runtime has one.
Step = Callable[[], StepTrace | None]


def torch_step(name: str, module: SleepingStage, settings: Settings) -> Step:
    """A step of torch's schedule ``name``."""
    first, last = module.stage == 0, module.stage == settings.stages - 1
    stage = PipelineStage(module, module.stage, settings.stages, torch.device("cpu"))
    make = {"torch GPipe": ScheduleGPipe, "torch 1F1B": Schedule1F1B}[name]
    schedule = make(stage, settings.microbatches, loss_fn=loss_fn, scale_grads=False)
    inputs = (torch.zeros(settings.microbatches, 1),) if first else ()
    target = torch.zeros(settings.microbatches, 1) if last else None
    numbers = torch.arange(settings.microbatches)

    def step() -> None:
        schedule.step(*inputs, target=target, losses=[] if last else None, return_outputs=False, microbatch=numbers)

    return step


def rrfp_step(name: str, module: SleepingStage, settings: Settings, stack: ExitStack) -> Step:
    """A step of RRFP's method ``name``."""
    first, last = module.stage == 0, module.stage == settings.stages - 1
    options: Options = {"loss_fn": loss_fn, **RRFP_METHODS[name]}
    pipeline = Pipeline(module, topology=Topology.from_env(), **options)
    pipe = stack.enter_context(pipeline.blocking())
    rows = [torch.zeros(1, 1) for _ in range(settings.microbatches)]
    kwargs = [{"microbatch": torch.tensor([m])} for m in range(settings.microbatches)]

    def step() -> StepTrace:
        return pipe.step(rows if first else None, rows if last else None, kwargs=kwargs).trace

    return step


def timed(step: Step) -> tuple[float, StepTrace | None]:
    """Run ``step`` on all ranks from one instant on; returns the seconds until this rank had returned."""
    start = torch.tensor([time.monotonic() + LEAD_S], dtype=torch.float64)
    dist.broadcast(start, src=0)
    sleep_until(started := float(start))
    trace = step()
    return time.monotonic() - started, trace


def compare(settings: Settings, stack: ExitStack) -> None:
    """Run all methods to the end."""
    rank = dist.get_rank()
    module = SleepingStage(rank, settings.stages, NUM_BYTES)
    steps = {
        name: rrfp_step(name, module, settings, stack) if name in RRFP_METHODS else torch_step(name, module, settings)
        for name in METHODS
    }
    for number in range(settings.rounds + 1):
        turn = number % len(METHODS)
        for jitter in JITTERS if number else JITTERS[:1]:
            costs = settings.costs(number, jitter)
            for name in (*METHODS[turn:], *METHODS[:turn]):
                module.open_step(costs)
                seconds, trace = timed(steps[name])
                module.zero_grad()
                own = {
                    "seconds": seconds,
                    "held": module.peak_held,
                    "order": list(map(str, module.order)),
                    "trace": None if trace is None else to_plain(trace),
                }
                report(name, number, jitter, own)


def report(name: str, number: int, jitter: str, own: dict[str, Any]) -> None:
    """Tell the command how a step went."""
    rank = dist.get_rank()
    parts: list[Any] | None = [None] * dist.get_world_size() if rank == 0 else None
    dist.gather_object(own, parts)
    if parts is None:
        return
    line = {
        "method": name,
        "round": number,
        "jitter": jitter,
        "seconds": max(part["seconds"] for part in parts),
        "held": [part["held"] for part in parts],
        "order": [part["order"] for part in parts],
        "traces": [part["trace"] for part in parts if part["trace"] is not None],
    }
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Entry point under torchrun."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with ExitStack() as stack:
        compare(Settings.from_json(sys.argv[1]), stack)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
