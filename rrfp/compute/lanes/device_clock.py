"""Times of a device's events on the clock of its lane."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rrfp.compute.devices.base import Event


@dataclass(slots=True)
class Base:
    """A point that the device has reached, and its time on the lane's clock, as narrowly as it is known."""

    event: Event
    time: float

    def times(self, start: Event, end: Event, *, began: float, launched: float) -> tuple[float, float]:
        """When a call's work started and ended; it was made at ``began``, returned at ``launched``, and is complete."""
        started, ended = start.seconds_since(self.event), end.seconds_since(self.event)
        least, most = max(began - started, launched - ended), time.monotonic() - ended
        self.time = narrowed(self.time, least=least, most=most)
        return max(self.time + started, began), max(self.time + ended, launched)


def narrowed(estimate: float, *, least: float, most: float) -> float:
    """The time of a base on the lane's clock.

    The thread that read it was late by an unknown time. A call does not reach the device before it was made, nor is it
    observed before it ended; each such pair of times narrows the estimate.
    """
    return max(least, min(estimate, most))
