"""The arbiter: hands the lane what the core decides, whenever something has happened. It has no policy and no loop.

Who reports an event to the core that may change the decision calls `Arbiter.kick`. The driver of the arbiter lets it
decide once all events of one instant are applied: `rrfp.arbiter.loop` on an event loop, the simulator at the end of a
virtual instant. Its clock also times the pauses of the stage (`PauseTimer`), so that all drivers idle alike.
"""

from __future__ import annotations

from collections.abc import Callable

from rrfp.arbiter.offers import Offers
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


class PauseTimer:
    """The pauses of ``core``; ``wake`` must end the pause of a number after so many seconds, if it `is_on` then."""

    def __init__(self, core: StageCore, now: Callable[[], float], wake: Callable[[float, int], None]) -> None:
        self._core = core
        self._now = now
        self._wake = wake
        #: The forward whose beginning was reported last, and when.
        self._begun: Task | None = None
        self._begun_at = 0.0
        self._num_begun = 0

    def begun_reported(self, event: ev.BegunReported) -> None:
        """``event`` reaches the core now."""
        self._begun, self._begun_at = event.task, self._now()

    def idles(self, pause: ev.Idle) -> bool:
        """Whether the stage, whose core has decided ``pause``, idles; if not, the core decides on a task next."""
        if self._core.is_pausing:
            return True
        if self._begun != pause.awaited or pause.due - (self._now() - self._begun_at) > pause.longest:
            self._core.apply(ev.PauseEnded())
            return False
        self._core.apply(ev.PauseBegun())
        self._num_begun += 1
        self._wake(pause.longest, self._num_begun)
        return True

    def is_on(self, number: int) -> bool:
        return number == self._num_begun and self._core.is_pausing

    def end(self) -> None:
        """The longest wait of the pause that is on is over."""
        self._core.apply(ev.PauseEnded())
