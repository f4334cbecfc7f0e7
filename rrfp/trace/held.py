"""How much each stage held at every moment of a step, from the spans alone."""

from collections import Counter
from dataclasses import dataclass

from rrfp.model.tasks import KINDS
from rrfp.trace.spans import StepTrace


@dataclass(frozen=True, slots=True)
class Level:
    """The chunk tasks that a stage held from ``time`` on, in seconds."""

    time: float
    held: int


def held_levels(trace: StepTrace, stage: int) -> list[Level]:
    """D of ``stage`` over a step: a level for each change."""
    # A chunk task is held from the start of its F to the end of its last task. At one instant ends come first.
    changes: Counter[tuple[float, int]] = Counter()
    ends: dict[tuple[int, int], float] = {}
    # A trace that lost its oldest spans may lack the F.
    started: set[tuple[int, int]] = set()
    for span in trace.tasks:
        if span.stage == stage:
            key = (span.task.microbatch, span.task.virtual_stage)
            ends[key] = max(span.end, ends.get(key, span.end))
            if KINDS[span.task.kind].takes_slot:
                changes[span.start, 1] += 1
                started.add(key)
    for key in started:
        changes[ends[key], -1] += 1
    levels: list[Level] = []
    held = 0
    for (time, sign), count in sorted(changes.items()):
        held += sign * count
        levels.append(Level(time, held))
    return levels


def peak_held(trace: StepTrace, stage: int) -> int:
    return max((level.held for level in held_levels(trace, stage)), default=0)
