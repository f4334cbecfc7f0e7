"""The arbiter: hands the lane what the core decides, whenever something has happened. It has no policy and no loop.

Who reports an event to the core that may change the decision calls `Arbiter.kick`. The driver of the arbiter lets it
decide once all events of one instant are applied: `rrfp.arbiter.loop` on an event loop, the simulator at the end of a
virtual instant.
"""

from __future__ import annotations

from collections.abc import Callable

from rrfp.arbiter.offers import Offers
from rrfp.arbiter.pauses import PauseTimer
from rrfp.core import events as ev
from rrfp.core.stage_core import StageCore
from rrfp.core.usage import WaitCause
from rrfp.model.tasks import Task


class Arbiter:
    """Dispatches the tasks of one rank, ``depth`` of them enqueued and not complete at most.

    ``dispatch`` hands a task to the lane and reports `Enqueued` to the core; ``waiting`` is called with the cause each
    time the lane is left with nothing to do.
    """

    def __init__(
        self,
        core: StageCore,
        depth: int,
        dispatch: Callable[[Task], None],
        waiting: Callable[[WaitCause], None],
        offers: Offers | None = None,
        pauses: PauseTimer | None = None,
    ) -> None:
        self.is_due = False
        self.on_kick: Callable[[], object] = ignore_kick
        self._core = core
        self._depth = depth
        self._dispatch = dispatch
        self._waiting = waiting
        self._offers = offers
        self._pauses = pauses

    def kick(self) -> None:
        """Something happened: a decision is due."""
        if not self.is_due:
            self.is_due = True
            self.on_kick()

    def decide(self) -> None:
        """Dispatch what is ready now, and what becomes ready by that."""
        while self.is_due:
            self.decide_once()

    def decide_once(self) -> None:
        """Dispatch what is ready now, and offer what comes next. Another decision may be due afterwards."""
        self.is_due = False
        core = self._core
        while (in_flight := core.num_in_flight) < self._depth:
            if (task := self._next()) is None:
                break
            self._dispatch(task)
        if in_flight == self._depth and self._offers is not None:
            self._offers.revise()
        elif not in_flight:
            self._waiting(self._wait_cause())

    def dispatch_next(self) -> bool:
        """Dispatch one task; False if the lane is full, or if nothing is ready."""
        task = self._next() if self._core.num_in_flight < self._depth else None
        if task is not None:
            self._dispatch(task)
        return task is not None

    def _next(self) -> Task | None:
        """The task to dispatch; None if nothing is ready, or the stage idles."""
        decision = self._core.decide()
        if type(decision) is ev.Idle:
            decision = None if self._core.num_in_flight else self._unless_idle(decision)
        return None if decision is None else decision.task

    def _unless_idle(self, pause: ev.Idle) -> ev.Run | ev.Idle | None:
        """What the core decides instead of ``pause``; None if the stage idles."""
        if self._pauses is None:
            self._core.apply(ev.PauseEnded())
        elif self._pauses.idles(pause):
            return None
        return self._core.decide()

    def before_completion(self) -> None:
        """The loop has heard that a task ended. Called before the core hears of it; see `rrfp.arbiter.offers`."""
        if self._offers is not None:
            self._offers.withdraw()

    def _wait_cause(self) -> WaitCause:
        return self._core.wait_cause()


def ignore_kick() -> None:
    """No loop waits for kicks: the arbiter is driven from outside."""
