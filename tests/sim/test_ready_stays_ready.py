"""A ready task stays ready under every event but the `Enqueued` of another one: what offers rely on.

Watched on the real cores through random pipelines under every rule, with all that goes wrong in fault runs.
"""

from __future__ import annotations

from typing import Any

import pytest
from batches import batches
from core_script import T

from rrfp.arbiter.offers import may_offer
from rrfp.core import events as ev
from rrfp.core.stage_core import StageCore
from rrfp.hints.registry import create_hint
from rrfp.memory.admission import Limit
from rrfp.memory.rules import Staircase
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Mode, Task
from rrfp.testing.faults import make_scenario, run_scenario

NUM_SEEDS, QUICK = 3000, 300
BATCH = 300

#: Events after which the ready set may lack a task that it had: one is taken out of it, or its step is over.
TAKES_OUT = (ev.Enqueued, ev.StepOpened, ev.Aborted)

#: Events of a stage that waits for a forward before a backward: in few of these runs. See `core.test_pauses`.
WAITS = {ev.BegunReported, ev.PauseBegun, ev.PauseEnded}


class Watched(StageCore):
    """Keeps in `lost` what events wrongly made unready, in `seen` the kinds of those that came upon ready tasks."""

    lost: list[str]
    seen: set[type]

    def apply(self, event: ev.Event) -> tuple[ev.Instruction, ...]:
        before = set[Task]() if self.step is None or isinstance(event, TAKES_OUT) else set(self.ready)
        instructions = super().apply(event)
        if gone := before - set(self.ready):
            self.lost.append(f"{' '.join(map(str, sorted(gone)))} by {event}")
        if before:
            self.seen.add(type(event))
        return instructions


def watched(lost: list[str], seen: set[type]) -> type[StageCore]:
    return type("Watched", (Watched,), {"lost": lost, "seen": seen})


def opened(lost: list[str], graph: TaskGraph, limit: Limit, **options: Any) -> StageCore:
    """A watched core of stage 0 in a step of three microbatches."""
    core = watched(lost, set())(graph, 0, create_hint("bf"), limit, **options)
    core.apply(ev.StepOpened(0, Mode.TRAIN, 3))
    return core


@pytest.mark.parametrize("first", batches(NUM_SEEDS, BATCH, QUICK))
def test_only_the_start_of_another_task_makes_a_ready_task_unready(first: int) -> None:
    seen: set[type] = set()
    for seed in range(first, first + BATCH):
        lost: list[str] = []
        run = run_scenario(make_scenario(seed, alone=True), make_core=watched(lost, seen))
        assert not run.problems, f"make_scenario({seed}, alone=True): {run.problems[0]}"
        assert not lost, f"make_scenario({seed}, alone=True): {lost[0]}"
    assert seen - WAITS == {ev.Arrived, ev.Completed, ev.SendReleased, ev.Consumed, ev.ChunkReduced}


def test_the_watch_sees_a_rule_that_breaks_it() -> None:
    class Moody(Staircase):
        """Takes a slot when a task completes."""

        __slots__ = ()

        def complete(self, *args: Any, **options: Any) -> None:
            super().complete(*args, **options)
            self.held += 1

    lost: list[str] = []
    core = opened(lost, TaskGraph.chain(2), Limit(2), admission=Moody)
    core.apply(ev.Enqueued(T("F0@0")))
    core.apply(ev.Completed(T("F0@0")))
    assert [what.split(" by ")[0] for what in lost] == ["F1@0 F2@0"]


def test_under_a_byte_limit_a_completed_task_may_make_a_ready_one_unready_so_nothing_is_offered() -> None:
    lost: list[str] = []
    core = opened(lost, TaskGraph.chain(1, split=True), Limit(bytes=100))
    core.apply(ev.Enqueued(T("F0@0")))
    core.apply(ev.Completed(T("F0@0"), held=30))
    core.apply(ev.Enqueued(T("B0@0")))
    core.apply(ev.Completed(T("B0@0"), held=80))  # for W it keeps more than the forward had left
    assert [what.split(" by ")[0] for what in lost] == ["F1@0 F2@0"]
    assert not may_offer(core, 1)
