"""Events of steps that never ran."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rrfp import Topology
from rrfp.callbacks import RunBegun, RunEnded, StageFigures, StepEnded
from rrfp.core.usage import Peaks
from rrfp.model.tasks import Mode
from rrfp.trace.breakdown import Breakdown

STEP = StepEnded(
    time=1000.0, mode=Mode.TRAIN, step=0, microbatches=4, sizes=None, replicas=2, loss=0.5, seconds=0.25, stages=()
)


def ended(step: int = 0, stages: int = 2, **changes: Any) -> StepEnded:
    """A step of 0.25 s in which each stage computed half of the time."""
    parts = Breakdown(0.25, 0.125, input=0.0625, memory=0.025, drained=0.0375)
    peaks = Peaks(3, 5 << 20)
    figures = tuple(
        StageFigures(stage, parts, peaks, {stage: peaks}, slots=8, sent_bytes=1 << 20, received_bytes=1 << 19)
        for stage in range(stages)
    )
    return replace(STEP, **{"step": step, "time": 1000.0 + step, "stages": figures, **changes})


def begun(rank: int = 0, stages: int = 2, step: int = 0) -> RunBegun:
    return RunBegun(1000.0, step, Topology(rank, stages), "hint bf, limit 2n")


RUN_ENDED = RunEnded(2000.0, 9, 0)
