"""The lane's side of an offer in a simulated cluster; see `rrfp.arbiter.offers`."""

from __future__ import annotations

from rrfp.core.tasks import Task


class TaskSlot:
    """Holds the task that is offered to a simulated lane.

    Attributes:
        task: what is offered; None once the lane has begun it.
    """

    def __init__(self) -> None:
        self.task: Task | None = None

    def offer(self, task: Task) -> None:
        """Let the lane begin ``task`` when its running one has ended."""
        assert self.task is None, f"{task} is offered beside {self.task}"
        self.task = task

    def withdraw(self) -> bool:
        """Take the task back; False if the lane has begun it."""
        return self.pop() is not None

    def pop(self) -> Task | None:
        """The lane begins what is offered, if anything is."""
        task, self.task = self.task, None
        return task
