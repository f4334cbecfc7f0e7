"""Draws the picture of `rrfp top` on docs/stuck.md: ``python tests/docs/top_picture.py docs/top.svg``.

The job runs in virtual time, so that the picture is the same every time.
"""

from __future__ import annotations

import asyncio
import io
import re
import sys
from pathlib import Path

from rich.console import Console

import rrfp
from rrfp.commands.top import rows, table_of
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import B, Task
from rrfp.runtime.stall.status import JobStatus
from rrfp.runtime.status_socket import JobReport
from rrfp.testing.clock import EmulatedStage, SimulatedTransport, TimerLane, run_virtual

STAGES, MICROBATCHES, STEPS = 4, 16, 5
LOOKS_AT_S = (1.0, 2.0)
WIDTH = 112


def length(microbatch: int) -> int:
    """Of uneven microbatches, of which every fifth is long."""
    return 3 if microbatch % 5 == 4 else 1


def seconds(task: Task) -> float:
    return 0.004 * length(task.microbatch) * (2 if task.kind is B else 1) * (1 + 0.1 * task.virtual_stage)


def held(microbatch: int, virtual_stage: int) -> int:
    return 24 * 2**20 * length(microbatch)


async def look() -> tuple[JobReport, JobStatus]:
    """A look at the job, and the survey of the look before."""
    lanes = [TimerLane() for _ in range(STAGES)]
    graph = TaskGraph.chain(STAGES)
    programs = [EmulatedStage(graph, seconds, num_bytes=1 << 20, spend=lane.spend, held=held) for lane in lanes]
    async with rrfp.local(
        programs, loop="caller", transport=SimulatedTransport, lane=lanes.__getitem__, first_step=1200
    ) as pipe:
        surveys: list[JobStatus] = []

        async def survey(at: float) -> None:
            await asyncio.sleep(at)
            surveys.append(await pipe._session._runners[0].health.query.ask())

        looks = [asyncio.create_task(survey(at)) for at in LOOKS_AT_S]
        while not all(each.done() for each in looks):
            await pipe.step(microbatches=MICROBATCHES)
    before, now = surveys
    return JobReport(4711, str(pipe._session.ranks), now), before


def picture() -> str:
    """The SVG, which loads no font from anywhere."""
    report, before = run_virtual(look())
    assert report.survey is not None
    console = Console(record=True, file=io.StringIO(), width=WIDTH, force_terminal=True)
    console.print(table_of(report, rows(report.survey, before), WIDTH))
    return re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="rrfp top"), flags=re.DOTALL)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(picture())
