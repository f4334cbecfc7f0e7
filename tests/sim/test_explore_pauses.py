"""Every order in which things can happen to small pipelines that idle by choice: none is stuck, and all tasks run.

The explorer of `rrfp.lab.explore` knows no hints, as a wait that ends by itself is one more delay to it. Here the waits
are explored as such, on the real cores of all stages: at any moment any output or report on its way arrives
(reports may be late, or in any order), any wait ends, and any stage decides: it runs a task at one go, or where
its core prefers to wait, the wait begins or is declined. What comes while a task runs changes no decision before its
end.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from batches import long

from rrfp import Hint, View
from rrfp.core import events as ev
from rrfp.core.stage_core import StageCore
from rrfp.hints.priorities import BackwardForward, ForwardBackward
from rrfp.hints.slot_aware import SlotAware
from rrfp.memory.admission import Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Kind, Mode, StepId, Task


class Patient(BackwardForward):
    """Prefers any wait to any backward."""

    def reports_begun(self, view: View) -> bool:
        return True

    def awaits(self, task: Task, view: View) -> bool:
        return True


class PatientToo(ForwardBackward):
    """The same on another order."""

    reports_begun, awaits = Patient.reports_begun, Patient.awaits


class State:
    """All cores of a pipeline in their step, and the messages on their way."""

    def __init__(self, hint: type[Hint], stages: int, microbatches: int, limit: int | str, split: bool) -> None:
        graph = TaskGraph.chain(stages, split=split)
        self.step = StepId(0, Mode.TRAIN, microbatches)
        self.num_tasks = stages * microbatches * (3 if split else 2)
        limits = [Limit.resolve(limit, stage, stages) for stage in range(stages)]
        self.graph = graph
        self.cores = [StageCore(graph, stage, hint(), each) for stage, each in enumerate(limits)]
        self.mail: Counter[tuple[int, ev.Arrived | ev.BegunReported]] = Counter()
        self.waits = 0
        for core in self.cores:
            core.apply(ev.StepOpened(0, Mode.TRAIN, microbatches))

    def key(self) -> object:
        """What decides all that can follow."""
        return tuple(map(_core_key, self.cores)), frozenset(self.mail.items())

    @property
    def num_done(self) -> int:
        """Tasks that have run."""
        return sum(core.step.num_enqueued for core in self.cores if core.step is not None)

    def apply(self, stage: int, event: ev.Event) -> None:
        """``event`` happens on ``stage``; what it asks for is sent or done."""
        for instruction in self.cores[stage].apply(event):
            match instruction:
                case ev.Send(task, peer, consumed):
                    self.mail[peer, ev.Arrived(self.step, task, consumed=consumed)] += 1
                    self.apply(stage, ev.SendReleased(task, peer))
                case ev.ReportBegun(task, peer, seconds):
                    self.mail[peer, ev.BegunReported(self.step, task, seconds)] += 1
                case ev.ReduceChunk(virtual_stage):
                    self.apply(stage, ev.ChunkReduced(virtual_stage))

    def moves(self) -> Iterator[tuple[int, ev.Event]]:
        """All that can happen next."""
        yield from self.mail
        for stage, core in enumerate(self.cores):
            decision = core.decide()
            if core.is_pausing:
                yield stage, ev.PauseEnded()
            elif isinstance(decision, ev.Idle):
                yield stage, ev.PauseBegun()
                yield stage, ev.PauseEnded()
            if isinstance(decision, ev.Run):
                yield stage, ev.Enqueued(decision.task)

    def after(self, stage: int, event: ev.Event) -> State:
        """The state behind a move."""
        following = copy.copy(self)
        following.mail, following.cores = self.mail.copy(), self.cores.copy()
        following.cores[stage] = copy.deepcopy(self.cores[stage], {id(self.graph): self.graph})
        if isinstance(event, ev.Arrived | ev.BegunReported):
            following.mail[stage, event] -= 1
            following.mail = +following.mail
        following.apply(stage, event)
        if isinstance(event, ev.Enqueued):
            seconds = 2.0 if event.task.kind is Kind.B else 1.0
            following.apply(stage, ev.Completed(event.task, seconds=seconds))
        return following


class Explored(NamedTuple):
    """What a search has met."""

    states: int
    waits: int
    stuck: list[object]


def _core_key(core: StageCore) -> object:
    step = core.step
    assert step is not None
    pauses = step.pauses.is_on, step.pauses._is_spent, step.pauses._begun
    ready = tuple(core.ready), tuple(core.ready.gated())
    counts = tuple((kind, tuple(step.enqueued[kind])) for kind in Kind)
    available = tuple(bytes(state.is_available) for rows in step.states.read.values() for state in rows.values())
    return counts, step.last_kind, ready, available, pauses, frozenset(step.consumed_by.items())


def explore(start: State) -> Explored:
    """Every state that can follow."""
    seen, queue, waits = {start.key()}, [start], 0
    stuck: list[object] = []
    while queue:
        state = queue.pop()
        moves = list(state.moves())
        waits += sum(isinstance(event, ev.PauseBegun) for _, event in moves)
        # Reports alone change nothing for a stage that has run all of its tasks.
        if all(isinstance(event, ev.BegunReported) for _, event in moves) and state.num_done < state.num_tasks:
            stuck.append([core.ready for core in state.cores])
        for move in moves:
            following = state.after(*move)
            if (key := following.key()) not in seen:
                seen.add(key)
                queue.append(following)
    return Explored(len(seen), waits, stuck)


CASES = [
    (Patient, 2, 3, "1f1b", False),
    (PatientToo, 2, 3, 2, False),
    (Patient, 2, 3, 1, True),
    (Patient, 2, 3, "1f1b", True),
    long(Patient, 2, 3, 2, True),
    long(Patient, 2, 4, 2, False),
    long(SlotAware, 3, 3, "1f1b", False),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("hint", "stages", "microbatches", "limit", "split"), CASES)
def test_no_order_of_events_is_stuck(
    hint: type[Hint], stages: int, microbatches: int, limit: int | str, split: bool
) -> None:
    explored = explore(State(hint, stages, microbatches, limit, split))
    assert explored.stuck == []
    assert (explored.waits > 0) == (limit != 1)  # on one slot no forward can come before the backward
