"""What an exploration found. See `rrfp.sim.explore.search`."""

from __future__ import annotations

from dataclasses import dataclass

from rrfp.core.tasks import Task
from rrfp.core.waiting import wait_line


@dataclass(frozen=True, slots=True)
class Deadlock:
    """A state in which tasks are left and nothing can run.

    Attributes:
        trace: a sequence of tasks that leads there; all such sequences have one length, that of what has run.
        held: D of each stage.
        waits: for each stage, its first task that has not run, and why; empty where all have run.
    """

    trace: tuple[Task, ...]
    held: tuple[int, ...]
    waits: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"deadlock after {' '.join(map(str, self.trace))}"]
        for stage, (held, text) in enumerate(zip(self.held, self.waits, strict=True)):
            lines.append(f"  {wait_line(f'stage {stage} holds {held},', (text,) if text else ())}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Exploration:
    """What was found.

    Attributes:
        states: states visited, over all searches (up to renumbering of microbatches where they are alike).
        transitions: ways taken from one to the next.
        deadlocks: every state that cannot be left with tasks undone, nearest first.
        peak_held: the largest D of each stage in any state.
        peak_received: the most inputs from other stages that lay on each stage without a task having started to use
            them up.
        peak_buffered: the most forward inputs from other stages on each stage, counted until their backward (forward
            only: their forward) has run: the paper's "forward-ready" buffer.
    """

    states: int
    transitions: int
    deadlocks: tuple[Deadlock, ...]
    peak_held: tuple[int, ...]
    peak_received: tuple[int, ...]
    peak_buffered: tuple[int, ...]

    def __str__(self) -> str:
        head = (
            f"{self.states} states, {self.transitions} transitions, {len(self.deadlocks)} deadlocks; "
            f"largest D by stage: {' '.join(map(str, self.peak_held))}"
        )
        return "\n".join([head, *map(str, self.deadlocks[:1])])
