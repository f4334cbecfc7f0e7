"""Scripts for one core: events in, the exact instructions out."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rrfp import Hint
from rrfp.core import events as ev
from rrfp.core.event_history import EventHistory
from rrfp.core.group_step import GroupMembership
from rrfp.core.ready_set import ForcedOrder
from rrfp.core.stage_core import StageCore
from rrfp.hints.priorities import BackwardForward
from rrfp.memory.admission import Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Mode, StepId, Task
from rrfp.model.visits import Visits


class Script:
    """A core in its first step, and short forms of what it can be told. Tasks are written in their text form.

    Args:
        graph: the dependency graph.
        stage: the stage of the core.
        microbatches: M of the step that is opened at once; 0 opens none.
        mode: its mode.
        hint: BF where nothing else is said.
        limit: K or a Limit.
        group: the rank's group.
        in_order: forced orders.
        skipped: for each microbatch the virtual stages that it does not visit.
        history: keeps what the core is told.
    """

    def __init__(
        self,
        graph: TaskGraph,
        stage: int = 0,
        microbatches: int = 2,
        mode: Mode = Mode.TRAIN,
        *,
        hint: Hint | None = None,
        limit: Limit | int | None = None,
        group: GroupMembership | None = None,
        in_order: tuple[ForcedOrder, ...] = (),
        skipped: Sequence[Collection[int]] = (),
        history: EventHistory | None = None,
    ) -> None:
        limits = Limit(limit) if isinstance(limit, int) else limit
        self.core = StageCore(
            graph, stage, hint or BackwardForward(), limits, group=group, in_order=in_order, history=history
        )
        self.step = StepId(0, mode, microbatches)
        self.skipped = tuple(map(frozenset, skipped))
        #: What opening the first step caused.
        self.begun: list[ev.Instruction] = []
        if microbatches:
            self.begun = self.opened()

    def opened(self, step: StepId | None = None) -> list[ev.Instruction]:
        """The caller opens ``step``."""
        self.step = step or self.step
        number, mode, microbatches = self.step
        return self.told(ev.StepOpened(number, mode, microbatches, visits=Visits(microbatches, self.skipped)))

    def told(self, *events: ev.Event) -> list[ev.Instruction]:
        """All instructions that the events cause, in order."""
        return [instruction for event in events for instruction in self.core.apply(event)]

    def arrived(self, *tasks: str, step: StepId | None = None, consumed: int | None = None) -> list[ev.Instruction]:
        """Outputs of other stages come in."""
        return self.told(*(ev.Arrived(step or self.step, T(task), consumed=consumed) for task in tasks))

    def enqueued(self, *tasks: str) -> list[ev.Instruction]:
        """The lane takes the tasks."""
        return self.told(*(ev.Enqueued(T(task)) for task in tasks))

    def completed(self, *tasks: str, held: int = 0) -> list[ev.Instruction]:
        """The lane is done with the tasks."""
        return self.told(*(ev.Completed(T(task), held) for task in tasks))

    def ran(self, *tasks: str, held: int = 0) -> list[ev.Instruction]:
        """Each task is enqueued and completed before the next."""
        return [i for task in tasks for i in self.told(ev.Enqueued(T(task)), ev.Completed(T(task), held))]

    def consumed(self, peer: int, *tasks: str) -> list[ev.Instruction]:
        """Forward only: a successor is done with the outputs."""
        return self.told(*(ev.Consumed(self.step, peer, T(task)) for task in tasks))

    def released(self, peer: int, *tasks: str) -> list[ev.Instruction]:
        """The memory of sends is free."""
        return self.told(*(ev.SendReleased(T(task), peer) for task in tasks))

    @property
    def ready(self) -> str:
        """The ready set, in its own order."""
        return " ".join(map(str, self.core.ready))

    def decisions(self, count: int) -> str:
        """Run what the core decides, ``count`` times; a dash where it decides nothing."""
        chosen = []
        for _ in range(count):
            run = self.core.decide()
            chosen.append("-" if run is None else str(run.task))
            if run is not None:
                self.ran(str(run.task))
        return " ".join(chosen)


def T(text: str) -> Task:
    """The task of this text form."""
    return Task.parse(text)
