"""Times the pauses of one stage: whether one begins, and its end. The core decides which there may be.

Drivers give it their clock: the loop's in the shell, virtual time in simulations. So all idle alike.
"""

from __future__ import annotations

from collections.abc import Callable

from rrfp.core import events as ev
from rrfp.core.stage_core import StageCore
from rrfp.model.tasks import Task


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
        """Whether pause ``number`` has not ended."""
        return number == self._num_begun and self._core.is_pausing

    def end(self) -> None:
        """The longest wait of the pause that is on is over."""
        self._core.apply(ev.PauseEnded())
