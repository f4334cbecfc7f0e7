"""The offered task: the next decision, which the lane begins by itself when its call returns.

Without an offer a lane that has run its task idles until the loop has heard of that, decided, and woken it. So while
the lane is full the arbiter offers it what the core would run next. Nothing is committed by that: each event revises
the offer, and only a task that the lane has begun is enqueued.

The loop learns late that the lane has begun an offered task: when it withdraws the offer, and cannot. It withdraws
before it offers another task and before the core hears `Completed`. So the core hears ``Enqueued(next)`` before
``Completed(previous)``, as at a depth of 2, and never decides about a lane with room while a begun task is unreported.

A task may be begun between any two events, on a decision from before the last of them. It is ready all the same,
because a ready task stays ready under every event but the `Enqueued` of another one:

- inputs, reports of followers and the tasks before it in a forced order only become more;
- the drain order of a full stage (the paper's rule) and the lowest microbatch that is not forwarded (the reserve rule)
  change when a task is enqueued. So do the slots that are taken; any other event only frees some (forward only:
  `Consumed`, and `Completed` of a reader here);
- bytes are the exception: `Completed` and `HeldReported` may show that a task holds more than was expected. Under a
  limit on bytes nothing is offered, so it decides on what the task before has left behind, as ever.

A group needs no offers. Under a leader each rank has its next task enqueued behind the running one, from the log (depth
2); in an agreement no task may begin before all ranks have proposed it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rrfp.core import events as ev
from rrfp.core.stage_core import StageCore
from rrfp.model.tasks import Task


class OfferedLane(Protocol):
    """The lane's side: it has room for one offered task."""

    def offer(self, task: Task) -> None:
        """Let the lane run ``task`` when its running task has returned."""

    def withdraw(self) -> bool:
        """Take the offered task back; False if the lane has begun it: then it counts as enqueued there."""
        ...


def may_offer(core: StageCore, depth: int) -> bool:
    """Whether tasks may be offered to a lane of ``depth``; see the module's docstring."""
    return depth == 1 and core.group.size == 1 and core.limit.bytes is None


class Offers:
    """The offers to one lane, one at a time; ``begun`` reports `Enqueued` of one that the lane has begun."""

    def __init__(self, core: StageCore, lane: OfferedLane, begun: Callable[[Task], None]) -> None:
        self._core = core
        self._lane = lane
        self._begun = begun
        self._task: Task | None = None

    def revise(self) -> None:
        """The lane is full: offer the task that the core would run next, or none, as where it would rather wait."""
        decision = self._core.decide()
        task = decision.task if type(decision) is ev.Run else None
        if task == self._task:
            return
        # If the lane was faster, the end of the task before it is on its way to the loop, and another decision with it.
        if self.withdraw() and task is not None:
            self._lane.offer(task)
            self._task = task

    def withdraw(self) -> bool:
        """Withdraw what is offered; False if the lane has begun it, which the core has heard then."""
        task, self._task = self._task, None
        if task is None or self._lane.withdraw():
            return True
        self._begun(task)
        return False
