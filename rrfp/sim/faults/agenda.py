"""Virtual time for ranks that may stand still or end: what happens to which rank, and when.

Everything that happens at one instant happens before any rank decides, in the order in which it was put down, as in
`rrfp.sim.engine`. What would happen to a paused rank happens when it goes on; to a dead one nothing happens.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Any

from rrfp.sim.faults.faults import Death, Fault, Pause

#: Called with a rank and whatever was put down for it.
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
        self._deaths = {fault.rank: fault.at for fault in faults if isinstance(fault, Death)}
        # (time, order of insertion, rank, handler, its argument): the order makes the heap total.
        self._heap: list[tuple[float, int, int, Handler, Any]] = []
        self._inserted = 0

    def put(self, time: float, rank: int, handle: Handler, argument: Any) -> None:
        """At ``time``, call ``handle(rank, argument)``."""
        heapq.heappush(self._heap, (time, self._inserted, rank, handle, argument))
        self._inserted += 1

    def is_dead(self, rank: int) -> bool:
        """Whether ``rank`` has ended."""
        return self._deaths.get(rank, self.now + 1.0) <= self.now

    def instant(self) -> list[int] | None:
        """Let everything of the next instant happen.

        Returns:
            The ranks that something happened to, ascending; None if nothing will ever happen again.
        """
        heap = self._heap
        if not heap:
            return None
        self.now = now = heap[0][0]
        touched: set[int] = set()
        while heap and heap[0][0] == now:
            _, _, rank, handle, argument = heapq.heappop(heap)
            if self._deaths and self.is_dead(rank):
                continue
            if self._pauses and (resumed := self._resumed(rank)) > now:
                self.put(resumed, rank, handle, argument)
                continue
            handle(rank, argument)
            touched.add(rank)
            self.happened += 1
        return sorted(touched)

    def _resumed(self, rank: int) -> float:
        """When ``rank`` goes on: now, unless it is paused."""
        time = self.now
        for pause in self._pauses:  # by their starts, so that one may run into the next
            if pause.rank == rank and pause.start <= time:
                time = max(time, pause.start + pause.seconds)
        return time
