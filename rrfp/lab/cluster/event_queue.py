"""Virtual time: what happens to which rank, and when.

Everything that happens at one instant happens before any rank decides, in the order in which it was put into the queue,
as in `rrfp.engine.engine`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

#: Called with the rank and the argument that were put into the queue.
Handler = Callable[[int, Any], None]


class EventQueue:
    """Events of all ranks in order of time."""

    def __init__(
        self,
        # For ranks that may stand still or end, when a rank takes in what happens to it at a time: then,
        # later while it stands still, never (None) once it has ended. None: all ranks are always there.
        availability: Callable[[int, float], float | None] | None = None,
    ) -> None:
        self.now = 0.0
        self.num_happened = 0
        self._availability = availability
        # (time, order of insertion, rank, handler, its argument): the order makes the heap total.
        self._heap: list[tuple[float, int, int, Handler, Any]] = []
        self._num_inserted = 0

    def put(self, time: float, rank: int, handle: Handler, argument: Any) -> None:
        """At ``time``, call ``handle(rank, argument)``."""
        heapq.heappush(self._heap, (time, self._num_inserted, rank, handle, argument))
        self._num_inserted += 1

    def instant(self) -> list[int] | None:
        """Let the next instant happen; returns the ranks it touched, None at the end."""
        heap = self._heap
        if not heap:
            return None
        self.now = now = heap[0][0]
        touched: set[int] = set()
        while heap and heap[0][0] == now:
            _, _, rank, handle, argument = heapq.heappop(heap)
            if self._availability is not None:
                time = self._availability(rank, now)
                if time is None:
                    continue
                if time > now:
                    self.put(time, rank, handle, argument)
                    continue
            handle(rank, argument)
            touched.add(rank)
            self.num_happened += 1
        return sorted(touched)
