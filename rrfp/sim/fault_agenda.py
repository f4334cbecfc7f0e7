"""Virtual time for ranks that may stand still or end: what happens to which stage, and when.

Everything that happens at one instant happens before any stage decides, in the order in which it was put down, as in
`rrfp.sim.engine`. What would happen to a paused rank happens when it goes on; to a dead one nothing happens.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Any

from rrfp.sim.fault_plan import Death, Fault, Pause

#: Called with a stage and whatever was put down for it.
Handler = Callable[[int, Any], None]


class Agenda:
    """See the module's docstring.

    Args:
        faults: what goes wrong; pauses and deaths are obeyed.
    """

    def __init__(self, faults: Iterable[Fault]) -> None:
        #: The instant that happens, in seconds, and how much has happened so far.
        self.now = 0.0
        self.happened = 0
        pauses = [fault for fault in faults if isinstance(fault, Pause)]
        self._pauses = sorted(pauses, key=lambda pause: pause.start)
        self._deaths = {fault.stage: fault.at for fault in faults if isinstance(fault, Death)}
        # (time, order of insertion, stage, handler, its argument): the order makes the heap total.
        self._heap: list[tuple[float, int, int, Handler, Any]] = []
        self._inserted = 0

    def put(self, time: float, stage: int, handle: Handler, argument: Any) -> None:
        """At ``time``, call ``handle(stage, argument)``."""
        heapq.heappush(self._heap, (time, self._inserted, stage, handle, argument))
        self._inserted += 1

    def is_dead(self, stage: int) -> bool:
        """Whether the rank of ``stage`` has ended."""
        return self._deaths.get(stage, self.now + 1.0) <= self.now

    def instant(self) -> list[int] | None:
        """Let everything of the next instant happen.

        Returns:
            The stages that something happened to, ascending; None if nothing will ever happen again.
        """
        heap = self._heap
        if not heap:
            return None
        self.now = now = heap[0][0]
        touched: set[int] = set()
        while heap and heap[0][0] == now:
            _, _, stage, handle, argument = heapq.heappop(heap)
            if self._deaths and self.is_dead(stage):
                continue
            if self._pauses and (resumed := self._resumed(stage)) > now:
                self.put(resumed, stage, handle, argument)
                continue
            handle(stage, argument)
            touched.add(stage)
            self.happened += 1
        return sorted(touched)

    def _resumed(self, stage: int) -> float:
        """When ``stage`` goes on: now, unless it is paused."""
        time = self.now
        for pause in self._pauses:  # by their starts, so that one may run into the next
            if pause.stage == stage and pause.start <= time:
                time = max(time, pause.start + pause.seconds)
        return time
