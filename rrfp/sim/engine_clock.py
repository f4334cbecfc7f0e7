"""The engine's heap of events seen as a clock: the time, and what wakes a stage at a later one, for its pauses.

It is not the engine itself, so that a run makes no cycles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappush

from rrfp.core import events as ev


@dataclass(frozen=True, slots=True)
class PauseOver:
    """The longest wait of pause ``number`` of a stage is over."""

    number: int


#: What happens on a stage at a time.
Happening = ev.Arrived | ev.Completed | ev.Announced | PauseOver


class EngineClock:
    """See the module's docstring; ``heap`` has (time, order of insertion, stage, event), ``pushed`` the next order.

    Attributes:
        now: virtual seconds.
    """

    def __init__(self, heap: list[tuple[float, int, int, Happening]], pushed: Iterator[int]) -> None:
        self.now = 0.0
        self._heap = heap
        self._pushed = pushed

    def time(self) -> float:
        """Virtual seconds."""
        return self.now

    def wake(self, stage: int, seconds: float, pause: int) -> None:
        """``pause`` of ``stage`` is over after ``seconds``."""
        heappush(self._heap, (self.now + seconds, next(self._pushed), stage, PauseOver(pause)))
