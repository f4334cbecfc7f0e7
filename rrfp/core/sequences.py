"""The numbers of outputs on their way to a stage: a lost, repeated or late one is noticed when it arrives."""

from __future__ import annotations

from rrfp.core.tasks import Kind, StepId, Task
from rrfp.errors import ProtocolError


class Sequences:
    """The numbers that are due in one step of ``stage``; outputs of one kind from one stage are numbered from 0."""

    __slots__ = ("_due", "_stage", "_step_id")

    def __init__(self, stage: int, step_id: StepId) -> None:
        self._stage = stage
        self._step_id = step_id
        self._due: dict[tuple[int, Kind], int] = {}

    def check(self, task: Task, sender: int, sequence: int) -> None:
        """The output of ``task`` arrived from stage ``sender`` with number ``sequence``, which must be due."""
        channel = (sender, task.kind)
        due = self._due.get(channel, 0)
        if sequence != due:
            what = "arrived twice or late" if sequence < due else "arrived before another, or that was lost"
            raise ProtocolError(
                f"{task} from stage {sender} {what}: it is message {sequence} of its channel in {self._step_id}, "
                f"message {due} is due on stage {self._stage}"
            )
        self._due[channel] = due + 1
