"""A rank's part of a comparison: its methods alternate by step, and rank 0 prints one line of JSON for each step.

All ranks start a step at the same instant, agreed on beforehand, and it takes until the last of them has returned from
it. Pipelines that wait for their turn send nothing.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.shared.clocks import Reading
from benchmarks.shared.comparison import Comparison, Turn
from benchmarks.shared.sleeping import Stages
from benchmarks.shared.tables import scaled
from rrfp.lab.emulated import sleep_until
from rrfp.pipeline.options import OptionArguments

#: Runs a step with so many microbatches' sizes, or none; returns what waits for the work that it has left behind.
Step = Callable[[Sequence[float] | None], Callable[[], object]]

#: Pipelines that wait for their turn are silent meanwhile; longer than any step.
SILENT: OptionArguments = {"heartbeat": 60.0, "patience": 600.0}

#: Between agreeing on a start and the start, in seconds.
_LEAD_S = 0.05

#: After a step, while its last messages are acknowledged: processor time of the step that takes no time of it.
_TRAIL_S = 0.05

#: The durations of a step that warms up, over a measured one's.
WARM_UP = 0.1


def run_turns(
    settings: Comparison,
    stages: Stages,
    steps: Mapping[str, Step],
    prepare: Callable[[Turn], None] = lambda turn: None,
) -> None:
    """Run all methods to the end; ``prepare`` is called before each step, outside its time."""
    is_warm = False
    for turn in settings.turns():
        if turn.number and not is_warm:
            is_warm = True
            gc.collect()
            gc.freeze()  # or every collection between steps looks at all that the systems have set up: a second each
        table, modules = settings.table(turn), stages.of(settings.METHODS[turn.method].form)
        prepare(turn)
        stages.log.open_step()
        for module in modules:
            module.open_step(table if turn.number else scaled(table, WARM_UP))
        own = timed(steps[turn.method], settings.sizes(turn))
        own["spans"] = [(str(span.task), span.start, span.end) for span in stages.log.spans]
        own["gradients"] = [float(module.weight.grad) for module in modules if module.weight.grad is not None]
        for module in modules:
            module.zero_grad()
        report(turn, own)


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


def report(turn: tuple[Any, ...], own: dict[str, Any]) -> None:
    """Tell the command how a step went."""
    parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(own, parts)
    if parts is not None:
        sys.stdout.write(json.dumps({"turn": turn, "ranks": parts}) + "\n")
        sys.stdout.flush()
