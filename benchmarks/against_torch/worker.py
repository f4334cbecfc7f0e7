"""One rank of the comparison, started by torchrun: both runtimes in one process, their methods alternating by step.

Rank 0 prints one line of JSON for each step. All ranks start a step at the same instant, agreed on beforehand, and it
takes until the last of them has returned from it. Pipelines that wait for their turn send nothing.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.against_torch.clocks import Reading
from benchmarks.against_torch.settings import METHODS, Settings, Turn
from benchmarks.against_torch.systems import Stages, Step, steps_of
from benchmarks.against_torch.tables import scaled
from rrfp.compute.lanes.precise_sleep import sleep_until
from rrfp.costs import microbatch_sizes

#: Between agreeing on a start and the start, in seconds.
_LEAD_S = 0.05

#: After a step, while its last messages are acknowledged: processor time of the step that takes no time of it.
_TRAIL_S = 0.05

#: The durations of a step that warms up, over a measured one's.
_WARM_UP = 0.1


def timed(step: Step, sizes: Sequence[float] | None) -> dict[str, Any]:
    """Run ``step`` on all ranks from one instant on; this rank's part of the report.

    The step takes until it returns. Work that it leaves behind counts as its processor time.
    """
    gc.collect()  # no method pays for another one's garbage
    dist.barrier()  # nor for the ranks that are still at it
    start = torch.tensor([time.monotonic() + _LEAD_S], dtype=torch.float64)
    dist.broadcast(start, src=0)
    before, opened = Reading.now(), time.monotonic()
    sleep_until(started := float(start))
    settle = step(sizes)
    returned = time.monotonic()
    settle()
    time.sleep(_TRAIL_S)
    after, read = Reading.now(), time.monotonic()
    return {
        "started": started,
        "returned": returned,
        "window": read - opened,
        "cpu": after.by_group(before),
        "machine": None if after.machine is None or before.machine is None else after.machine - before.machine,
    }


def compare(settings: Settings, stack: ExitStack) -> None:
    """Run all methods to the end."""
    rank = dist.get_rank()
    stages = Stages(rank, settings.stages)
    steps = steps_of(settings, rank, stages, stack)
    for turn in settings.turns():
        method, table = METHODS[turn.method], settings.table(turn)
        numbers = {"seed": settings.seed, "step": turn.number}
        sizes = microbatch_sizes(turn.cell.profile, settings.stages, settings.microbatches, **numbers)
        modules = stages.of(method.form)
        stages.log.open_step()
        for module in modules:
            module.open_step(table if turn.number else scaled(table, _WARM_UP))
        own = timed(steps[turn.method], sizes if method.has_sizes else None)
        own["spans"] = [(str(span.task), span.start, span.end) for span in stages.log.spans]
        own["gradients"] = [float(module.weight.grad) for module in modules if module.weight.grad is not None]
        for module in modules:
            module.zero_grad()
        report(turn, own)


def report(turn: Turn, own: dict[str, Any]) -> None:
    """Tell the command how a step went."""
    parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(own, parts)
    if parts is not None:
        sys.stdout.write(json.dumps({"turn": turn, "ranks": parts}) + "\n")
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
