"""The oracle can fail: broken cores, each broken in one way, make the campaign fail, and it names the seed.

The cores are broken from outside, so that these tests hold whatever the inside looks like.
"""

from __future__ import annotations

from typing import Any

import pytest
from sim.fault_cases import output, scenario

from rrfp import Hint
from rrfp.core import events as ev
from rrfp.core.group_step import GroupMembership
from rrfp.core.stage_core import StageCore
from rrfp.errors import ProtocolError
from rrfp.lab.faults.faults import Lose
from rrfp.memory.admission import Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Kind, Mode, Task
from rrfp.testing.faults import Ending, run_campaign, run_scenario, run_seed

SEEDS = range(300)


class IgnoresDuplicates(StageCore):
    """What arrives again is dropped without a word."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._seen: set[tuple[int, Task]] = set()

    def apply(self, event: ev.Event) -> tuple[ev.Instruction, ...]:
        if isinstance(event, ev.Arrived):
            if (event.step.number, event.task) in self._seen:
                return ()
            self._seen.add((event.step.number, event.task))
        return super().apply(event)


class TakesAnyStep(StageCore):
    """Takes what comes for what it waits for, of whichever step it is, the first time."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._number = -1
        self._seen: set[tuple[int, Task]] = set()

    def apply(self, event: ev.Event) -> tuple[ev.Instruction, ...]:
        if isinstance(event, ev.StepOpened):
            self._number = event.step
            self._id: Any = (event.step, event.mode, event.microbatches)
        if isinstance(event, ev.Arrived) and event.step.number <= self._number:
            if (self._number, event.task) in self._seen:
                return ()
            self._seen.add((self._number, event.task))
            event = ev.Arrived(type(event.step)(*self._id), event.task)
        return super().apply(event)


class IgnoresItsLimit(StageCore):
    """Holds whatever comes."""

    def __init__(self, graph: TaskGraph, stage: int, hint: Hint, limit: Limit, **options: Any) -> None:
        super().__init__(graph, stage, hint, Limit(), **options)


class WaitsForNoGradient(StageCore):
    """Takes a gradient for arrived as soon as its own forward is done."""

    def apply(self, event: ev.Event) -> tuple[ev.Instruction, ...]:
        if isinstance(event, ev.Arrived) and event.task.kind is Kind.B:
            return ()
        instructions = super().apply(event)
        if isinstance(event, ev.Completed) and event.task.kind is Kind.F and self.view.mode is Mode.TRAIN:
            for w in self.graph.successors[event.task.virtual_stage]:
                if self.graph.placement.stage_of(w) != self.stage:
                    gradient = Task(Kind.B, event.task.microbatch, w)
                    instructions += super().apply(ev.Arrived(self._step.id, gradient))  # type: ignore[union-attr]
        return instructions


class GoesOnWhenAborted(StageCore):
    """Does not care about failures elsewhere."""

    def apply(self, event: ev.Event) -> tuple[ev.Instruction, ...]:
        return () if isinstance(event, ev.Aborted) else super().apply(event)


class NamesNothing(StageCore):
    """Refuses what it must, and says nothing of it."""

    def apply(self, event: ev.Event) -> tuple[ev.Instruction, ...]:
        try:
            return super().apply(event)
        except ProtocolError:
            raise ProtocolError("something is wrong") from None


class Stumbles(StageCore):
    """Meets what it must refuse with an exception of no name."""

    def apply(self, event: ev.Event) -> tuple[ev.Instruction, ...]:
        try:
            return super().apply(event)
        except ProtocolError as error:
            raise KeyError("B0@1") from error


class RefusesTooMuch(StageCore):
    """Takes a message for a second one that is none."""

    def apply(self, event: ev.Event) -> tuple[ev.Instruction, ...]:
        if isinstance(event, ev.Arrived) and event.task.microbatch == 3:
            raise ProtocolError(f"{event.task} arrived twice")
        return super().apply(event)


