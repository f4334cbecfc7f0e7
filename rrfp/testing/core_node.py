"""One rank of `rrfp.testing.core_network`: its core, its lane, and what it must satisfy, counted anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rrfp.core import events as ev
from rrfp.core.stage_core import StageCore
from rrfp.core.tasks import Kind, Mode, StepId, Task

#: What the network does for a rank: most of its core's instructions, opening its next step, telling what tasks held.
Followed = ev.Send | ev.Credit | ev.ReduceChunk | ev.ReportReady | ev.Order | ev.StepOpened | ev.Completed


class CoreNode:
    """See the module's docstring.

    Args:
        core: the rank's.
        num_bytes: what a microbatch holds after a task.
        follow: does what the rank asks for.

    Attributes:
        orders: for each step, the tasks in the order in which they were enqueued.
        num_opened: steps begun.
        num_finished: steps done.
        num_running: tasks enqueued and not complete.
        is_idle: whether there is nothing to decide until something happens.
        most_bytes: the most bytes held after any task.
    """

    def __init__(
        self,
        core: StageCore,
        num_bytes: Callable[[Task], int],
        follow: Callable[[CoreNode, StepId, Followed], None],
    ) -> None:
        self.core = core
        self.orders: list[list[Task]] = []
        self.num_opened = self.num_finished = self.num_running = self.most_bytes = 0
        self.is_idle = False
        self.num_bytes = num_bytes
        group = core.group
        self.name = f"stage {core.stage}" + (f" member {group.rank}" if group.size > 1 else "")
        self._follow = follow
        self._steps: Sequence[StepId] = ()
        self._num_completed = 0
        #: What this rank enqueued, and the outputs that arrived, with the step's number.
        self._at_hand: set[tuple[int, Task]] = set()
        self._held = 0
        self._bytes: dict[tuple[int, int], int] = {}

    @property
    def position(self) -> tuple[int, int]:
        """The step and the place in it of the task on the lane."""
        return len(self.orders) - 1, self._num_completed

    def begin(self, steps: Sequence[StepId]) -> list[ev.Event]:
        """The steps to run, one or more; returns the event that opens the first."""
        self._steps = steps
        return [self._open_next()]

    def has_begun(self, step: int, place: int) -> bool:
        """Whether it has enqueued the task at ``place`` of ``step``."""
        return len(self.orders) > step and len(self.orders[step]) > place

    def check_arrived(self, task: Task) -> None:
        """The leader of the group enqueues ``task``: all that it needs from other stages must be here."""
        number = self._step.number
        for source in self._remote_inputs(task):
            assert (number, source) in self._at_hand, f"{self.name} has not got {source}, but {task} is ordered"

    def decide(self) -> Task | None:
        """Ask the core, and enqueue what it says."""
        core, step = self.core, self._step
        run = core.decide()
        if run is None:
            self.is_idle = True
            return None
        task = run.task
        assert (step.number, task) not in self._at_hand, f"{self.name} runs {task} twice in {step}"
        for source in core.graph.inputs(task):
            assert (step.number, source) in self._at_hand, f"{self.name} runs {task} in {step} before {source}"
        self._at_hand.add((step.number, task))
        self.orders[-1].append(task)
        self.num_running += 1
        # What is held once the lane, which runs its tasks in order, has come to this one and begun it.
        self._held += task.kind is Kind.F and step.mode is Mode.TRAIN
        self.tell(ev.Enqueued(task))
        held, most = max(self._held, core.view.held), self._most_held(step)
        assert most is None or held <= most, f"{self.name} holds {held} in {step}, the limit is {most}"
        # And before the next one begins, this one has completed.
        self._held -= self._is_last(task, step) and step.mode is Mode.TRAIN
        return task

    def complete(self) -> None:
        """The task on the lane ends."""
        step, task = self._step, self.core.in_flight[0]
        self._num_completed += 1
        self.num_running -= 1
        is_last = self._is_last(task, step)
        held, owner = self.num_bytes(task), (task.microbatch, task.virtual_stage)
        self._bytes[owner] = 0 if is_last else held
        if held:
            self.most_bytes = max(self.most_bytes, sum(self._bytes.values()))
        completed = ev.Completed(task, held)
        self._follow(self, step, completed)
        self.tell(completed)

    def tell(self, event: ev.Event) -> None:
        """Something happened to this rank."""
        self.is_idle = False
        step = self._step
        if isinstance(event, ev.Arrived):
            self._at_hand.add((event.step.number, event.task))
        self.num_opened += isinstance(event, ev.StepOpened)
        for instruction in self.core.apply(event):
            match instruction:
                case ev.FinishStep(finished):
                    self._finish(step, finished)
                case ev.Release():
                    pass
                case ev.Run() | ev.Abort():
                    raise AssertionError(f"{self.name} gave {instruction}, which has no place here")
                case _:
                    self._follow(self, step, instruction)

    def _is_last(self, task: Task, step: StepId) -> bool:
        return task.kind is self.core.graph.last_kind(task.virtual_stage, step.mode)

    def _remote_inputs(self, task: Task) -> list[Task]:
        place = self.core.graph.placement
        return [one for one in self.core.graph.inputs(task) if place.stage_of(one.virtual_stage) != self.core.stage]

    def _most_held(self, step: StepId) -> int | None:
        """The bound on D; a stage that serves under the paper's rule may pass its slots."""
        chunks, slots = self.core.graph.placement.chunks, self.core.view.slots
        if slots is None or self.core.limit.rule != "paper" or chunks == 1 or step.mode is Mode.FORWARD:
            return slots
        return slots + chunks

    def _finish(self, step: StepId, finished: StepId) -> None:
        expected = sorted(self.core.graph.tasks(self.core.stage, step.microbatches, step.mode))
        if finished != step or sorted(self.orders[-1]) != expected:
            ran = " ".join(map(str, self.orders[-1]))
            raise AssertionError(f"{self.name} finished {finished} in {step} after {ran}")
        self.num_finished += 1
        if self.num_finished < len(self._steps):
            self._follow(self, step, self._open_next())

    def _open_next(self) -> ev.StepOpened:
        self.orders.append([])
        self._num_completed = 0
        self._bytes.clear()
        step = self._step
        return ev.StepOpened(step.number, step.mode, step.microbatches)

    @property
    def _step(self) -> StepId:
        """The step that it is in or about to open."""
        return self._steps[min(self.num_finished, len(self._steps) - 1)]
