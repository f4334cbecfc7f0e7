"""Writes docs/progress.svg: `rrfp.callbacks.Progress` after some steps of four stages in virtual time.

Times, memory and traffic are those of the emulated run; the losses are made up, since it computes none.

    PYTHONPATH=tests python tests/docs/progress_picture.py
"""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.notes import Notes
from rich.console import Console

import rrfp
from rrfp.callbacks import Progress, StepEnded
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Kind, Mode, Task
from rrfp.testing.clock import EmulatedStage, TimerLane, run_virtual

PICTURE = Path(__file__).parents[2] / "docs" / "progress.svg"
STAGES, STEPS, MICROBATCHES, WIDTH = 4, 400, 8, 104


def seconds(task: Task) -> float:
    """Uneven microbatches, and a last stage that has more to do."""
    size = 1 + (5 * task.microbatch % 7) / 4
    return 0.01 * size * (2 if task.kind is Kind.B else 1) * (1.3 if task.virtual_stage == STAGES - 1 else 1)


def steps() -> Iterator[StepEnded]:
    """Three training steps in the middle of a run, and an evaluation."""
    notes, lanes = Notes(), [TimerLane() for _ in range(STAGES)]
    programs = [EmulatedStage(TaskGraph.chain(STAGES), seconds, num_bytes=1 << 20, spend=lane.spend) for lane in lanes]
    options: Any = {"transport": "simulated", "lane": lanes.__getitem__, "limit": "n", "first_step": 117}

    async def run() -> None:
        async with rrfp.local(programs, loop="caller", callbacks=[notes], **options) as pipe:
            for _ in range(3):
                await pipe.step(microbatches=MICROBATCHES)

    run_virtual(run())
    for event in notes.of("step_ended"):
        loss = 1.2 + 3 * math.exp(-event.step / 80)
        yield replace(event, time=event.step * (event.seconds + 0.08), loss=loss)
    yield replace(event, mode=Mode.FORWARD, loss=loss + 0.1)


def picture() -> str:
    """The text of the file."""
    progress = Progress(STEPS, tokens=4096)
    for event in steps():
        (progress.step_ended if event.mode is Mode.TRAIN else progress.evaluation_ended)(event)
    console = Console(file=io.StringIO(), record=True, width=WIDTH, force_terminal=True)
    console.print(progress._view(WIDTH))
    return console.export_svg(title="rrfp.callbacks.Progress", unique_id="progress")


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
    sys.stdout.write(f"{PICTURE}\n")