class FallsAsleep(StageCore):
    """Decides nothing any more after three tasks."""

    def decide(self) -> ev.Run | ev.Idle | None:
        return None if self.ready and self.view.num_enqueued_total >= 3 else super().decide()


class DropsTooEarly(StageCore):
    """Says that a forward's output is of no further use as soon as it is there."""

    def apply(self, event: ev.Event) -> tuple[ev.Instruction, ...]:
        instructions = super().apply(event)
        is_forward = isinstance(event, ev.Completed) and event.task.kind is Kind.F
        return (ev.Release(event.task), *instructions) if is_forward else instructions  # type: ignore[union-attr]


class TakesGapsInItsLog(StageCore):
    """Looks at no number of its leader's log."""

    def apply(self, event: ev.Event) -> tuple[ev.Instruction, ...]:
        if isinstance(event, ev.Ordered) and self._step is not None and event.step == self._step.id:
            log = self._step.group.log
            event = ev.Ordered(event.step, len(log._entries), event.task)
        return super().apply(event)


class IgnoresReports(StageCore):
    """Leads, and waits for nobody."""

    def __init__(self, *args: Any, group: GroupMembership | None = None, **options: Any) -> None:
        super().__init__(*args, group=group, **options)
        self._leads = self.group.num_followers > 0
        if self._leads:
            self.group = Alone(0, self.group.size)

    def apply(self, event: ev.Event) -> tuple[ev.Instruction, ...]:
        return () if self._leads and isinstance(event, ev.ReadyReported) else super().apply(event)


class Alone(GroupMembership):
    """A group that no report comes from, though all of it runs the log."""

    @property
    def num_followers(self) -> int:
        return 0


class RunsItsOwnOrder(StageCore):
    """Follows, and runs the last entry of the log that it can."""

    def decide(self) -> ev.Run | ev.Idle | None:
        if not self.group.follows or self._step is None or not self._step.group.pending():
            return super().decide()
        log = self._step.group.log
        for task in reversed(log.pending()):
            if task in self.ready:
                log._entries.remove(task)
                log._entries.insert(log._next, task)
                return ev.Run(task)
        return None


@pytest.mark.parametrize(
    ("broken", "objection"),
    [
        (TakesGapsInItsLog, "which overtook another message, or that was lost"),
        (IgnoresReports, ", and stage "),
        (RunsItsOwnOrder, "where others of its group run"),
        (IgnoresDuplicates, "which arrived twice"),
        (TakesAnyStep, "which belongs to another step"),
        (TakesAnyStep, "computed a wrong value in"),
        (TakesAnyStep, "has a wrong gradient on virtual stage"),
        (IgnoresItsLimit, "the most allowed is"),
        (WaitsForNoGradient, "ran without B"),
        (GoesOnWhenAborted, "wants to run"),
        (NamesNothing, "does not name"),
        (Stumbles, "it must not end crashed: KeyError"),
        (RefusesTooMuch, "which keeps the contract"),
        (FallsAsleep, "it stalled, and no message was lost"),
        (DropsTooEarly, "its output was dropped"),
    ],
)
def test_a_broken_core_is_found_and_the_objection_says_how(broken: type[StageCore], objection: str) -> None:
    problems: list[str] = []
    for seed in SEEDS:
        problems += run_seed(seed, make_core=broken).problems
        if any(objection in what for what in problems):
            return
    raise AssertionError(problems[:5])


@pytest.mark.parametrize("broken", [IgnoresDuplicates])
def test_the_campaign_names_the_seed_and_that_seed_fails_again(broken: type[StageCore]) -> None:
    failed = run_campaign(SEEDS, make_core=broken).failed
    assert len(failed) > 5
    seed, problem = failed[0]
    assert run_seed(seed, make_core=broken).problems[0] == problem
    assert run_seed(seed).problems == ()


def test_a_message_fault_that_never_took_effect_is_found() -> None:
    run = run_scenario(scenario(Lose(output("F7@0", 0, 1))))
    assert run.ending is Ending.FINISHED
    assert "it finished, and F7@0 from stage 0 to stage 1 in step 0 was never sent" in run.problems
