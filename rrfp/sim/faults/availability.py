"""Ranks that stand still or end: what would happen to a paused rank happens when it goes on, to a dead one nothing."""

from __future__ import annotations

from collections.abc import Iterable

from rrfp.sim.faults.faults import Death, Fault, Pause


class Availability:
    """When a rank takes in what happens to it; see `rrfp.sim.cluster.event_queue.Availability`.

    Args:
        faults: what goes wrong; pauses and deaths are obeyed.
    """

    def __init__(self, faults: Iterable[Fault]) -> None:
        pauses = [fault for fault in faults if isinstance(fault, Pause)]
        self._pauses = sorted(pauses, key=lambda pause: pause.start)
        self._deaths = {fault.rank: fault.at for fault in faults if isinstance(fault, Death)}

    def __call__(self, rank: int, now: float) -> float | None:
        """When ``rank`` takes in what happens to it ``now``: now, unless it is paused; None if it has ended."""
        if self.is_dead(rank, now):
            return None
        time = now
        for pause in self._pauses:  # by their starts, so that one may run into the next
            if pause.rank == rank and pause.start <= time:
                time = max(time, pause.start + pause.seconds)
        return time

    @property
    def is_limited(self) -> bool:
        """Whether any rank ever stands still or ends."""
        return bool(self._pauses or self._deaths)

    def is_dead(self, rank: int, now: float) -> bool:
        """Whether ``rank`` has ended."""
        return self._deaths.get(rank, now + 1.0) <= now
