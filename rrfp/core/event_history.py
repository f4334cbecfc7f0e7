"""The events of a core in its current and its last step: enough for another core to come to the same state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rrfp.core import events as ev
from rrfp.memory.measured import Measured

#: Events of one step, at most: some 8 a task, so 16,000 tasks and about 15 MB. A longer step is not kept.
MOST_EVENTS = 1 << 17


@dataclass(frozen=True, slots=True)
class Known:
    """What outlives steps, as it is when a step begins."""

    step: int
    #: What tasks have shown so far.
    measured: tuple[Measured, ...] = ()
    #: Under a limit on bytes, the sizes seen in each mode, as `SeenSizes.to_plain` has them.
    sizes: Mapping[str, Any] | None = None
    #: Messages of the step that came before it.
    early: tuple[ev.Event, ...] = ()


@dataclass(slots=True)
class StepEvents:
    """The events of one step, from `StepOpened` on, with those early ones of the next step that came in it."""

    known: Known
    events: list[ev.Event] = field(default_factory=list)
    #: Whether the core opened the step: neither it nor its hint refused it.
    is_open: bool = False
    #: The order of microbatches that the hint asked for, if any.
    order: tuple[int, ...] | None = None


class EventHistory:
    """The events of the last and the current step of one core, in order of `StageCore.apply`.

    ``most`` bounds the events of a step; one that has more is forgotten, as are the steps before it.
    """

    __slots__ = ("_current", "_events", "_last", "_most")

    def __init__(self, most: int = MOST_EVENTS) -> None:
        self._most = most
        self.clear()

    def clear(self) -> None:
        """Forget all, until the next step begins."""
        self._last: StepEvents | None = None
        self._current: StepEvents | None = None
        self._events: list[ev.Event] = []

    def begin(self, known: Known) -> None:
        self._last, self._current = self._current, StepEvents(known)
        self._events = self._current.events

    def note(self, event: ev.Event) -> None:
        events = self._events
        events.append(event)
        if len(events) > self._most:
            self.clear()

    def opened(self, order: tuple[int, ...] | None) -> None:
        """The step is open; the hint asked for this order of microbatches."""
        if self._current is not None:
            self._current.is_open, self._current.order = True, order

    @property
    def steps(self) -> tuple[StepEvents, ...]:
        """The last step, if it is known, and the current one; empty before the first, and in one that is too long."""
        return tuple(step for step in (self._last, self._current) if step is not None)
