"""Times the pauses of one stage: whether one begins, and its end. The core decides which there may be.

Drivers give it their clock: the loop's in the shell, virtual time in simulations. So all idle alike.
"""

from __future__ import annotations

from collections.abc import Callable

from rrfp.core import events as ev
from rrfp.core.stage_core import StageCore
from rrfp.model.tasks import Task


class PauseTimer:
    """The pauses of ``core``.

    Args:
        now: the time, in seconds.
        wake: called with seconds and a number: after these seconds `over` must be called with the number.
    """

    def __init__(self, core: StageCore, now: Callable[[], float], wake: Callable[[float, int], None]) -> None:
        self._core = core
        self._now = now
        self._wake = wake
        #: The forward that was announced last, and when.
        self._announced: Task | None = None
        self._announced_at = 0.0
        self._num_begun = 0

    def announced(self, event: ev.Announced) -> None:
        """``event`` reaches the core now."""
        self._announced, self._announced_at = event.task, self._now()

    def idles(self, pause: ev.Pause) -> bool:
        """Whether the stage, whose core has decided ``pause``, idles; if not, the core decides on a task next."""
        if self._core.is_pausing:
            return True
        if self._announced != pause.awaited or pause.due - (self._now() - self._announced_at) > pause.longest:
            self._core.apply(ev.PauseEnded())
            return False
        self._core.apply(ev.PauseBegun())
        self._num_begun += 1
        self._wake(pause.longest, self._num_begun)
        return True

    def over(self, number: int) -> bool:
        """The longest wait of pause ``number`` is over; False if it had ended before."""
        if number != self._num_begun or not self._core.is_pausing:
            return False
        self._core.apply(ev.PauseEnded())
        return True
