"""Why a pipeline stands still for good: who waits for what, who owes it, and which messages were sent and got lost.

Asked of the cores once every stage is idle and nothing is in flight. It knows neither time nor why a message is gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rrfp.core.stage_core import StageCore
from rrfp.core.tasks import StepId, Task
from rrfp.sim.fault_plan import MessageId

#: More entries than a step of a simulated pipeline has.
_ALL = 1 << 30


@dataclass(frozen=True, slots=True)
class Debt:
    """A message that a stage waits for.

    Attributes:
        message: which one; its sender owes it.
        was_sent: its sender has done all that it takes, so the message was lost.
    """

    message: MessageId
    was_sent: bool

    def __str__(self) -> str:
        one = self.message
        what = f"the credit for {one.task}" if one.is_credit else str(one.task)
        fate = "sent, and which never arrived" if self.was_sent else "has not sent"
        return f"stage {one.receiver} waits for {what}, which stage {one.sender} {fate}"


class Stall:
    """The debts of a pipeline in which nothing can happen any longer.

    Args:
        cores: those of all stages.
        steps: for each stage, the step that it opened last, or None before the first.
    """

    def __init__(self, cores: Sequence[StageCore], steps: Sequence[StepId | None]) -> None:
        self._cores = cores
        self._steps = steps
        #: For each stage, the tasks of its step that have not completed.
        self._undone = [{*(task for task, _ in core.awaited(_ALL)), *core.in_flight} for core in cores]
        #: Every message that some stage waits for, those that were sent first.
        self.debts = sorted((debt for core in cores for debt in self._debts(core)), key=lambda debt: not debt.was_sent)

    @property
    def lost(self) -> list[MessageId]:
        """Messages that were sent and never arrived."""
        return [debt.message for debt in self.debts if debt.was_sent]

    def __str__(self) -> str:
        lines = ["deadlock: every stage is idle and nothing is in flight", *map(str, self.debts)]
        for core in self._cores:
            for task, missing in core.awaited(1):
                if not missing:
                    cause = "is ready and not chosen" if task in core.ready else "is kept out by the memory limit"
                    lines.append(f"stage {core.stage}: {task} {cause}")
        return "\n  ".join(lines)

    def _debts(self, core: StageCore) -> Iterator[Debt]:
        step = self._steps[core.stage]
        if step is None:
            return
        where = core.graph.placement.stage_of
        owed = {source for _, missing in core.awaited(_ALL) for source in missing}
        for source in sorted(owed, key=lambda task: (task.microbatch, task.kind, task.virtual_stage)):
            if (sender := where(source.virtual_stage)) != core.stage:
                message = MessageId(step.number, source, sender, core.stage)
                yield Debt(message, self._has_run(sender, step, [source]))
        for output, peers in core.unconsumed():
            for peer in peers:
                readers = [output._replace(virtual_stage=w) for w in core.graph.successors[output.virtual_stage]]
                message = MessageId(step.number, output, peer, core.stage, is_credit=True)
                here = [reader for reader in readers if where(reader.virtual_stage) == peer]
                yield Debt(message, self._has_run(peer, step, here))

    def _has_run(self, stage: int, step: StepId, tasks: list[Task]) -> bool:
        """Whether ``stage`` has completed ``tasks``, in ``step``."""
        current = self._steps[stage]
        if current is None or current.number < step.number:
            return False
        return current.number > step.number or self._undone[stage].isdisjoint(tasks)
